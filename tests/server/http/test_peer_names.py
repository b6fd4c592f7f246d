"""Names of other servers' fields and paths: a refusal says what stands for them here."""

from pathlib import Path

import pytest

from server.http.anthropic.requests import MessagesRequest
from server.http.chat.requests import ChatRequest
from server.http.common.peer_fields import OTHER_FIELDS, OTHER_ROUTES, WITHOUT_FIELD
from server.http.common.validation import RequestModel
from server.http.openai.requests import CompletionRequest
from server.http.peer_routes import OTHER_PATHS
from server.http.pooling.requests import EmbeddingRequest, RerankRequest, ScoreRequest
from server.http.responses.requests import ResponsesRequest
from support.api.edge_fakes import served

COMPLETIONS, CHAT, RESPONSES, MESSAGES = "/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages"
REQUESTS: tuple[type[RequestModel], ...] = (
    CompletionRequest, ChatRequest, ResponsesRequest, MessagesRequest, EmbeddingRequest, ScoreRequest, RerankRequest,
)  # fmt: skip


@pytest.mark.parametrize(
    ("path", "field", "said"),
    [
        (CHAT, "grammar", "The field 'grammar' is unknown; use structured_outputs.grammar."),
        (COMPLETIONS, "json_schema", "The field 'json_schema' is unknown; use structured_outputs.json."),
        (CHAT, "lora_path", "The field 'lora_path' is unknown: adapters are not implemented."),
        (CHAT, "max_output_tokens", "The field 'max_output_tokens' is unknown; use max_completion_tokens."),
        (COMPLETIONS, "max_new_tokens", "The field 'max_new_tokens' is unknown; use max_tokens."),
        (RESPONSES, "max_tokens", "The field 'max_tokens' is unknown; use max_output_tokens."),
        (RESPONSES, "response_format", "The field 'response_format' is unknown; use text.format."),
        (RESPONSES, "messages", "The field 'messages' is unknown: it belongs to /v1/chat/completions or /v1/messages."),
        (MESSAGES, "stop", "The field 'stop' is unknown; use stop_sequences."),
        (MESSAGES, "reasoning_effort", "The field 'reasoning_effort' is unknown; use output_config.effort."),
        (CHAT, "temprature", "The field 'temprature' is unknown; did you mean temperature?"),
        (CHAT, "colour", "The field 'colour' is unknown."),
        (CHAT, "a" * 1_000_000, f"The field '{'a' * 64}' is unknown."),
    ],
)
def test_an_unknown_field_is_refused_with_what_stands_for_it(folder: Path, path: str, field: str, said: str) -> None:
    error = served(folder).post(path, {field: "x"}).json()["error"]
    assert (error["code"], error["message"]) == ("unknown_field", said)


def test_each_field_of_others_is_none_here_and_stands_for_one_that_is() -> None:
    fields = [set(model.model_fields) for model in REQUESTS]
    for name, ours in OTHER_FIELDS.items():
        heads = {it.partition(".")[0] for it in ours}
        assert any(name not in known and heads & known for known in fields), name
    assert not (WITHOUT_FIELD.keys() | OTHER_ROUTES.keys()) & OTHER_FIELDS.keys()
    assert not WITHOUT_FIELD.keys() & set.union(*fields)


@pytest.mark.parametrize(
    ("path", "ours"),
    [
        ("/api/chat", CHAT),
        ("/api/tags", "/v1/models"),
        ("/generate", COMPLETIONS),
        ("/info", "/v1/models"),
        ("/health_generate", "/readyz"),
        ("/chat/completions", CHAT),  # a base URL without /v1
        ("/v1/v1/messages", MESSAGES),  # one that has it, for Anthropic's client
    ],
)
def test_a_path_of_others_is_a_404_that_names_ours(folder: Path, path: str, ours: str) -> None:
    for method in ("GET", "POST"):  # also without a Content-Type: nothing is there whatever it says
        answer = served(folder).request(method, path)
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "not_found")
        assert answer.json()["error"]["message"] == f"There is nothing at {path!r}; use {ours!r}."


def test_each_path_of_others_is_none_here_and_stands_for_one_that_is(folder: Path) -> None:
    it = served(folder)
    here = set(it.get("/openapi.json").json()["paths"]) | {"/v1/embeddings"}
    assert not OTHER_PATHS.keys() & here
    assert set(OTHER_PATHS.values()) <= here


def test_a_value_that_is_nearly_one_of_those_allowed_is_recognised(folder: Path) -> None:
    error = served(folder).post(CHAT, {"messages": [{"role": "User", "content": "a"}]}).json()["error"]
    assert error["message"].endswith("got a string of length 4; did you mean user?")
    error = served(folder).post(CHAT, {"messages": [{"role": "user", "content": None}]}).json()["error"]
    assert error["message"].startswith("The field 'messages[0].content' is missing or null; only an assistant's")


def test_a_post_to_a_path_with_a_parameter_must_be_json(folder: Path) -> None:
    answer = served(folder).request("POST", "/v1/responses/resp_a/cancel", content=b"x")
    assert (answer.status_code, answer.json()["error"]["code"]) == (415, "unsupported_media_type")
