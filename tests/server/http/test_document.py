"""/openapi.json is true: routes, bounds, refusals, answers and keys are those of the application."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fastapi.routing import APIRoute
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator
from jsonschema.validators import extend
from pydantic import BaseModel

from server.errors import HallmarkError
from server.http.anthropic import schemas as anthropic
from server.http.anthropic.routes import REQUESTS as MESSAGES_REQUESTS
from server.http.common.document import ErrorEnvelope
from server.http.common.validation import RequestModel, read
from server.http.openai import schemas as openai
from server.http.openai.routes import REQUESTS as OPENAI_REQUESTS
from server.http.operations import schemas
from server.http.operations.routes import REQUESTS as ORDERS
from server.http.responses import schemas as responses
from server.http.responses.routes import REQUESTS as RESPONSES_REQUESTS
from server.protocol.messages import AttestationReport, AttestedBatch, FinishReason, ShadowReport
from support.api.edge_fakes import Served, delta, events, playing, saying, served, with_keys

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"
REQUESTS = (*OPENAI_REQUESTS, *RESPONSES_REQUESTS, *MESSAGES_REQUESTS)
USER = [{"role": "user", "content": "Hi"}]
VERSION = {"anthropic-version": "2023-06-01"}
BASES: dict[str, dict[str, Any]] = {
    "CompletionRequest": {"prompt": "a"}, "ChatRequest": {"messages": USER}, "TokenizeRequest": {"prompt": "a"},
    "DetokenizeRequest": {"tokens": [1]}, "ResponsesRequest": {"input": "a"},
    "MessagesRequest": {"max_tokens": 4, "messages": USER}, "CountTokensRequest": {"messages": USER},
    "QuarantineRequest": {"path": "sdpa.cpu"}, "AttestRequest": {},
}  # fmt: skip
OF_MESSAGES = ("continue_final_message", "tools", "chat_template_kwargs", "mm_processor_kwargs")
# Fields that a bound needs beside its own, because of rules between fields.
BESIDE: dict[str, dict[str, Any]] = {
    **{f"TokenizeRequest.{field}": {"prompt": None, "messages": USER} for field in OF_MESSAGES},
    "tool_choice": {"tools": [{"type": "function", "function": {"name": "f"}}]},
    "max_tokens": {"echo": True},
    "min_tokens": {"max_tokens": 2**31 - 1},
    "top_logprobs": {"logprobs": True},
    "ResponsesRequest.tool_choice": {"tools": [{"type": "function", "name": "x"}]},
}
REFUSED = {"invalid_value", "unknown_field", "unsupported_field"}


@pytest.fixture(scope="module")
def it(folder: Path) -> Served:
    return served(folder)


@pytest.fixture(scope="module")
def document(it: Served) -> dict[str, Any]:
    found: dict[str, Any] = it.get("/openapi.json").json()
    return found


def test_no_component_is_named_after_a_file(document: dict[str, Any]) -> None:
    assert [name for name in document["components"]["schemas"] if "__" in name] == []


# JSON Schema calls 1.0 an integer; the application does not, as no client's language writes one so.
KINDS = Draft202012Validator.TYPE_CHECKER.redefine("integer", lambda _, value: type(value) is int)
Validator = extend(Draft202012Validator, type_checker=KINDS)


def valid(value: Any, schema: Any, schemas: dict[str, Any]) -> bool:
    """Return whether a schema of the document allows a value."""
    whole = {"components": {"schemas": schemas}, "allOf": [schema]}
    return bool(Validator(whole).is_valid(value))


def edges(schema: dict[str, Any], schemas: dict[str, Any]) -> Iterator[tuple[Any, bool]]:
    """Values at each bound of a schema and just past it, and whether the bound allows them."""
    for key in ("anyOf", "oneOf"):
        for each in schema.get(key, ()):
            yield from edges(each, schemas)
    step = 1 if schema.get("type") == "integer" else 0.001
    if "minimum" in schema:
        yield from ((schema["minimum"], True), (schema["minimum"] - step, False))
    if "exclusiveMinimum" in schema:
        yield from ((schema["exclusiveMinimum"] + step, True), (schema["exclusiveMinimum"], False))
    if "maximum" in schema:
        yield from ((schema["maximum"], True), (schema["maximum"] + step, False))
    if "minLength" in schema:
        yield from (("x" * schema["minLength"], True), ("x" * (schema["minLength"] - 1), False))
    if "maxLength" in schema:
        yield from (("x" * schema["maxLength"], True), ("x" * (schema["maxLength"] + 1), False))
    if schema.get("type") == "array":
        item = example(schema["items"], schemas)
        if "minItems" in schema:
            yield from (([item] * schema["minItems"], True), ([item] * (schema["minItems"] - 1), False))
        if "maxItems" in schema:
            yield from (([item] * schema["maxItems"], True), ([item] * (schema["maxItems"] + 1), False))
        yield from (([value], is_allowed) for value, is_allowed in edges(schema["items"], schemas))
    for value in schema.get("enum", ()):
        yield (value, True)


def example(schema: dict[str, Any], schemas: dict[str, Any]) -> Any:
    functions = ({"type": "function", "function": {"name": "f"}}, {"type": "function", "name": "f"})
    objects = ({"role": "user", "content": "a"}, {"type": "text", "text": "a"}, {"name": "x", "input_schema": {}})
    candidates = (*schema.get("enum", ()), "x", 1, *objects, *functions, True, None)
    return next(value for value in candidates if valid(value, schema, schemas))


def operations(document: dict[str, Any]) -> Iterator[tuple[str, str, dict[str, Any]]]:
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            yield method.upper(), path, operation


def model_name(operation: dict[str, Any]) -> str | None:
    content = operation.get("requestBody", {}).get("content", {}).get("application/json")
    return None if content is None else content["schema"]["$ref"].rpartition("/")[2]


@pytest.mark.parametrize("options", [{}, {"admin_port": 0}])
def test_the_document_has_every_route_and_no_other(folder: Path, options: dict[str, Any]) -> None:
    app = served(folder, **options)
    routes = {
        (method, route.path_format)
        for route in app.app.routes
        if isinstance(route, APIRoute)
        for method in route.methods or ()
    }
    assert {(method, path) for method, path, _ in operations(app.get("/openapi.json").json())} == routes
    others = {route.path for route in app.app.routes if not isinstance(route, APIRoute)}  # type: ignore[attr-defined]
    assert others == {"/openapi.json"}


def test_the_document_is_closed_and_has_no_422(document: dict[str, Any]) -> None:
    text = json.dumps(document)
    assert '"422"' not in text
    assert "HTTPValidationError" not in text
    schemas = document["components"]["schemas"]
    for name in text.split("#/components/schemas/")[1:]:
        assert name.partition('"')[0] in schemas


def test_every_field_of_a_request_is_described(document: dict[str, Any]) -> None:
    for model in (*REQUESTS, *ORDERS):
        properties = document["components"]["schemas"][model.__name__]["properties"]
        assert properties.keys() >= model.model_fields.keys() | model.unsupported.keys()
        assert [name for name, field in properties.items() if not field.get("description")] == []


def test_every_path_parameter_is_described(document: dict[str, Any]) -> None:
    named = [
        (path, [it["name"] for it in operation.get("parameters", ()) if it["in"] == "path"])
        for _, path, operation in operations(document)
    ]
    assert named == [(path, re.findall(r"{(\w+)}", path)) for path, _ in named]
    assert sum(bool(names) for _, names in named) >= 3


def test_each_bound_is_the_applications(it: Served, document: dict[str, Any]) -> None:
    components, num_seen = document["components"]["schemas"], 0
    for method, path, operation in operations(document):
        name = model_name(operation)
        if name is None:
            continue
        for field, schema in components[name]["properties"].items():
            for value, is_bound in edges(schema, components):
                is_allowed = is_bound or valid(value, schema, components)
                body = (
                    BASES[name]
                    | (BESIDE.get(f"{name}.{field}", BESIDE.get(field, {})) if is_allowed else {})
                    | {field: value}
                )
                answer = it.request(method, path, json=body)
                error = answer.json().get("error") or {}
                is_refused = error.get("code") in REFUSED and str(error["param"]).startswith(field)
                assert is_refused == (not is_allowed), (path, field, str(value)[:40], answer.text)
                num_seen += 1
    assert num_seen > 200


BOUNDS = (0, 1, -1, 2, 64, 65, 0.5, 2.5, -2, 2**31 - 1, 2**31, 2**63, "", "a", "x" * 513, True, False, None, [], {})
LEAVES = (
    st.sampled_from(BOUNDS)
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(exclude_categories=["Cs"]), max_size=5)
)
NESTED_NAMES = st.sampled_from(
    [
        "role", "content", "name", "type", "text", "include_usage", "tool_calls", "function", "input_schema", "effort",
        "nothing",
    ]
)  # fmt: skip
VALUES = st.recursive(
    LEAVES, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NESTED_NAMES, inner, max_size=3), max_leaves=6
)


def refusal(model: type[RequestModel], body: dict[str, Any]) -> bool:
    """Return whether a body is refused; always with the field's name."""
    try:
        fields = read(model, body)
    except HallmarkError as error:
        return bool(error.param)
    # Only the application knows the vocabulary: it refuses these by name, as the test of the bounds shows.
    return any(has_negative_id(getattr(fields, name, None)) for name in ("tokens", "prompt", "stop_token_ids"))


def has_negative_id(value: Any) -> bool:
    return any(map(has_negative_id, value)) if isinstance(value, list) else isinstance(value, int) and value < 0


@pytest.mark.parametrize("model", [*REQUESTS, *ORDERS], ids=lambda model: model.__name__)
def test_what_the_document_allows_is_what_is_taken(document: dict[str, Any], model: type[RequestModel]) -> None:
    components = document["components"]["schemas"]
    schema = components[model.__name__]
    properties = schema["properties"]

    values = {
        name: st.sampled_from([*(value for value, _ in edges(properties.get(name, {}), components)), *BOUNDS]) | VALUES
        for name in (*properties, "nothing")
    }
    field = st.one_of([st.tuples(st.just(name), each) for name, each in values.items()])

    @settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
    @given(changes=st.lists(field, max_size=3), is_whole=st.booleans())
    def check(changes: list[tuple[str, Any]], is_whole: bool) -> None:
        body = (BASES[model.__name__] if is_whole or len(changes) < 2 else {}) | dict(changes)
        assert refusal(model, body) == (not valid(body, schema, components)), body

    check()


def test_answers_are_those_of_the_document(folder: Path) -> None:
    it = served(folder, saying("Hel", "lo"))
    batch = AttestedBatch("prefill", ["sdpa.cpu"], False, {"aten::bmm": 8}, "mismatch", "sdpa.cpu did not launch x")
    it.engine.report = AttestationReport("request", "mismatch", 1.0, 0.1, [batch], [("sdpa.cpu", "prefill fp32")])
    it.services.telemetry.metrics.on_shadow(
        ShadowReport("match", 1.5, "decode", "sdpa.cpu", 3, 5, 70, 1, 0.1, None, 0.002, [])
    )
    response = it.post(RESPONSES, {"input": "a"}).json()
    found: list[tuple[type[BaseModel], Any]] = [
        (openai.Completion, it.post(COMPLETIONS, {"prompt": "a", "n": 2}).json()),
        (openai.ChatCompletion, it.post(CHAT, {"messages": USER}).json()),
        (openai.Tokenized, it.post("/tokenize", {"prompt": "a"}).json()),
        (openai.Detokenized, it.post("/detokenize", {"tokens": [97]}).json()),
        (openai.ModelList, it.get("/v1/models").json()),
        (openai.ModelCard, it.get("/v1/models/tiny").json()),
        (anthropic.AnthropicModelList, it.get("/v1/models", headers=VERSION).json()),
        (anthropic.AnthropicModel, it.get("/v1/models/tiny", headers=VERSION).json()),
        (anthropic.MessageError, it.get("/v1/models/other", headers=VERSION).json()),
        (schemas.Health, it.get("/readyz").json()),
        (schemas.Version, it.get("/version").json()),
        (schemas.Attestation, it.post("/attention/attest", {}).json()),
        (schemas.QuarantineReport, it.post("/attention/quarantine", {"path": "sdpa.cpu"}).json()),
        (schemas.AttentionReport, it.get("/attention").json()),
        (responses.ResponseAnswer, response),
        (responses.ResponseAnswer, it.get(f"{RESPONSES}/{response['id']}").json()),
        (responses.InputItemList, it.get(f"{RESPONSES}/{response['id']}/input_items").json()),
        (ErrorEnvelope, it.post(f"{RESPONSES}/{response['id']}/cancel", {}).json()),
        (responses.ResponseDeleted, it.request("DELETE", f"{RESPONSES}/{response['id']}").json()),
        (anthropic.MessageAnswer, it.post(MESSAGES, {"messages": USER, "max_tokens": 4}).json()),
        (anthropic.TokenCount, it.post(f"{MESSAGES}/count_tokens", {"messages": USER}).json()),
        (anthropic.MessageError, it.post(MESSAGES, {}).json()),
        (schemas.Load, it.get("/load").json()),
        (ErrorEnvelope, it.post(COMPLETIONS, {}).json()),
        (ErrorEnvelope, it.get("/nowhere").json()),
    ]
    detailed = {"return_token_ids": True, "prompt_logprobs": 2, "n": 2}
    found += [
        (openai.Completion, it.post(COMPLETIONS, {"prompt": "ab", "logprobs": 2, "echo": True, **detailed}).json()),
        (openai.ChatCompletion, it.post(CHAT, {"messages": USER, "logprobs": True, **detailed}).json()),
    ]
    stream = {"stream": True, "stream_options": {"include_usage": True}}
    for model, path, body in (
        (openai.CompletionChunk, COMPLETIONS, {"prompt": "a"}),
        (openai.ChatChunk, CHAT, {"messages": USER}),
    ):
        live = {"stream": True, "stream_options": {"continuous_usage_stats": True}, "return_token_ids": True}
        for options in (stream, {"stream": True}, live | {"logprobs": 2 if path == COMPLETIONS else True}):
            *chunks, _ = events(it.post(path, body | options))
            found += [(model, chunk) for chunk in chunks]
    streamed: list[tuple[type[BaseModel], str, Any]] = [
        (responses.ResponseStreamEvent, RESPONSES, {"input": "a"}),
        (anthropic.MessageEvent, MESSAGES, {"messages": USER, "max_tokens": 4}),
    ]
    for model, path, body in streamed:
        for app in (it, served(folder, playing(delta("a"), delta("", FinishReason.ERROR)))):
            lines = app.post(path, body | {"stream": True}).text.split("\n")
            found += [(model, json.loads(line[6:])) for line in lines if line.startswith("data: ")]
    it.engine.refuse()
    found.append((schemas.Health, it.get("/readyz").json()))
    for model, answer in found:
        model.model_validate(answer, strict=False)


@pytest.mark.parametrize(("keys", "operator"), [((), None), ((), "root"), (("right",), "root")])
def test_a_key_is_needed_where_the_document_says(folder: Path, keys: tuple[str, ...], operator: str | None) -> None:
    it = with_keys(served(folder), *keys, operator=operator)
    key = {"authorization": f"Bearer {operator or 'right'}"}
    document, num_closed = it.get("/openapi.json", headers=key).json(), 0
    for method, path, operation in operations(document):
        num_closed += bool(operation["security"])
        status = it.request(method, path.replace("{name}", "x")).status_code
        assert (status == 401) == bool(operation["security"]), path
        assert ("401" in operation["responses"]) == bool(operation["security"])
    assert (num_closed > 3) == bool(keys or operator)
