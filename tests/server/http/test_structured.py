"""The fields by which a request binds its answer to a grammar, and their refusals."""

from pathlib import Path
from typing import Any

import msgspec
import pytest

from server.protocol.messages import Grammar, GrammarKind
from support.api.edge_fakes import READY, Served, served

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
        ({"response_format": {"type": "json_object", "json_schema": None}}, GrammarKind.JSON_SCHEMA, '"object"'),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": None}}},
         GrammarKind.JSON_SCHEMA, "{"),
        ({"structured_outputs": {"json": SCHEMA}}, GrammarKind.JSON_SCHEMA, '"required": ["a"]'),
        ({"structured_outputs": {"regex": "a+", "whitespace_pattern": None}}, GrammarKind.REGEX, "a+"),
        ({"structured_outputs": {"choice": ["a", "b"]}}, GrammarKind.LARK, '"a" | "b"'),
        ({"structured_outputs": {"grammar": 'start: "a"'}}, GrammarKind.LARK, 'start: "a"'),
        ({"structured_outputs": {"json_object": True}}, GrammarKind.JSON_SCHEMA, '"type": "object"'),
        ({"guided_json": msgspec.json.encode(SCHEMA).decode()}, GrammarKind.JSON_SCHEMA, '"required": ["a"]'),
        ({"guided_regex": "a+"}, GrammarKind.REGEX, "a+"),
        ({"guided_choice": ["a"]}, GrammarKind.LARK, '"a"'),
        ({"guided_grammar": 'root ::= "a"'}, GrammarKind.LARK, "root"),
        ({"regex": "a+"}, GrammarKind.REGEX, "a+"),
        ({"ebnf": 'root ::= "a"'}, GrammarKind.LARK, "root"),
        # guidance's client for vLLM sends both, and the backend that serves here by its name
        ({"guided_grammar": 'start: "a"', "structured_outputs": {"grammar": 'start: "a"'},
          "guided_decoding_backend": "guidance"}, GrammarKind.LARK, 'start: "a"'),
        ({"response_format": SCHEMA_FORMAT, "tools": TOOLS}, GrammarKind.LARK, "<tool_call>"),
        ({"guided_regex": "a+", "tools": TOOLS}, GrammarKind.REGEX, "a+"),
        ({"guided_regex": "a+", "guided_decoding_backend": "guidance"}, GrammarKind.REGEX, "a+"),
        ({"response_format": SCHEMA_FORMAT, "tools": TOOLS, "tool_choice": "required"}, GrammarKind.LARK, "clock"),
    ],
)  # fmt: skip
def test_field_becomes_a_grammar(server: Served, fields: dict[str, Any], kind: GrammarKind, text: str) -> None:
    assert chat(server, **fields).status_code == 200
    grammar = sent(server)
    assert grammar is not None
    assert grammar.kind is kind
    assert text in grammar.text


def test_tokenizer_that_takes_no_grammar_is_named(server: Served) -> None:
    server.engine.ready = msgspec.structs.replace(READY, has_grammars=False)
    error = chat(server, guided_regex="a").json()["error"]
    assert (error["code"], error["param"]) == ("unsupported_field", "guided_regex")


@pytest.mark.parametrize(
    ("schema", "status", "said"),
    [
        ({"type": "integer"}, 200, ""),
        ({"const": 9007199254740993}, 400, "the number 9007199254740993 is not supported"),
        ({"not": {"const": 5}}, 400, "the keyword 'not' is not supported"),
        ("{", 400, "structured_outputs.grammar: JSON must stand behind %json in line 2."),
        ('{"items": ' * 4000 + "{}" + "}" * 4000, 400, "nested less deep"),
    ],
)
def test_a_schema_within_a_grammar_is_refused_like_any(server: Served, schema: object, status: int, said: str) -> None:
    text = schema if isinstance(schema, str) else msgspec.json.encode(schema).decode()
    answer = chat(server, structured_outputs={"grammar": f'start: "%json {{" part // %json {{\npart: %json {text} "!"'})
    assert answer.status_code == status
    if status != 200:
        assert said in answer.json()["error"]["message"]
        assert answer.json()["error"]["param"] == "structured_outputs.grammar"


@pytest.mark.parametrize(
    ("grammar", "is_refused"),
    [
        ("start[temperature=0.5]: /a+/", True),
        ('start: "a" b\n b[max_tokens=2, temperature = 0]: /b+/', True),
        ("start[max_tokens=2]: /a+/", False),
        ('start: "x[temperature=1]" | /[temperature=]/', False),
    ],
)
def test_a_temperature_of_a_rule_is_refused(server: Served, grammar: str, is_refused: bool) -> None:
    answer = chat(server, structured_outputs={"grammar": grammar})
    assert answer.status_code == (400 if is_refused else 200)
    if is_refused:
        error = answer.json()["error"]
        assert (error["code"], error["param"]) == ("unsupported_field", "structured_outputs.grammar")
        assert "the temperature of a rule is not implemented; leave it out" in error["message"]
