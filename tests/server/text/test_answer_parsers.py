"""An answer's text becomes reasoning, content and calls, wherever the pieces of the text end."""

import json
import random
from collections.abc import Iterable
from itertools import pairwise

import pytest

from server.settings import ReasoningParser, ToolCallParser
from server.text.answer.deltas import Answer, ArgumentsText, CallStart, Delta, whole_answer
from server.text.answer.syntax import AnswerSyntax

TOOLS = {
    "weather": {
        "type": "object",
        "properties": {"city": {"type": "string"}, "days": {"type": "integer"}, "at": {"type": "array"}},
    },
    "write": {"type": "object", "properties": {"text": {"type": "string"}}},
}
HERMES, CODER, LLAMA = ToolCallParser.HERMES, ToolCallParser.QWEN3_CODER, ToolCallParser.LLAMA3_JSON
MISTRAL, HARMONY, GEMMA = ToolCallParser.MISTRAL, ToolCallParser.HARMONY, ToolCallParser.GEMMA
REASONING = {
    HARMONY: ReasoningParser.HARMONY,
    GEMMA: ReasoningParser.GEMMA,
    MISTRAL: ReasoningParser.MISTRAL,
}
WEATHER = ("weather", {"city": "Zürich ☂", "days": 3})
WRITE = ("write", {"text": 'a "b" {c} \\ \n</x>'})


def deltas_of(
    kind: ToolCallParser, pieces: Iterable[str], *, is_streamed: bool, prompt: str = "", has_tools: bool = True
) -> list[Delta]:
    syntax = AnswerSyntax(kind, REASONING.get(kind, ReasoningParser.THINK))
    parser = syntax.parser(TOOLS if has_tools else None, prompt, is_streamed=is_streamed)
    assert parser is not None
    found = [delta for piece in pieces for delta in parser.feed(piece)]
    return found + parser.finish()


def parsed(kind: ToolCallParser, pieces: Iterable[str], *, is_streamed: bool = True, prompt: str = "") -> Answer:
    return whole_answer(deltas_of(kind, pieces, is_streamed=is_streamed, prompt=prompt))


def calls_of(answer: Answer) -> list[tuple[str, object]]:
    return [(call.name, json.loads(call.arguments)) for call in answer.calls]


def written(name: str, arguments: dict[str, object], **others: bool) -> str:
    return json.dumps({"name": name, "arguments": arguments}, **others)


THINK = "<think>two calls</think>Wait."
GOOD = [
    (
        HERMES,
        f"{THINK}<tool_call>\n{written(*WEATHER, ensure_ascii=False)}\n</tool_call>\n"
        f"<tool_call>{written(*WRITE)}</tool_call>",
    ),
    (
        CODER,
        f"{THINK}\n<tool_call>\n<function=weather>\n<parameter=city>\nZürich ☂\n</parameter>\n"
        "<parameter=days>3</parameter>\n"
        "</function>\n</tool_call>\n<tool_call>\n<function=write>\n<parameter=text>\n"
        'a "b" {c} \\ \n</x>\n</parameter>\n</function>\n</tool_call>',
    ),
    (LLAMA, f"{THINK}<|python_tag|>{written(*WEATHER)}; {written(*WRITE).replace('arguments', 'parameters')}"),
    (MISTRAL, f"[THINK]two calls[/THINK]Wait.[TOOL_CALLS] [{written(*WEATHER)}, {written(*WRITE)}]"),
    (
        MISTRAL,
        f"[THINK]two calls[/THINK]Wait.[TOOL_CALLS]weather{json.dumps(WEATHER[1])}"
        f"[TOOL_CALLS]write[CALL_ID]123456789[ARGS]{json.dumps(WRITE[1])}",
    ),
    (
        HARMONY,
        "<|channel|>analysis<|message|>two calls<|end|><|start|>assistant<|channel|>commentary<|message|>Wait.<|end|>"
        "<|start|>assistant<|channel|>commentary to=functions.weather <|constrain|>json<|message|>"
        f"{json.dumps(WEATHER[1])}<|call|><|start|>assistant to=functions.write<|channel|>commentary json<|message|>"
        f"{json.dumps(WRITE[1])}",
    ),
    (
        GEMMA,
        "<|channel>thought\ntwo calls<channel|>Wait."
        '<|tool_call>call:weather{city:<|"|>Zürich ☂<|"|>,days:3}<tool_call|>'
        '<|tool_call>call:write{text:<|"|>a "b" {c} \\ \n</x><|"|>}<tool_call|>',
    ),
]


@pytest.mark.parametrize("is_streamed", [True, False])
@pytest.mark.parametrize(("kind", "text"), GOOD)
def test_reasoning_content_and_calls_are_separated(kind: ToolCallParser, text: str, is_streamed: bool) -> None:
    answer = parsed(kind, [text], is_streamed=is_streamed)
    assert (answer.reasoning, answer.content) == ("two calls", "Wait.")
    assert calls_of(answer) == [WEATHER, WRITE]


def without_ids(answer: Answer) -> tuple[object, ...]:
    return answer.content, answer.reasoning, [(call.name, call.arguments) for call in answer.calls]


def cuts_of(text: str, chance: random.Random) -> Iterable[list[str]]:
    yield [*text]
    for at in range(len(text)):
        yield [text[:at], text[at:]]
    for _ in range(20):
        places = sorted({0, len(text), *(chance.randrange(len(text) + 1) for _ in range(8))})
        yield [text[a:b] for a, b in pairwise(places)]


@pytest.mark.parametrize(("kind", "text"), GOOD)
def test_pieces_join_to_the_same_however_cut(kind: ToolCallParser, text: str) -> None:
    chance = random.Random(1)
    for _ in range(5):  # malformed ones too: some of the text is lost
        for is_streamed in (True, False):
            wanted = without_ids(parsed(kind, [text], is_streamed=is_streamed))
            for pieces in cuts_of(text, chance):
                assert without_ids(parsed(kind, pieces, is_streamed=is_streamed)) == wanted, (pieces, is_streamed)
        at = chance.randrange(len(text))
        text = text[:at] + text[at + chance.randrange(1, 12) :] if chance.random() < 0.7 else text[:at]
        if not text:
            return


@pytest.mark.parametrize(("kind", "text"), [it for it in GOOD if it[0] is not GEMMA])
def test_arguments_stream_before_the_call_is_whole(kind: ToolCallParser, text: str) -> None:
    deltas = deltas_of(kind, [*text], is_streamed=True)
    first = [delta.text for delta in deltas if isinstance(delta, ArgumentsText) and delta.index == 0]
    assert len(first) > 10
    assert [delta.name for delta in deltas if isinstance(delta, CallStart)] == ["weather", "write"]


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        (HERMES, '<tool_call>{"name": "weather", "arguments": {"city": </tool_call>'),
        (HERMES, 'Now: <tool_call>{"name": "weather"}</tool_call>'),
        (HERMES, '<tool_call>{"name": "weather", "arguments": {}}</tool_call><tool_call>{"na'),
        (CODER, "<tool_call>weather</tool_call>"),
        (LLAMA, 'See {"a": 1} and {b}.'),
        (LLAMA, '{"name": "weather", "parameters": {"city": "Bern"'),
        (MISTRAL, '[TOOL_CALLS] [{"name": "weather", "arguments": {"city"'),
        (MISTRAL, "[TOOL_CALLS]weather"),
        (GEMMA, "<|tool_call>weather<tool_call|>"),
        (HARMONY, "No channel at all."),
    ],
)
def test_what_is_no_call_after_all_is_content(kind: ToolCallParser, text: str) -> None:
    answer = parsed(kind, [text], is_streamed=False)
    assert (answer.content, answer.calls) == (text, ())


def test_a_prompt_that_opens_reasoning_is_continued() -> None:
    answer = parsed(HERMES, ["\nyes", "</thi", "nk>no"], prompt="<|im_start|>assistant\n<think>\n")
    assert (answer.reasoning, answer.content) == ("\nyes", "no")


def test_a_user_who_writes_a_tag_opens_no_reasoning() -> None:
    answer = parsed(HERMES, ["It is a tag."], prompt="Explain <think><|im_end|>\n<|im_start|>assistant\n")
    assert (answer.reasoning, answer.content) == ("", "It is a tag.")


def test_a_call_within_reasoning_ends_it() -> None:
    answer = parsed(HERMES, [f"<think>so<tool_call>{written(*WEATHER)}</tool_call>"])
    assert (answer.reasoning, calls_of(answer)) == ("so", [WEATHER])


@pytest.mark.parametrize("kind", [*ToolCallParser][1:])
def test_hostile_text_costs_no_error(kind: ToolCallParser) -> None:
    chance = random.Random(2)
    marks = ["<tool_call>", "</tool_call>", "{", "}", '"', "[", "]", "[TOOL_CALLS]", "<|tool_call>", "call:", '<|"|>']
    marks += ["<function=a>", "<parameter=b>", "</parameter>", "</function>", ":", ",", '"name"', '"arguments"', "\\"]
    marks += ["<|channel|>", "<|message|>", "<|end|>", "to=functions.x", "<think>", "x", " ", "\ud800", '"\\ud800"']
    for _ in range(1000):
        pieces = chance.choices(marks, k=chance.randrange(1, 20))
        streamed = parsed(kind, pieces)
        assert without_ids(streamed) == without_ids(parsed(kind, ["".join(pieces)])), pieces
    deep = '<tool_call>{"name": "x", "arguments": ' + "[" * 100_000
    deltas_of(kind, [deep, "<|tool_call>call:x{a:" + "[{a:" * 50_000], is_streamed=False)
