"""The text that a grammar of forced tool calls takes, in each form."""

import json
from pathlib import Path

import llguidance
import pytest

from server.errors import UnsupportedField
from server.grammar.requested import json_grammar
from server.grammar.tool_calls import Tool, ToolFormat, json_or_calls, tool_grammar
from server.protocol.messages import Grammar
from server.settings import DEMO_MODEL

WEATHER = Tool(
    "get_weather",
    {
        "type": "object",
        "properties": {"city": {"$ref": "#/$defs/name"}},
        "required": ["city"],
        "additionalProperties": False,
        "$defs": {"name": {"type": "string"}},
    },
)
CLOCK = Tool("clock")
CITY = '{"city": "Rome"}'


def tokenizer(*added: str) -> llguidance.LLTokenizer:
    content = json.loads(Path(DEMO_MODEL, "tokenizer.json").read_text())
    for index, text in enumerate(added):
        content["added_tokens"].append(content["added_tokens"][0] | {"id": 4096 + index, "content": text})
    return llguidance.LLTokenizer(json.dumps(content))


def takes(grammar: Grammar, text: str, *added: str) -> bool:
    """Whether the whole of `text` matches, special tokens by their own ids."""
    tokens = tokenizer(*added)
    matcher = llguidance.LLMatcher(tokens, llguidance.LLMatcher.grammar_from_lark(grammar.text))
    assert not matcher.is_error(), matcher.get_error()
    return bool(matcher.consume_tokens(tokens.tokenize_str(text, parse_special=True)) and matcher.is_accepting())


HERMES = '<tool_call>\n{"name": "get_weather", "arguments": ' + CITY + "}\n</tool_call>"
LLAMA = '{"name": "get_weather", "parameters": ' + CITY + "}"
MISTRAL = '[TOOL_CALLS][{"name": "get_weather", "arguments": ' + CITY + "}"


@pytest.mark.parametrize(
    ("form", "one", "two"),
    [
        (ToolFormat.HERMES, HERMES, f"{HERMES}\n{HERMES}"),
        (ToolFormat.LLAMA3_JSON, LLAMA, f"{LLAMA}; {LLAMA}"),
        (ToolFormat.MISTRAL, f"{MISTRAL}]", f'{MISTRAL}, {{"name": "clock", "arguments": {{}}}}]'),
    ],
)
def test_grammar_takes_calls_of_each_form(form: ToolFormat, one: str, two: str) -> None:
    tools = [WEATHER, CLOCK]
    assert takes(tool_grammar(tools, form), one)
    assert not takes(tool_grammar(tools, form), two)
    assert takes(tool_grammar(tools, form, is_parallel=True), two)
    assert not takes(tool_grammar([CLOCK], form), one)
    assert not takes(tool_grammar(tools, form), one.replace("city", "town"))
    assert not takes(tool_grammar(tools, form), f"Sure. {one}")


def test_marker_that_is_a_token_is_taken_as_one() -> None:
    added = {"<tool_call>": 4096, "</tool_call>": 4097, "[TOOL_CALLS]": 4098}
    assert takes(tool_grammar([WEATHER], ToolFormat.HERMES, added_ids=added), HERMES, *added)
    assert takes(tool_grammar([WEATHER], ToolFormat.MISTRAL, added_ids=added), f"{MISTRAL}]", *added)


def test_answer_of_a_schema_may_be_a_call_instead() -> None:
    answer = json_grammar({"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}, "p")
    either = json_or_calls(answer, tool_grammar([WEATHER], ToolFormat.HERMES))
    assert takes(either, HERMES)
    assert takes(either, '{"a": 5}')
    assert not takes(either, CITY)


def test_keyword_that_would_not_bind_arguments_is_named() -> None:
    tool = Tool("f", {"properties": {"a": {"type": "array", "uniqueItems": True}}})
    with pytest.raises(UnsupportedField, match="'uniqueItems' at /properties/a") as caught:
        tool_grammar([CLOCK, tool], ToolFormat.HERMES)
    assert caught.value.param == "tools[1]"
