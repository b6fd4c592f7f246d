"""An answer's text becomes reasoning, content and calls, wherever the pieces of the text end, and whatever they are."""

import json
import math
from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from server.settings import ReasoningParser, ToolCallParser
from server.text.answer.deltas import ArgumentsText, CallStart, Delta, whole_answer
from server.text.answer.formats import FORMATS
from server.text.answer.syntax import AnswerSyntax, choose_syntax
from server.text.answer.texts.values import json_of
from server.text.chat_template import ChatTemplate
from support.answers import reading
from support.answers.reading import refuse, strict
from support.answers.templates import OTHERS as OTHERS_TEMPLATES
from support.answers.templates import TEMPLATES
from support.answers.writers import WRITERS, First

HERMES, CODER, LLAMA = ToolCallParser.HERMES, ToolCallParser.QWEN3_CODER, ToolCallParser.LLAMA3_JSON
MISTRAL, HARMONY, GEMMA = ToolCallParser.MISTRAL, ToolCallParser.HARMONY, ToolCallParser.GEMMA
THINK = ReasoningParser.THINK
COHERE = "<|START_THINKING|>so<|END_THINKING|>"
TOOLS: dict[str, dict[str, Any]] = {
    "write": {"type": "object", "properties": {"text": {"type": "string"}, "n": {"type": "integer"}}},
    "ping": {"type": "object", "properties": {}},
}


def deltas_of(syntax: AnswerSyntax, pieces: Iterable[str], **options: Any) -> list[Delta]:
    return reading.deltas_of(syntax, TOOLS, pieces, **options)


@pytest.mark.parametrize("name", ["hermes", "qwen3_coder", "llama3_json", "mistral", "mistral named", "harmony"])
def test_arguments_stream_before_the_call_is_whole(name: str) -> None:
    writer = WRITERS[name]
    text = writer.answer("", "", [("write", {"text": "some words"}), ("ping", {})], "", First())
    deltas = deltas_of(AnswerSyntax(writer.form, writer.reasoning), [*text])
    assert len([it for it in deltas if isinstance(it, ArgumentsText) and it.index == 0]) > 5
    assert [it.name for it in deltas if isinstance(it, CallStart)] == ["write", "ping"]


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        (HERMES, 'Now: <tool_call>{"name": "write"}</tool_call>'),
        (HERMES, '<tool_call>{"name": "write", "arguments": [1]}</tool_call>'),
        (HERMES, '<tool_call>{"name": "write", "arguments": "words"}</tool_call>'),
        (HERMES, '<tool_call>{"name": 5, "arguments": {}}</tool_call>'),
        (HERMES, '<tool_call>{"name": "\\ud800", "arguments": {}}</tool_call>'),
        (CODER, "<tool_call>write</tool_call>"),
        (LLAMA, 'See {"a": 1} and {b}.'),
        (LLAMA, '{"name": 5, "arguments": {}}'),
        (MISTRAL, "[TOOL_CALLS]write"),
        (GEMMA, "<|tool_call>write<tool_call|>"),
        (HARMONY, "No channel at all."),
    ],
)
def test_what_is_no_call_after_all_is_content(kind: ToolCallParser, text: str) -> None:
    reasoning = ReasoningParser.HARMONY if kind is HARMONY else THINK
    answer = whole_answer(deltas_of(AnswerSyntax(kind, reasoning), [text], is_streamed=False))
    assert (answer.content, answer.calls) == (text, ())


@pytest.mark.parametrize(
    ("text", "content", "names"),
    [
        ("Now: \n[TOOL_CALLS]write [TOOL_CALLS]ping", "Now: \n[TOOL_CALLS]write [TOOL_CALLS]ping", []),
        ("Now: [TOOL_CALLS]ping{}", "Now:", ["ping"]),
        ('Now: \n[TOOL_CALLS][{"name": "ping", "arguments": {}}]', "Now:", ["ping"]),
        ("Now: [TOOL_CALLS]ping{}[TOOL_CALLS]write", "Now:[TOOL_CALLS]write", ["ping"]),
    ],
)
def test_blanks_before_a_call_are_no_content(text: str, content: str, names: list[str]) -> None:
    for pieces in ([text], [*text]):
        answer = whole_answer(deltas_of(AnswerSyntax(MISTRAL), pieces))
        assert (answer.content, [call.name for call in answer.calls]) == (content, names)


@pytest.mark.parametrize("behind", [" Done.", "\n", ", ", ' {"n": 6} }'])
def test_text_behind_the_arguments_of_a_named_call_is_none_of_them(behind: str) -> None:
    written = """{"text": "}\\" [{", "n": 5}"""
    text = f"[TOOL_CALLS]write{written}{behind}[TOOL_CALLS]ping[ARGS]{{}}{behind}"
    for pieces in ([text], [*text]):
        answer = whole_answer(deltas_of(AnswerSyntax(MISTRAL), pieces))
        calls = [(call.name, call.arguments, call.is_whole) for call in answer.calls]
        assert (answer.content, calls) == ("", [("write", written, True), ("ping", "{}", True)])


def test_messages_of_one_channel_are_lines() -> None:
    def message(channel: str, text: str) -> str:
        return f"<|channel|>{channel}<|message|>{text}<|end|><|start|>assistant"

    analysis = message("analysis", "Hm.") + message("analysis", "") + message("analysis", "So.")
    text = message("commentary", "First this.") + analysis + message("final", "") + message("final", "Then that.")
    for pieces in ([text], [*text]):
        answer = whole_answer(deltas_of(AnswerSyntax(HARMONY, ReasoningParser.HARMONY), pieces))
        assert (answer.content, answer.reasoning) == ("First this.\nThen that.", "Hm.\nSo.")


@pytest.mark.parametrize("is_streamed", [True, False])
@pytest.mark.parametrize("arguments", ["null", '""', '" "', "{}", '"{}"', '" {\\"n\\": 5} "'])
def test_arguments_are_an_object_however_they_are_written(arguments: str, is_streamed: bool) -> None:
    text = f'<tool_call>{{"name": "write", "arguments": {arguments}}}</tool_call>'
    [call] = whole_answer(deltas_of(AnswerSyntax(HERMES), [*text], is_streamed=is_streamed)).calls
    assert (strict(call.arguments), call.is_whole) == ({"n": 5} if "5" in arguments else {}, True)


def test_a_prompt_that_opens_reasoning_is_continued() -> None:
    syntax = AnswerSyntax(HERMES, THINK)
    answer = whole_answer(deltas_of(syntax, ["\nyes", "</thi", "nk>no"], prompt="<|im_start|>assistant\n<think>\n"))
    assert (answer.reasoning, answer.content) == ("\nyes", "no")


def test_a_user_who_writes_a_tag_opens_no_reasoning() -> None:
    prompt = "Explain <think><|im_end|>\n<|im_start|>assistant\n"
    answer = whole_answer(deltas_of(AnswerSyntax(HERMES, THINK), ["It is a tag."], prompt=prompt))
    assert (answer.reasoning, answer.content) == ("", "It is a tag.")


@pytest.mark.parametrize(
    ("prompt", "reasoning"),
    [("<|assistant|>", "so"), ("<|assistant|><think>\n", "so"), ("<|assistant|><think>\n\n</think>\n\n", "")],
)
def test_an_answer_that_begins_with_reasoning_may_have_it_closed(prompt: str, reasoning: str) -> None:
    text = f"{reasoning}</think>No." if reasoning else "No."
    answer = whole_answer(deltas_of(AnswerSyntax(HERMES, ReasoningParser.THINK_FIRST), [*text], prompt=prompt))
    assert (answer.reasoning, answer.content) == (reasoning, "No.")


@pytest.mark.parametrize(
    ("form", "text", "reasoning", "num_calls"),
    [
        (HERMES, 'so<tool_call>{"name": "ping", "arguments": {}}</tool_call>', "so", 1),
        (HERMES, 'so<tool_call>\n{"name": "ping", "arguments": {}}</tool_call>', "so", 1),
        (HERMES, "Use <tool_call> tags? No.</think>Paris.", "Use <tool_call> tags? No.", 0),
        (HERMES, "Use <tool_call><function=f></think>Paris.", "Use <tool_call><function=f>", 0),
        (CODER, "so<tool_call>\n<function=ping></function></tool_call>", "so", 1),
        (CODER, "Use <tool_call>{</think>Paris.", "Use <tool_call>{", 0),
        (CODER, "Use <tool_call>", "Use <tool_call>", 0),
    ],
)
def test_a_call_ends_reasoning_and_its_mark_alone_does_not(
    form: ToolCallParser, text: str, reasoning: str, num_calls: int
) -> None:
    for pieces in ([text], [*text]):
        answer = whole_answer(deltas_of(AnswerSyntax(form, THINK), ["<think>", *pieces]))
        assert (answer.reasoning, len(answer.calls)) == (reasoning, num_calls)
        assert answer.content == text.partition("</think>")[2]


KINDS = [frozenset(kinds) for kinds in (["number"], ["integer"], ["array"], ["object", "null"], ["number", "string"])]


@settings(deadline=None)
@given(st.sampled_from(KINDS), st.text("0123456789.eE+-_ NaInfity[],{}\"'nultr\n٣", max_size=12))
def test_a_bare_value_becomes_json(kinds: frozenset[str], text: str) -> None:
    def finite(number: str) -> float:
        assert math.isfinite(float(number))
        return float(number)

    json.loads(json_of(text, kinds), parse_constant=refuse, parse_float=finite)


@pytest.mark.parametrize("text", ["1234567890123456789", "0.1234567890123456789", "-1.50", "1e5", "1E-400", "3.0"])
def test_a_number_keeps_its_digits(text: str) -> None:
    assert json_of(f" {text}\n", frozenset({"number"})) == text


@pytest.mark.parametrize("text", ["NaN", "Infinity", "-Infinity", "1e999", "[NaN]", '{"a": -1e999}'])
def test_what_json_has_no_number_for_is_text(text: str) -> None:
    for kinds in KINDS:
        assert json.loads(json_of(text, kinds)) == text


def test_deep_nesting_costs_no_error() -> None:
    deltas_of(AnswerSyntax(HERMES), ['<tool_call>{"name": "x", "arguments": ' + "[" * 100_000])
    deltas_of(AnswerSyntax(HERMES), ['<tool_call>{"name": "x", "arguments": {"a":' + "[" * 100_000])
    deltas_of(AnswerSyntax(GEMMA), ["<|tool_call>call:x{a:" + "[{a:" * 50_000])


@pytest.mark.parametrize(
    ("source", "name"),
    [*((source, name) for name, source in OTHERS_TEMPLATES.items()), ("{{ tools }}[{{ tools[0].name }}()]", "")],
)
def test_a_format_that_is_not_read_is_named(source: str, name: str, caplog: pytest.LogCaptureFixture) -> None:
    syntax = choose_syntax(ChatTemplate(source, {}), ToolCallParser.AUTO, ReasoningParser.AUTO)
    assert (syntax.calls, syntax.has_tool_template) == (HERMES, False)
    [record] = caplog.records
    assert name in record.getMessage()
    assert "--tool-call-parser" in record.getMessage()


@pytest.mark.parametrize("model", TEMPLATES)
def test_a_template_has_the_signs_of_one_format(model: str, caplog: pytest.LogCaptureFixture) -> None:
    source, calls, reasoning = TEMPLATES[model]
    assert [form for form, it in FORMATS.items() if it.is_in(source)] == [calls]
    syntax = choose_syntax(ChatTemplate(source, {}), ToolCallParser.AUTO, ReasoningParser.AUTO)
    assert (syntax.calls, syntax.reasoning, syntax.has_tool_template) == (calls, reasoning, True)
    assert not caplog.records


def test_each_format_has_a_template() -> None:
    assert {calls for _, calls, _ in TEMPLATES.values()} == {*FORMATS} == {*ToolCallParser} - {ToolCallParser.AUTO}


@pytest.mark.parametrize(
    ("parser", "text", "reasoning", "content"),
    [
        (ReasoningParser.GRANITE, "<think>so</think>\n<response> Yes.\n</response>\n", "so", "Yes."),
        (ReasoningParser.GRANITE, "Here is my thought process: so\nHere is my response: Yes.", " so\n", " Yes."),
        (ReasoningParser.GRANITE, "Here's my thought process: so\nHere's my response: Yes.", " so\n", " Yes."),
        (ReasoningParser.GRANITE, "Here is my view: <response>", "", "Here is my view: <response>"),
        (ReasoningParser.GRANITE, "<response>Yes. </resp", "", "Yes. </resp"),
        (ReasoningParser.HUNYUAN_A13B, "<think>\nso\n</think>\n<answer>\nYes.\n</answer>", "\nso\n", "Yes."),
        (ReasoningParser.COHERE3, f"{COHERE}<|START_RESPONSE|>Yes.<|END_RESPONSE|>", "so", "Yes."),
        (ReasoningParser.COHERE3, "<|START_RESPONSE|>Yes.", "", "Yes."),
        (ReasoningParser.COHERE4, f"{COHERE}<|START_TEXT|>Yes.<|END_TEXT|>", "so", "Yes."),
        (ReasoningParser.KIMI_K2, "◁think▷so◁/think▷Yes.", "so", "Yes."),
        (ReasoningParser.HY_V3, "<think:opensource>so</think:opensource>Yes.", "so", "Yes."),
        (ReasoningParser.SEED_OSS, "<seed:think>so</seed:think>Yes.", "so", "Yes."),
        (ReasoningParser.GLM45, "\n<think>so</think>\nYes.", "so", "\nYes."),
        (ReasoningParser.DEEPSEEK_V3, "Yes.", "", "Yes."),
    ],
)
def test_reasoning_stands_between_the_marks_of_its_model(
    parser: ReasoningParser, text: str, reasoning: str, content: str
) -> None:
    for pieces in ([text], [*text]):
        answer = whole_answer(deltas_of(AnswerSyntax(HERMES, parser), pieces))
        assert (answer.reasoning, answer.content.rstrip()) == (reasoning, content)


def test_a_prompt_opens_reasoning_by_the_mark_that_it_ends_with() -> None:
    syntax = AnswerSyntax(HERMES, ReasoningParser.HY_V3)
    for opening, closing in (("<think>", "</think>"), ("<think:opensource>", "</think:opensource>")):
        answer = whole_answer(deltas_of(syntax, [*f"so{closing}Yes."], prompt=f"<|assistant|>{opening}"))
        assert (answer.reasoning, answer.content) == ("so", "Yes.")
        assert syntax.reasoning_before(f"<|assistant|>{opening}{closing}") is None


@pytest.mark.parametrize("name", WRITERS)
def test_a_call_within_reasoning_ends_it(name: str) -> None:
    writer = WRITERS[name]
    unmarked = (ToolCallParser.PYTHONIC, ToolCallParser.FUNCTIONARY_V31, ToolCallParser.FUNCTIONARY_V32, HARMONY)
    if writer.form in unmarked or not writer.ends_thought:
        return  # their calls begin with nothing that a thought could not have
    text = f"{writer.think[0]}so {writer.openings[0]} or{writer.calls([('ping', {})], First())}"
    for pieces in ([text], [*text]):
        answer = whole_answer(deltas_of(AnswerSyntax(writer.form, writer.reasoning), pieces))
        assert (answer.reasoning, [call.name for call in answer.calls]) == (f"so {writer.openings[0]} or", ["ping"])
