"""The fields by which a request binds its answer to a grammar, and their refusals."""

from pathlib import Path
from typing import Any

import msgspec
import pytest
from edge_fakes import READY, Served, served

from server.protocol.messages import Grammar, GrammarKind

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
TOOLS: list[dict[str, Any]] = [{"type": "function", "function": {"name": "clock", "parameters": {"type": "object"}}}]
SCHEMA_FORMAT: dict[str, Any] = {"type": "json_schema", "json_schema": {"name": "x", "strict": True, "schema": SCHEMA}}


@pytest.fixture(scope="module")
def own_checker(folder: Path) -> Served:
    """A server whose processes, which check grammars, serve all tests here."""
    return served(folder)


@pytest.fixture
def server(own_checker: Served) -> Served:
    own_checker.engine.submitted.clear()
    own_checker.engine.ready = READY
    return own_checker


def chat(server: Served, **fields: Any) -> Any:
    return server.post("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}], **fields})


def sent(server: Served) -> Grammar | None:
    return server.engine.submitted[-1][2].grammar


@pytest.mark.parametrize(
    ("fields", "kind", "text"),
    [
        ({"response_format": {"type": "json_object"}}, GrammarKind.JSON_SCHEMA, '"type": "object"'),
        ({"response_format": SCHEMA_FORMAT}, GrammarKind.JSON_SCHEMA, '"required": ["a"]'),
        ({"structured_outputs": {"json": SCHEMA}}, GrammarKind.JSON_SCHEMA, '"required": ["a"]'),
        ({"structured_outputs": {"regex": "a+", "whitespace_pattern": None}}, GrammarKind.REGEX, "a+"),
        ({"structured_outputs": {"choice": ["a", "b"]}}, GrammarKind.LARK, '"a" | "b"'),
        ({"structured_outputs": {"grammar": 'start: "a"'}}, GrammarKind.LARK, 'start: "a"'),
        ({"structured_outputs": {"json_object": True}}, GrammarKind.JSON_SCHEMA, '"type": "object"'),
        ({"guided_json": msgspec.json.encode(SCHEMA).decode()}, GrammarKind.JSON_SCHEMA, '"required": ["a"]'),
        ({"guided_regex": "a+"}, GrammarKind.REGEX, "a+"),
        ({"guided_choice": ["a"]}, GrammarKind.LARK, '"a"'),
        ({"guided_grammar": 'root ::= "a"'}, GrammarKind.LARK, "root"),
        ({"response_format": SCHEMA_FORMAT, "tools": TOOLS}, GrammarKind.LARK, "<tool_call>"),
        ({"guided_regex": "a+", "tools": TOOLS}, GrammarKind.REGEX, "a+"),
        ({"guided_regex": "a+", "guided_decoding_backend": "guidance"}, GrammarKind.REGEX, "a+"),
        ({"response_format": SCHEMA_FORMAT, "tools": TOOLS, "tool_choice": "required"}, GrammarKind.LARK, "clock"),
    ],
)
def test_field_becomes_a_grammar(server: Served, fields: dict[str, Any], kind: GrammarKind, text: str) -> None:
    assert chat(server, **fields).status_code == 200
    grammar = sent(server)
    assert grammar is not None
    assert grammar.kind is kind
    assert text in grammar.text


FORMATS = ({"type": "text"}, {"type": "json_object"}, SCHEMA_FORMAT)
NAMED = {"type": "function", "function": {"name": "clock"}}


@pytest.mark.parametrize("choice", ["required", NAMED])
@pytest.mark.parametrize("form", FORMATS)
def test_forced_call_is_bound_alike_beside_any_format(server: Served, form: dict[str, Any], choice: object) -> None:
    """Chat and Responses, as instructor sends both."""
    forced = {"tools": TOOLS, "tool_choice": choice}
    texts = set()
    for more in ({}, {"response_format": form}):
        assert chat(server, **forced, **more).status_code == 200
        texts.add(text_of(server))
    flat = {"type": "function", **TOOLS[0]["function"]}
    named = choice if isinstance(choice, str) else {"type": "function", "name": "clock"}
    flat_form = {"type": "json_schema", **SCHEMA_FORMAT["json_schema"]} if form is SCHEMA_FORMAT else form
    body = {"input": "hi", "tools": [flat], "tool_choice": named, "text": {"format": flat_form}}
    body |= {"parallel_tool_calls": True}
    assert server.post("/v1/responses", body).status_code == 200
    texts.add(text_of(server))
    assert len(texts) == 1
    assert "clock" in texts.pop()


def text_of(server: Served) -> str:
    grammar = sent(server)
    assert grammar is not None
    return grammar.text


def test_format_text_binds_nothing(server: Served) -> None:
    assert chat(server, response_format={"type": "text"}).status_code == 200
    assert sent(server) is None


def of_schema(schema: object) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}}


@pytest.mark.parametrize(
    ("fields", "param", "code", "named"),
    [
        (of_schema({"items": {"uniqueItems": True}}), "response_format.json_schema.schema", "unsupported_field",
         "'uniqueItems' at /items"),
        (of_schema({"typ": "object"}), "response_format.json_schema.schema", "unsupported_field", "'typ'"),
        (of_schema({"x-guidance": {"lenient": True}}), "response_format.json_schema.schema", "unsupported_field",
         "'x-guidance'"),
        (of_schema({"type": "string", "format": "zzz"}), "response_format.json_schema.schema", "unsupported_field",
         "the format 'zzz'"),
        (of_schema({"type": "string", "pattern": "(?=a)b"}), "response_format.json_schema.schema", "invalid_grammar",
         "look-around"),
        (of_schema([1]), "response_format.json_schema.schema", "invalid_value", "a JSON schema"),
        ({"response_format": {"type": "yaml"}}, "response_format.type", "invalid_value", "json_schema"),
        ({"response_format": {"type": "json_object", "extra": 1}}, "response_format.extra", "unknown_field", "extra"),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs.choice", "invalid_value",
         "structured_outputs.regex and structured_outputs.choice"),
        ({"guided_regex": "a", "response_format": SCHEMA_FORMAT}, "guided_regex", "invalid_value", "send one"),
        ({"structured_outputs": {"structural_tag": "x"}}, "structured_outputs.structural_tag", "unsupported_field",
         "not implemented"),
        ({"structured_outputs": {}}, "structured_outputs", "invalid_value", "asks for nothing"),
        ({"guided_choice": [""]}, "guided_choice", "invalid_value", "not empty"),
        ({"guided_json": "[" * 5000}, "guided_json", "invalid_value", "a JSON schema"),
        ({"guided_regex": "a", "guided_decoding_backend": "xgrammar"}, "guided_decoding_backend", "unsupported_field",
         '"guidance"'),
        ({"guided_regex": "(a"}, "guided_regex", "invalid_grammar", "unclosed"),
        *(({"guided_regex": "a", "tools": TOOLS, "tool_choice": "required", **more}, "guided_regex", "invalid_value",
           "tool_choice and guided_regex") for more in ({}, {"response_format": {"type": "text"}})),
    ],
)  # fmt: skip
def test_request_that_cannot_be_bound_is_refused(
    server: Served, fields: dict[str, Any], param: str, code: str, named: str
) -> None:
    answer = chat(server, **fields)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert (error["param"], error["code"]) == (param, code)
    assert named in error["message"]
    assert server.engine.submitted == []


def test_tokenizer_that_takes_no_grammar_is_named(server: Served) -> None:
    server.engine.ready = msgspec.structs.replace(READY, has_grammars=False)
    error = chat(server, guided_regex="a").json()["error"]
    assert (error["code"], error["param"]) == ("unsupported_field", "guided_regex")
