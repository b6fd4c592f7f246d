"""The tables of fields in docs/api.md: every field of a client has a row, and the application does what rows say."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
from anthropic.types import message_count_tokens_params, message_create_params
from anthropic.types.beta import message_count_tokens_params as beta_count_tokens_params
from anthropic.types.beta import message_create_params as beta_message_create_params
from openai.types import completion_create_params, embedding_create_params
from openai.types.chat import completion_create_params as chat_create_params
from openai.types.responses import response_create_params
from tokenizers import processors

from server.model.load.pooling import PoolingModel
from server.protocol.messages import FinishReason, TokenDelta
from server.settings import Settings, Task
from support.api.edge_fakes import (
    TIMES,
    USES,
    ScriptedEngine,
    Served,
    delta,
    make_services,
    playing,
    served,
    with_model,
    write_tokenizer,
)
from support.models.tiny_qwen3 import write_words

PAGE = Path(__file__).resolve().parents[3] / "docs" / "api.md"
PATHS = {
    "completions": "/v1/completions", "chat": "/v1/chat/completions", "responses": "/v1/responses",
    "messages": "/v1/messages", "count_tokens": "/v1/messages/count_tokens", "embeddings": "/v1/embeddings",
    "score": "/v1/score", "rerank": "/v1/rerank",
}  # fmt: skip
USER = [{"role": "user", "content": "Hi"}]
BASES: dict[str, dict[str, Any]] = {
    "completions": {"prompt": "ab"}, "chat": {"messages": USER}, "responses": {"input": "Hi"},
    "messages": {"max_tokens": 16, "messages": USER}, "count_tokens": {"messages": USER},
    "embeddings": {"input": "abcd"}, "score": {"text_1": "q", "text_2": ["d"]},
    "rerank": {"query": "q", "documents": ["d", "longer"]},
}  # fmt: skip

# --- what clients may send ---

OPENAI = {
    "completions": completion_create_params.CompletionCreateParamsStreaming,
    "chat": chat_create_params.CompletionCreateParamsStreaming,
    "responses": response_create_params.ResponseCreateParamsStreaming,
    "embeddings": embedding_create_params.EmbeddingCreateParams,
}
ANTHROPIC = {
    "messages": (
        message_create_params.MessageCreateParamsStreaming,
        beta_message_create_params.MessageCreateParamsStreaming,
    ),
    "count_tokens": (
        message_count_tokens_params.MessageCountTokensParams,
        beta_count_tokens_params.MessageCountTokensParams,
    ),
}
HEADERS = {"betas", "user_profile_id"}  # which the client sends as headers
# Of the request models of vLLM 0.26.0 beside OpenAI's fields, and the older names that its clients still send.
VLLM_SAMPLING = (
    "use_beam_search top_k min_p repetition_penalty length_penalty stop_token_ids include_stop_str_in_output "
    "ignore_eos min_tokens skip_special_tokens spaces_between_special_tokens truncate_prompt_tokens truncation_side "
    "allowed_token_ids prompt_logprobs bad_words add_special_tokens response_format structured_outputs priority "
    "request_id return_tokens_as_token_ids return_token_ids return_token_offsets cache_salt kv_transfer_params "
    "ec_transfer_params vllm_xargs repetition_detection thinking_token_budget best_of guided_json guided_regex "
    "guided_choice guided_grammar guided_decoding_backend guided_whitespace_pattern logits_processors logprob_token_ids"
)
VLLM_POOLING = (
    "model user truncate_prompt_tokens truncation_side request_id priority mm_processor_kwargs cache_salt "
    "chat_template chat_template_kwargs media_io_kwargs use_activation"
)
VLLM = {
    "completions": f"{VLLM_SAMPLING} prompt_embeds echo",
    "chat": f"{VLLM_SAMPLING} echo reasoning_effort include_reasoning add_generation_prompt continue_final_message "
    "documents chat_template chat_template_kwargs media_io_kwargs mm_processor_kwargs return_prompt_text "
    "return_assistant_tokens_mask",
    "responses": "top_k skip_special_tokens include_stop_str_in_output presence_penalty frequency_penalty request_id "
    "media_io_kwargs mm_processor_kwargs priority cache_salt enable_response_messages previous_input_messages "
    "structured_outputs repetition_penalty seed stop ignore_eos vllm_xargs kv_transfer_params chat_template_kwargs "
    "logit_bias include_reasoning ec_transfer_params",
    "messages": "chat_template_kwargs kv_transfer_params ec_transfer_params",
    "count_tokens": "chat_template_kwargs",
    "embeddings": f"{VLLM_POOLING} add_special_tokens embed_dtype endianness normalize messages add_generation_prompt "
    "continue_final_message",
    "score": f"{VLLM_POOLING} text_1 text_2 data_1 data_2 queries documents items instruction max_tokens_per_query "
    "max_tokens_per_doc",
    "rerank": f"{VLLM_POOLING} query documents top_n instruction max_tokens_per_query max_tokens_per_doc",
}
ROUTERS = {  # of sglang, added by routers and sent by its clients
    "completions": "no_stop_trim return_hidden_states regex ebnf",
    "chat": "no_stop_trim return_hidden_states regex ebnf separate_reasoning stream_reasoning",
}

# --- how a field is seen to work ---

TOOLS = [{"type": "function", "function": {"name": "clock", "parameters": {"type": "object"}}}]
FLAT_TOOLS = [{"type": "function", "name": "clock", "parameters": {"type": "object"}}]
ANTHROPIC_TOOLS = [{"name": "clock", "input_schema": {"type": "object"}}]
CALL = '<tool_call>\n{"name": "clock", "arguments": {}}\n</tool_call>'
OBJECT = {"type": "json_object"}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
# A field's value, or all that is sent beside what the same request without the field has.
VALUES: dict[str, Any] = {
    "model": "other", "stream": True, "stream_options": {"include_usage": True}, "n": 2, "max_tokens": 7,
    "max_completion_tokens": 7, "max_output_tokens": 7, "min_tokens": 3, "temperature": 0.5, "top_p": 0.5, "top_k": 5,
    "min_p": 0.5, "seed": 5, "repetition_penalty": 1.5, "presence_penalty": 0.5, "frequency_penalty": 0.5, "stop": "l",
    "stop_token_ids": [5], "ignore_eos": True, "include_stop_str_in_output": True, "skip_special_tokens": False,
    "spaces_between_special_tokens": False, "truncate_prompt_tokens": 1, "truncation_side": "right",
    "embeddings.truncation_side": "left", "logit_bias": {"5": 1}, "allowed_token_ids": [5], "bad_words": ["x"],
    "response_format": OBJECT, "structured_outputs": {"regex": "a+"}, "guided_json": SCHEMA, "guided_regex": "a+",
    "guided_choice": ["a"], "guided_grammar": 'start: "a"', "regex": "a+",
    "ebnf": 'root ::= "a"', "prompt_logprobs": 1, "return_token_ids": True,
    "return_tokens_as_token_ids": True, "cache_salt": "salt", "priority": -1, "timeout": 1e-9, "hallmark": True,
    "receipt": True, "exact_sampling": {"bad_words": [[104]]},
    "metadata": {"a": "b"}, "messages.metadata": {"user_id": "u"}, "store": True, "responses.store": False,
    "service_tier": "auto", "prediction": {"type": "content", "content": "x"}, "cache_control": {"type": "ephemeral"},
    "prompt_cache_options": {"mode": "explicit"}, "prompt_cache_retention": "24h",
    "request_id": "r", "user": "u", "safety_identifier": "u", "prompt_cache_key": "u", "prompt": "b",
    "add_special_tokens": False, "chat.add_special_tokens": True, "verbosity": "low",
    "echo": True, "logprobs": 1, "chat.logprobs": True, "top_logprobs": 2,
    "messages": [{"role": "user", "content": "Other"}], "tools": TOOLS, "responses.tools": FLAT_TOOLS,
    "messages.tools": ANTHROPIC_TOOLS, "count_tokens.tools": ANTHROPIC_TOOLS, "tool_choice": "none",
    "messages.tool_choice": {"type": "none"}, "count_tokens.tool_choice": {"type": "none"},
    "parallel_tool_calls": False, "reasoning_effort": "low", "include_reasoning": False,
    "chat_template_kwargs": {"enable_thinking": True}, "add_generation_prompt": False, "continue_final_message": True,
    "documents": [{"text": "d"}], "mm_processor_kwargs": {"max_pixels": 4096},
    "input": "Other", "instructions": "Be brief.", "previous_response_id": "resp_none",
    "text": {"format": OBJECT}, "reasoning": {"effort": "low"}, "system": "Be brief.",
    "thinking": {"type": "adaptive"}, "output_config": {"effort": "low"}, "stop_sequences": ["l"],
    "context_management": {"edits": []}, "client_metadata": {"a": "b"}, "include": ["web_search_call.action.sources"],
    "encoding_format": "base64", "dimensions": 2, "text_1": "other", "text_2": ["other"], "query": "other",
    "rerank.documents": ["other", "one"], "instruction": "Other.", "top_n": 1, "return_documents": False,
}  # fmt: skip
# Fields without which another one has nothing to do.
BESIDE: dict[str, dict[str, Any]] = {
    "stream_options": {"stream": True},
    "responses.stream_options": {},  # it has no field of its own that is implemented: a stream is what it needs
    "include_stop_str_in_output": {"stop": "l"},
    "truncation_side": {"truncate_prompt_tokens": 1},
    "embeddings.truncation_side": {"truncate_prompt_tokens": 3},
    "return_tokens_as_token_ids": {"logprobs": 1},
    "chat.return_tokens_as_token_ids": {"logprobs": True},
    "top_logprobs": {"logprobs": True},
    "chat.tool_choice": {"tools": TOOLS},
    "chat.parallel_tool_calls": {"tools": TOOLS},
    "responses.tool_choice": {"tools": FLAT_TOOLS},
    "responses.parallel_tool_calls": {"tools": FLAT_TOOLS},
    "messages.tool_choice": {"tools": ANTHROPIC_TOOLS},
    "count_tokens.tool_choice": {"tools": ANTHROPIC_TOOLS},
}
TEMPLATE = (
    '{# "arguments" <think> #}{% for t in tools or [] %}<tool_call>{{ t.function.name }}{% endfor %}'
    "{{ reasoning_effort }}{{ verbosity }}{{ enable_thinking }}{% for d in documents or [] %}{{ d.text }}{% endfor %}"
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
SPECIAL = 257  # a token that the answer has


@dataclass(frozen=True, slots=True)
class Row:
    route: str
    field: str
    verdict: str
    note: str


TABLES = {
    "generation": ("completions", "chat"), "responses": ("responses",), "messages": ("messages", "count_tokens"),
    "pooling": ("embeddings", "score", "rerank"),
}  # fmt: skip
VERDICTS = {"field": "honoured", "without effect": "no effect", "refused": "refused"}


def rows_of(text: str) -> list[Row]:
    """A row for each route of each field in a page's tables."""
    found = []
    for name, routes in TABLES.items():
        [tables] = re.findall(rf"<!-- table: {name} -->\n(.*?)\n<!-- end -->", text, re.DOTALL)
        for table in tables.split("\n\n"):
            head, _, *lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.split("\n")]
            for fields, *only, note in lines:
                of = only[0].split(", ") if only and only[0] else routes
                found += [
                    Row(route, field, VERDICTS[head[0]], note)
                    for route in of
                    for field in re.findall(r"`([^`]+)`", fields)
                ]
    return found


ROWS = rows_of(PAGE.read_text())


def fields_of(kind: Any) -> set[str]:
    """The fields of a TypedDict, inherited ones too."""
    return set(kind.__required_keys__ | kind.__optional_keys__)


def known(route: str) -> set[str]:
    return {row.field for row in ROWS if row.route == route}


@pytest.mark.parametrize("route", OPENAI)
def test_every_field_of_openais_client_has_a_row(route: str) -> None:
    assert fields_of(OPENAI[route]) - known(route) == set()


@pytest.mark.parametrize("route", ANTHROPIC)
def test_every_field_of_anthropics_client_has_a_row(route: str) -> None:
    for kind in ANTHROPIC[route]:
        assert fields_of(kind) - HEADERS - known(route) == set()


@pytest.mark.parametrize("route", VLLM)
def test_every_field_of_vllm_and_routers_has_a_row(route: str) -> None:
    assert {*VLLM[route].split(), *ROUTERS.get(route, "").split()} - known(route) == set()


def generating(folder: Path) -> Served:
    """A server whose answers reason, have a special token and call twice."""
    write_tokenizer(folder, template=TEMPLATE, special=["<|x|>"])
    path = folder / "tokenizer.json"
    tokenizer = tokenizers.Tokenizer.from_file(str(path))
    tokenizer.post_processor = processors.TemplateProcessing(single="<|x|> $A", special_tokens=[("<|x|>", SPECIAL)])
    tokenizer.save(str(path))
    first = delta("<think>Hm</think>Hel", is_first=True)
    script = playing(first, TokenDelta("", [SPECIAL]), delta(f"lo{CALL}{CALL}"), delta("", FinishReason.STOP))
    return served(folder, script)


def pooling(folder: Path, task: Task) -> Served:
    write_words(folder)

    def script(prompt: list[int]) -> list[TokenDelta]:
        pooled = np.array([len(prompt) / 100, 2.0, *([3.0, 4.0] if task is Task.EMBED else [])], "<f4").tobytes()
        return [TokenDelta("", [], FinishReason.LENGTH, times=TIMES, path_uses=USES, pooled=pooled)]

    engine = ScriptedEngine(script)
    model = PoolingModel(task, dimensions=range(1, 5)) if task is Task.EMBED else PoolingModel(task)
    return Served(with_model(make_services(folder, engine, Settings(model="tiny")), pooling=model), engine)


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Served]:
    """A server of each route."""
    general = generating(tmp_path_factory.mktemp("general"))
    embedding = pooling(tmp_path_factory.mktemp("embed"), Task.EMBED)
    scoring = pooling(tmp_path_factory.mktemp("score"), Task.SCORE)
    own = {"embeddings": embedding, "score": scoring, "rerank": scoring}
    return {route: own.get(route, general) for route in PATHS}


@dataclass(frozen=True, slots=True)
class Seen:
    """Effects of a request, without what differs each time."""

    status: int
    submitted: list[Any]
    answer: str


def seen(it: Served, route: str, body: Mapping[str, Any]) -> Seen:
    num_before = len(it.engine.submitted)
    answer = it.post(PATHS[route], body)
    engine = it.engine
    told = zip(engine.submitted, engine.salts, engine.priorities, strict=True)
    submitted = [(prompt, sampling, *rest) for (_, prompt, sampling), *rest in list(told)[num_before:]]
    text = re.sub(r'"(\w*id|created|created_at|completed_at)":("[^"]*"|\d+)', "", answer.text)
    return Seen(answer.status_code, submitted, text)


def value_of(route: str, field: str) -> Any:
    return VALUES.get(f"{route}.{field}", VALUES.get(field))


def bodies_of(row: Row) -> tuple[dict[str, Any], dict[str, Any]]:
    """A request without the field, and one with it."""
    value = value_of(row.route, row.field)
    assert value is not None, f"{row.route}.{row.field} has no example in VALUES"
    without = BASES[row.route] | BESIDE.get(f"{row.route}.{row.field}", BESIDE.get(row.field, {}))
    return without, without | {row.field: value}


def rows_with(verdict: str, route: str) -> Iterator[Row]:
    return (row for row in ROWS if row.verdict == verdict and row.route == route)


@pytest.mark.parametrize("route", PATHS)
def test_honoured_fields_reach_the_engine_or_the_answer(servers: dict[str, Served], route: str) -> None:
    it, ignored, num_seen = servers[route], [], 0
    assert seen(it, route, BASES[route]) == seen(it, route, BASES[route])
    for row in rows_with("honoured", route):
        num_seen += 1
        without, given = bodies_of(row)
        if seen(it, route, without) == seen(it, route, given):
            ignored.append(row.field)
    assert ignored == []
    assert num_seen > 2


@pytest.mark.parametrize("route", PATHS)
def test_fields_without_effect_are_taken(servers: dict[str, Served], route: str) -> None:
    it, num_seen = servers[route], 0
    for row in rows_with("no effect", route):
        num_seen += 1
        without, given = bodies_of(row)
        expected, found = seen(it, route, without), seen(it, route, given)
        assert (found.status, found.submitted) == (200, expected.submitted), row
    assert num_seen > 0


@pytest.mark.parametrize("route", PATHS)
def test_refused_fields_are_400_with_the_message(servers: dict[str, Served], route: str) -> None:
    num_seen = 0
    for row in rows_with("refused", route):
        answer = servers[route].post(PATHS[route], BASES[route] | {row.field: "something"})
        error = answer.json()["error"]
        assert (answer.status_code, error["code"], error["param"]) == (400, "unsupported_field", row.field)
        but = f"; all it may be is {row.note.replace('`', '')}" if row.note else ""
        assert error["message"] == f"The field {row.field!r} is not implemented{but}."
        num_seen += 1
    assert num_seen


def test_a_row_that_is_not_true_is_noticed() -> None:
    text = PAGE.read_text()
    edited = re.sub(r"(`best_of`[^|]*\|[^|]*\|) `1` \|", r"\1 `2` |", text)
    assert edited != text
    assert rows_of(edited) != ROWS
    assert [row.verdict for row in ROWS].count("honoured") > 100
