"""The text that a grammar of forced tool calls takes, in each form, and what may stand before it."""

import json
import random
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import llguidance
import numpy as np
import pytest
from llguidance.numpy import allocate_token_bitmask, fill_next_token_bitmask

from server.errors import UnsupportedField
from server.grammar.compiled import ByteTokens, byte_tokenizer, compiled
from server.grammar.reasoning import behind_reasoning
from server.grammar.requested import choice_grammar, json_grammar, regex_grammar
from server.grammar.tool_calls import Tool, bound_calls
from server.protocol.messages import Grammar
from server.settings import DEMO_MODEL, ReasoningParser, ToolCallParser
from server.text.answer.deltas import Answer, whole_answer
from server.text.answer.formats import FORMATS
from server.text.answer.forms.gemma import QUOTE
from server.text.answer.forms.harmony import MARKS
from server.text.answer.syntax import AnswerSyntax
from server.text.answer.texts.values import is_json
from support.answers.writers import WRITERS, First

HERMES, CODER, LLAMA = ToolCallParser.HERMES, ToolCallParser.QWEN3_CODER, ToolCallParser.LLAMA3_JSON
MISTRAL, HARMONY, GEMMA = ToolCallParser.MISTRAL, ToolCallParser.HARMONY, ToolCallParser.GEMMA
FORMS = (HERMES, CODER, LLAMA, MISTRAL, HARMONY, GEMMA)
OWN = {it.form: it.reasoning for it in WRITERS.values()} | {
    HARMONY: ReasoningParser.HARMONY, GEMMA: ReasoningParser.GEMMA, MISTRAL: ReasoningParser.MISTRAL
}  # fmt: skip
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
TRIP = Tool(
    "plan.trip",
    {
        "type": "object",
        "properties": {
            "note": {"anyOf": [{"type": "string"}, {"type": "null"}], "default": None},
            "days": {"type": "integer", "minimum": 1, "maximum": 40},
            "kind": {"$ref": "#/$defs/Kind"},
            "code": {"type": "string", "minLength": 2, "maxLength": 5},
            "is_far": {"type": "boolean"},
            "stops": {"type": "array", "items": {"$ref": "#/$defs/Stop"}, "minItems": 1, "maxItems": 3},
            "budget": {"anyOf": [{"type": "number", "minimum": 0, "maximum": 9}, {"type": "null"}]},
            "tags": {"anyOf": [{"type": "array", "items": {"type": "string"}}, {"type": "null"}]},
        },
        "required": ["days", "kind", "stops"],
        "additionalProperties": False,
        "$defs": {
            "Kind": {"enum": ["sea", "snow ☃", 'a "b"\n</x>'], "type": "string"},
            "Stop": {
                "type": "object",
                "properties": {"at": {"type": "string"}, "far": {"type": "integer", "maximum": 9, "minimum": 0}},
                "required": ["at"],
                "additionalProperties": False,
            },
        },
    },
)
OTHERS = tuple(dict.fromkeys(it.form for it in WRITERS.values() if it.form not in FORMS))
MARKED = (
    *("<tool_call>", "</tool_call>", "[TOOL_CALLS]", "<think>", "</think>", "[THINK]", "[/THINK]"),
    *("<|tool_call>", "<tool_call|>", QUOTE, "<|channel>", "<channel|>", *sorted({*MARKS} - {"<|end|>"})),
)
MARKED = tuple(dict.fromkeys([*MARKED, *(mark for form in OTHERS for mark in FORMATS[form].parser({}).marks)]))
IDS = {"<|end|>": 4} | {text: 4096 + index for index, text in enumerate(MARKED)}  # the demo has the first one


@cache
def tokenizer(has_marks: bool) -> llguidance.LLTokenizer:
    content = json.loads(Path(DEMO_MODEL, "tokenizer.json").read_text())
    first = content["added_tokens"][0]
    if has_marks:
        content["added_tokens"] += [first | {"id": token_id, "content": text} for text, token_id in IDS.items()]
    return llguidance.LLTokenizer(json.dumps(content))


def takes(grammar: Grammar, text: str, *, has_marks: bool = False) -> bool:
    """Return whether the whole of `text` matches, marks by their own ids where the tokenizer has such."""
    tokens = tokenizer(has_marks)
    matcher = compiled(tokens, grammar)
    return bool(matcher.consume_tokens(tokens.tokenize_str(text, parse_special=True)) and matcher.is_accepting())


HERMES_CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rome"}}\n</tool_call>'
CODER_CALL = "<tool_call>\n<function=get_weather>\n<parameter=city>\nRome\n</parameter>\n</function>\n</tool_call>"
LLAMA_CALL = '{"name": "get_weather", "parameters": {"city": "Rome"}}'
MISTRAL_CALL = '[TOOL_CALLS][{"name": "get_weather", "arguments": {"city": "Rome"}}'
GEMMA_CALL = '<|tool_call>call:get_weather{city:<|"|>Rome<|"|>}<tool_call|>'
HARMONY_CALL = '<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{"city": "Rome"}'
MISTRAL_NAMED = '[TOOL_CALLS]get_weather[ARGS]{"city": "Rome"}'
FORM_OF = [
    (CODER, "<tool_call>\n<function="), (HERMES, "<tool_call>"), (LLAMA, "{"), (MISTRAL, "[TOOL_CALLS]"),
    (GEMMA, "<|tool_call>"), (HARMONY, "<|channel|>"),
]  # fmt: skip


@pytest.mark.parametrize("has_marks", [True, False])
@pytest.mark.parametrize("name", WRITERS)
def test_grammar_takes_calls_as_templates_write_them(name: str, has_marks: bool) -> None:
    writer, ids, chance = WRITERS[name], IDS if has_marks else {}, First()

    def bound(*tools: Tool, is_parallel: bool = False) -> Grammar:
        found = bound_calls(tools, writer.form, is_parallel=is_parallel, added_ids=ids)
        assert found.form is writer.form
        return found.grammar

    if name in ("mistral named", "harmony"):
        return  # they have tests of their own
    if name in ("hy_v3", "hy_v3 plain") and has_marks is ("plain" in name):
        return  # marks have the suffix where the tokenizer's have it
    weather, clock = (WEATHER.name, {"city": "Rome"}), (CLOCK.name, {})
    one, other, two = (writer.calls(calls, chance) for calls in ([weather], [clock], [weather, clock]))
    assert takes(bound(WEATHER, CLOCK), one, has_marks=has_marks)
    assert takes(bound(CLOCK), other, has_marks=has_marks)
    assert takes(bound(WEATHER, CLOCK, is_parallel=True), two, has_marks=has_marks)
    assert not takes(bound(WEATHER, CLOCK), two, has_marks=has_marks)
    assert not takes(bound(CLOCK), one, has_marks=has_marks)
    assert not takes(bound(WEATHER, CLOCK), one.replace("city", "town"), has_marks=has_marks)
    assert not takes(bound(WEATHER, CLOCK), f"Sure. {one}", has_marks=has_marks)


NO_ARGUMENTS = {
    HERMES: '<tool_call>\n{"name": "clock", "arguments": {}}\n</tool_call>',
    CODER: "<tool_call>\n<function=clock>\n</function>\n</tool_call>",
    LLAMA: '{"name": "clock", "parameters": {}}',
    MISTRAL: '[TOOL_CALLS][{"name": "clock", "arguments": {}}]',
    GEMMA: "<|tool_call>call:clock{}<tool_call|>",
    HARMONY: "<|channel|>commentary to=functions.clock <|constrain|>json<|message|>{}",
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("parameters", [None, {}, {"type": "object", "properties": {}}])
def test_tool_without_parameters_is_called_with_none(form: ToolCallParser, parameters: dict[str, Any] | None) -> None:
    grammar = bound_calls([Tool("clock", parameters)], form).grammar
    empty = NO_ARGUMENTS[form]
    assert takes(grammar, empty)
    changes = {CODER: ("</function>", "<parameter=a>\n1\n</parameter>\n</function>"), GEMMA: ("{}", "{a:1}")}
    old, new = changes.get(form, ("{}", '{"a": 1}'))
    assert old in empty
    assert not takes(grammar, empty.replace(old, new))


@pytest.mark.parametrize(
    ("form", "mark"), [(CODER, "</parameter>"), (CODER, "<parameter="), (CODER, "</function>"), (GEMMA, QUOTE)]
)
@pytest.mark.parametrize("keyword", ["enum", "const"])
def test_value_with_the_marks_of_its_form_is_called_in_json(form: ToolCallParser, mark: str, keyword: str) -> None:
    """The reader of the form would cut it there: another value than the schema allows."""
    value = f"a{mark}b"
    schema = {"type": "string", keyword: ["c", value] if keyword == "enum" else value}
    bound = bound_calls([Tool("say", {"type": "object", "properties": {"x": schema}, "required": ["x"]})], form)
    assert bound.form is {CODER: HERMES, GEMMA: LLAMA}[form]
    written = json.dumps({"x": value})
    name = {CODER: "arguments", GEMMA: "parameters"}[form]
    call = f'{{"name": "say", "{name}": {written}}}'
    assert takes(bound.grammar, f"<tool_call>\n{call}\n</tool_call>" if form is CODER else call)


@pytest.mark.parametrize("written", [HARMONY_CALL, HARMONY_CALL.replace("<|constrain|>", "")])
def test_harmony_takes_one_call_with_either_recipient(written: str) -> None:
    grammar = bound_calls([WEATHER, CLOCK], HARMONY, is_parallel=True, added_ids=IDS).grammar
    head, _, rest = written.partition(" to=functions.get_weather")
    assert takes(grammar, f" to=functions.get_weather{head}{rest}", has_marks=True)
    assert takes(grammar, HARMONY_CALL, has_marks=True)
    assert not takes(grammar, HARMONY_CALL + HARMONY_CALL, has_marks=True)
    assert not takes(grammar, HARMONY_CALL.replace("Rome", 'R"'), has_marks=True)


def test_mistrals_newer_form_is_bound_where_its_mark_is_a_token() -> None:
    ids = {"[TOOL_CALLS]": IDS["[TOOL_CALLS]"], "[ARGS]": IDS["[THINK]"]}
    grammar = bound_calls([WEATHER], MISTRAL, added_ids=ids).grammar
    assert takes(grammar, '[TOOL_CALLS]get_weather[THINK]{"city": "Rome"}', has_marks=True)


def test_a_grammar_is_checked_without_the_tokens_of_the_model() -> None:
    for form in FORMS:
        grammar = bound_calls([WEATHER, TRIP], form, is_parallel=True, added_ids=IDS).grammar
        reasoning = AnswerSyntax(form, OWN.get(form, ReasoningParser.THINK)).reasoning_before("")
        assert reasoning is not None
        compiled(byte_tokenizer(), behind_reasoning(grammar, reasoning, IDS), ByteTokens.others)


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "string", "pattern": "^a+$"},
        {"type": "string", "format": "date"},
        {"type": ["string", "integer"]},
        {"const": 5},
        {"$ref": "#/$defs/tree"},
    ],
)
def test_what_a_form_cannot_bind_is_bound_as_json(schema: dict[str, Any]) -> None:
    tree = {"type": "object", "properties": {"left": {"$ref": "#/$defs/tree"}}}
    tool = Tool("f", {"type": "object", "properties": {"a": schema}, "$defs": {"tree": tree}})
    forms = [bound_calls([CLOCK, tool], form, added_ids=IDS).form for form in (CODER, GEMMA)]
    assert forms in ([HERMES, LLAMA], [CODER, LLAMA])  # JSON of a recursive type stands in the tags


@pytest.mark.parametrize(("fewest", "most", "taken"), [(0, 1, [0, 1]), (1, 1, [1]), (0, 2, [0, 1, 2]), (2, 2, [2])])
def test_gemma_counts_the_items_of_an_array(fewest: int, most: int, taken: list[int]) -> None:
    items = {"type": "array", "items": {"type": "integer"}, "minItems": fewest, "maxItems": most}
    bound = bound_calls([Tool("f", {"type": "object", "properties": {"a": items}, "required": ["a"]})], GEMMA)
    assert bound.form is GEMMA
    calls = [f"<|tool_call>call:f{{a:[{','.join('7' * num)}]}}<tool_call|>" for num in range(4)]
    assert [num for num, call in enumerate(calls) if takes(bound.grammar, call)] == taken


def test_answer_of_a_schema_may_be_a_call_instead() -> None:
    answer = json_grammar({"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}, "p")
    either = bound_calls([WEATHER], HERMES, answer=answer).grammar
    assert takes(either, HERMES_CALL)
    assert takes(either, '{"a": 5}')
    assert not takes(either, '{"city": "Rome"}')
    channels = bound_calls([WEATHER], HARMONY, answer=answer, added_ids=IDS).grammar
    assert takes(channels, HARMONY_CALL, has_marks=True)
    assert takes(channels, '<|channel|>final<|message|>{"a": 5}', has_marks=True)


@pytest.mark.parametrize(
    ("more", "is_open"),
    [
        ({}, False),
        ({"additionalProperties": True}, True),
        ({"allOf": [{"properties": {"a": {"minimum": 0}}}]}, True),
        ({"required": ["b"]}, True),
        ({"anyOf": [{"required": ["a"]}, {"required": ["b"]}]}, True),
    ],
)
def test_objects_have_other_fields_only_where_allowed(more: dict[str, Any], is_open: bool) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, **more}
    assert takes(json_grammar(schema, "p"), '{"a": 5, "b": 6}') is is_open
    nested = {"type": "array", "items": {"$ref": "#/$defs/it"}, "$defs": {"it": schema}}
    assert takes(json_grammar(nested, "p"), '[{"a": 5, "b": 6}]') is is_open


def test_keyword_that_would_not_bind_arguments_is_named() -> None:
    tool = Tool("f", {"properties": {"a": {"type": "array", "uniqueItems": True}}})
    with pytest.raises(UnsupportedField, match="'uniqueItems' at /properties/a") as caught:
        bound_calls([CLOCK, tool], CODER)
    assert caught.value.param == "tools[1]"


ANSWERS = [json_grammar({"enum": ["yes"]}, "p"), regex_grammar('"y[es]+"', "p"), choice_grammar(['"yes"'], "p")]


@pytest.mark.parametrize("has_marks", [True, False])
@pytest.mark.parametrize("answer", ANSWERS)
def test_reasoning_stands_before_a_bound_answer(answer: Grammar, has_marks: bool) -> None:
    syntax, ids = AnswerSyntax(HERMES, ReasoningParser.THINK), IDS if has_marks else {}
    reasoning = syntax.reasoning_before("<|assistant|>")
    opened = syntax.reasoning_before("<|assistant|><think>\n")
    assert reasoning is not None
    assert opened is not None
    assert syntax.reasoning_before("<|assistant|><think>\n\n</think>\n\n") is None
    may, must = behind_reasoning(answer, reasoning, ids), behind_reasoning(answer, opened, ids)
    for breaks in ("", "\n", "\n\n"):
        assert takes(may, f'<think>Hm, "no" or {{}}.</think>{breaks}"yes"', has_marks=has_marks)
        assert takes(must, f'Hm, "no" or {{}}.</think>{breaks}"yes"', has_marks=has_marks)
    assert takes(may, '"yes"', has_marks=has_marks)
    assert not takes(must, '"yes"', has_marks=has_marks)
    assert not takes(may, '<think>Hm.</think>"no"', has_marks=has_marks)


def test_harmony_thinks_in_its_own_channel_before_its_answer() -> None:
    reasoning = AnswerSyntax(HARMONY, ReasoningParser.HARMONY).reasoning_before("<|start|>assistant")
    assert reasoning is not None
    thought = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"
    grammar = behind_reasoning(ANSWERS[0], reasoning, IDS)
    assert takes(grammar, f'{thought}<|channel|>final<|message|>"yes"', has_marks=True)
    assert takes(grammar, '<|channel|>final<|message|>"yes"', has_marks=True)
    assert not takes(grammar, '<|channel|>final<|message|>"no"', has_marks=True)
    calls = behind_reasoning(bound_calls([WEATHER], HARMONY, added_ids=IDS).grammar, reasoning, IDS, has_head=False)
    assert takes(calls, f"{thought}{HARMONY_CALL}", has_marks=True)


ENDS = (
    "\n</parameter>", "</parameter>", "</arg_value>", "</arg_value:opensource>", "</think:opensource>",
    "</seed:think>", '"', QUOTE, "</think>", "[/THINK]", "<channel|>", "<|end|>", "}", "]",
)  # fmt: skip


ENDS_OF = {
    ToolCallParser.DEEPSEEK_V32: ("</｜DSML｜parameter>",),
    ToolCallParser.COHERE3: ("<|END_THINKING|>",),
    ToolCallParser.COHERE4: ("<|END_THINKING|>",),
}


def drawn(grammar: Grammar, chance: random.Random, form: ToolCallParser, *, has_marks: bool) -> str:
    """An answer of tokens drawn among those that the mask allows; what ends a text is tried often."""
    tokens = tokenizer(has_marks)
    matcher = compiled(tokens, grammar)
    ends = [tokens.tokenize_str(end, parse_special=True) for end in (*ENDS, *ENDS_OF.get(form, ()))]
    mask = allocate_token_bitmask(1, tokens.vocab_size)
    found: list[int] = []
    while not matcher.is_stopped() and len(found) < 3000:
        if matcher.is_accepting() and chance.random() < 0.5:
            break
        end = chance.choice(ends)
        if chance.random() < 0.5 and matcher.validate_tokens(end) == len(end):
            drawn_ids = end
        else:
            fill_next_token_bitmask(matcher, mask, 0)
            allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")[: tokens.vocab_size])
            drawn_ids = [int(chance.choice(allowed))]
            if drawn_ids == [tokens.eos_token]:
                break
        assert matcher.consume_tokens(drawn_ids), matcher.get_error()
        found += drawn_ids
    assert matcher.is_accepting() or matcher.is_stopped()
    names = {token_id: text.encode() for text, token_id in IDS.items()}
    return b"".join(names.get(it) or tokens.decode_bytes([it]) for it in found).decode(errors="replace")


def read(form: ToolCallParser, own: AnswerSyntax, text: str, tools: Sequence[Tool], *, is_streamed: bool) -> Answer:
    schemas = {tool.name: tool.parameters or {} for tool in tools}
    parser = own.parser(schemas, "", is_streamed=is_streamed, is_bound=True, is_forced=True, calls=form)
    assert parser is not None
    deltas = [delta for char in text for delta in parser.feed(char)]
    return whole_answer([*deltas, *parser.finish()])


# Some of the forms whose marks are no tokens.
SPELLED = (ToolCallParser.HY_V3, ToolCallParser.DEEPSEEK_V3, ToolCallParser.PYTHONIC)


@pytest.mark.parametrize(
    ("form", "has_marks"),
    [*((form, True) for form in (*FORMS, *OTHERS)), *((form, False) for form in (HERMES, CODER, GEMMA, *SPELLED))],
)
def test_answers_drawn_under_the_mask_are_valid_calls(form: ToolCallParser, has_marks: bool) -> None:
    tools, ids = [WEATHER, CLOCK, TRIP], IDS if has_marks else {}
    own = AnswerSyntax(form, OWN.get(form, ReasoningParser.THINK))
    reasoning = own.reasoning_before("")
    assert reasoning is not None
    bound = bound_calls(tools, form, is_parallel=True, added_ids=ids)
    assert bound.form is form
    grammar = behind_reasoning(bound.grammar, reasoning, ids, has_head=False)
    schemas = {tool.name: tool.parameters or {"type": "object"} for tool in tools}
    seen: set[str] = set()
    for seed in range(12):
        text = drawn(grammar, random.Random(seed), form, has_marks=has_marks)
        answer = read(form, own, text, tools, is_streamed=seed % 2 == 0)
        assert answer.calls, text
        assert not answer.content, text
        for call in answer.calls:
            jsonschema.validate(json.loads(call.arguments), schemas[call.name])
            seen.add(call.name)
        if seed >= 5 and seen == schemas.keys():
            break
    assert seen == schemas.keys()


@pytest.mark.parametrize(
    "one", [HERMES_CALL, CODER_CALL, LLAMA_CALL, MISTRAL_CALL, MISTRAL_NAMED, GEMMA_CALL, HARMONY_CALL]
)
def test_a_forced_call_that_is_cut_has_no_content(one: str) -> None:
    form = next(form for form, text in FORM_OF if one.startswith(text))
    own = AnswerSyntax(form, OWN.get(form, ReasoningParser.NONE))
    arguments_end, num_nameless = one.index("Rome") + len("Rome"), 0
    for end in range(len(one)):
        whole, streamed = (read(form, own, one[:end], [WEATHER], is_streamed=it) for it in (False, True))
        assert (whole.content, streamed.content) == ("", ""), one[:end]
        calls = [(call.name, call.arguments) for call in whole.calls]
        assert calls == [(call.name, call.arguments) for call in streamed.calls]
        if calls and end <= arguments_end:
            [(name, arguments)] = calls
            assert name == "get_weather"
            assert not is_json(arguments), one[:end]  # no client takes it for whole
        num_nameless += not calls
    # The name is given as soon as what follows it shows that it is whole.
    name_end = one.index("get_weather") + len("get_weather")
    assert name_end < num_nameless <= name_end + len("{city:") + 1
