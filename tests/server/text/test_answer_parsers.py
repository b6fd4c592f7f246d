"""An answer's text becomes reasoning, content and calls, wherever the pieces of the text end, and whatever they are."""

import json
import math
import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NoReturn

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from server.settings import ReasoningParser, ToolCallParser
from server.text.answer.deltas import Answer, ArgumentsText, CallEnd, CallStart, Delta, whole_answer
from server.text.answer.formats import FORMATS
from server.text.answer.syntax import AnswerSyntax, choose_syntax
from server.text.answer.texts.values import json_of
from server.text.chat_template import ChatTemplate
from support.answers.drawn import dumped
from support.answers.templates import OTHERS as OTHERS_TEMPLATES
from support.answers.templates import TEMPLATES
from support.answers.writers import WRITERS, First

HERMES, CODER, LLAMA = ToolCallParser.HERMES, ToolCallParser.QWEN3_CODER, ToolCallParser.LLAMA3_JSON
MISTRAL, HARMONY, GEMMA = ToolCallParser.MISTRAL, ToolCallParser.HARMONY, ToolCallParser.GEMMA
QUOTE = '<|"|>'
NESTED = {"type": "object", "properties": {"s": {"type": "string"}, "n": {"type": "integer"}}}
TOOLS: dict[str, dict[str, Any]] = {
    "write": {
        "type": "object",
        "properties": {
            "text": {"type": "string"},
            "n": {"type": "integer"},
            "x": {"type": "number"},
            "yes": {"type": "boolean"},
            "names": {"type": "array", "items": {"type": "string"}},
            "ids": {"type": "array", "items": {"type": "integer"}},
            "them": {"type": "array", "items": NESTED},
            "it": NESTED,
        },
    },
    "ping": {"type": "object", "properties": {}},
}
Call = tuple[str, dict[str, Any]]
MARKS = ["<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]", "<|tool_call>", "<tool_call|>", QUOTE, "<|end|>"]
MARKS += ["<function=", "</function>", "<parameter=", "</parameter>", "<|channel|>", "<|message|>", "<|python_tag|>"]
MARKS += ["<think>", "</think>", "[THINK]", "[/THINK]", "<|start|>", "<|call|>", "<|channel>", "<channel|>"]
OTHERS = [
    '"',
    "\\",
    "{",
    "}",
    "[",
    "]",
    ":",
    ",",
    "\n",
    " ",
    "a",
    "é",
    "😀",
    "42",
    "null",
    "true",
    "NaN",
    '\\"',
    "to=x",
]
OTHERS += [
    '{"name": "ping", "arguments": {}}',
    "call:ping{}",
    "ping{}",
    '"name"',
    '"arguments"',
    ";",
    "'",
    "</x>",
    "\t",
]


def text_without(chance: random.Random, *unwritable: str, num_pieces: int = 8) -> str:
    """A hostile text without some, and without what only together makes one of them."""
    pieces = [it for it in (*MARKS, *OTHERS) if not any(bad in it for bad in unwritable)]
    while True:
        text = "".join(chance.choices(pieces, k=chance.randrange(num_pieces)))
        if not any(bad in text for bad in unwritable):
            return text


def drawn_calls(chance: random.Random, *unwritable: str) -> list[Call]:
    """Up to three calls, whose strings are without some texts."""

    def string() -> str:
        return text_without(chance, *unwritable)

    def integer() -> int:
        return chance.choice([0, -7, 42, 2**53 + 1, -(10**30)])

    def nested() -> dict[str, Any]:
        return {"n": integer()} | ({"s": string()} if chance.random() < 0.7 else {})

    def arguments() -> dict[str, Any]:
        found = {
            "text": string(),
            "n": integer(),
            "x": chance.choice([0.5, -1e-7, 1e22, 3, 2**60 + 1]),
            "yes": chance.random() < 0.5,
            "names": [string() for _ in range(chance.randrange(4))],
            "ids": [integer() for _ in range(chance.randrange(4))],
            "them": [nested() for _ in range(chance.randrange(3))],
            "it": nested(),
        }
        return {name: found[name] for name in chance.sample([*found], k=chance.randrange(5))}

    return [("ping", {}) if chance.random() < 0.2 else ("write", arguments()) for _ in range(chance.randrange(4))]


def call_object(call: Call, key: str, chance: random.Random) -> str:
    name, arguments = call
    fields: list[tuple[str, Any]] = [("name", name), (key, arguments)]
    if chance.random() < 0.3:
        fields.append(("id", 'x"{'))
    chance.shuffle(fields)
    return dumped(dict(fields), chance)


def tagged(reasoning: str, opens: str, closes: str) -> str:
    return f"{opens}{reasoning}{closes}" if reasoning else ""


def hermes(reasoning: str, content: str, calls: list[Call], chance: random.Random) -> str:
    def written(call: Call) -> str:
        around = chance.choice(["", "\n", " "])
        return f"<tool_call>{around}{call_object(call, 'arguments', chance)}{around}</tool_call>"

    return tagged(reasoning, "<think>", "</think>") + content + "\n".join(map(written, calls))


def coder(reasoning: str, content: str, calls: list[Call], chance: random.Random) -> str:
    def written(call: Call) -> str:
        name, arguments = call
        values = ((key, it if isinstance(it, str) else dumped(it, chance)) for key, it in arguments.items())
        parameters = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in values)
        return f"<tool_call>\n<function={name}>\n{parameters}</function>\n</tool_call>"

    return tagged(reasoning, "<think>", "</think>") + content + "\n".join(map(written, calls))


def llama(reasoning: str, content: str, calls: list[Call], chance: random.Random) -> str:
    tag = chance.choice(["", "<|python_tag|>"]) if calls else ""
    objects = [call_object(call, chance.choice(["arguments", "parameters"]), chance) for call in calls]
    return tagged(reasoning, "<think>", "</think>") + content + tag + "; ".join(objects)


def mistral(reasoning: str, content: str, calls: list[Call], chance: random.Random) -> str:
    objects = ", ".join(call_object(call, "arguments", chance) for call in calls)
    return tagged(reasoning, "[THINK]", "[/THINK]") + content + (f"[TOOL_CALLS] [{objects}]" if calls else "")


def mistral_named(reasoning: str, content: str, calls: list[Call], chance: random.Random) -> str:
    between = chance.choice(["", "[ARGS]", "[CALL_ID]123456789[ARGS]"])
    written = "".join(f"[TOOL_CALLS]{name}{between}{dumped(it, chance)}" for name, it in calls)
    return tagged(reasoning, "[THINK]", "[/THINK]") + content + written


def harmony(reasoning: str, content: str, calls: list[Call], chance: random.Random) -> str:
    parts = [f"<|channel|>analysis<|message|>{line}<|end|>" for line in reasoning.split("\n") if line]
    if content or not (parts or calls):
        parts.append(f"<|channel|>{chance.choice(['final', 'commentary'])}<|message|>{content}<|end|>")
    for name, arguments in calls:
        to, channel = f" to=functions.{name}", "<|channel|>commentary"
        head = chance.choice([f"{channel}{to} <|constrain|>json", f"{to}{channel} json"])
        parts.append(f"{head}<|message|>{dumped(arguments, chance)}<|call|>")
    return "<|start|>assistant".join(parts).removesuffix("<|call|>")


def gemma(reasoning: str, content: str, calls: list[Call], chance: random.Random) -> str:
    def written(value: Any) -> str:
        if isinstance(value, dict):
            return "{" + ",".join(f"{key}:{written(it)}" for key, it in value.items()) + "}"
        if isinstance(value, list):
            return "[" + ",".join(map(written, value)) + "]"
        text = value if isinstance(value, str) else json.dumps(value)
        may_be_bare = not isinstance(value, str) or (text.isascii() and text.isalnum())
        is_bare = may_be_bare and (chance.random() < (0.3 if isinstance(value, str) else 0.8))
        return text if is_bare else f"{QUOTE}{text}{QUOTE}"

    parts = (f"<|tool_call>call:{name}{written(arguments)}<tool_call|>" for name, arguments in calls)
    return tagged(reasoning, "<|channel>thought\n", "<channel|>") + content + "".join(parts)


@dataclass(frozen=True)
class Form:
    """A format: its writer, and what no text in it can hold."""

    kind: ToolCallParser
    reasoning: ReasoningParser
    write: Callable[[str, str, list[Call], random.Random], str]
    not_in_reasoning: tuple[str, ...]
    not_in_content: tuple[str, ...]
    not_in_strings: tuple[str, ...] = ()
    has_json: bool = True  # what ends a call is found only where its arguments are JSON

    def syntax(self) -> AnswerSyntax:
        return AnswerSyntax(self.kind, self.reasoning)


HARMONYS = ("<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|call|>")
VALUES = ("<parameter=", "</parameter>", "</function>")
THINK = ReasoningParser.THINK
FORMS = {
    "hermes": Form(HERMES, THINK, hermes, ("</think>", "<tool_call>{"), ("<tool_call>", "<think>")),
    "coder": Form(CODER, THINK, coder, ("</think>", "<tool_call><function="), ("<tool_call>", "<function="), VALUES),
    "llama": Form(LLAMA, THINK, llama, ("</think>",), ("<|python_tag|>", "{", "<think>")),
    "mistral": Form(MISTRAL, ReasoningParser.MISTRAL, mistral, ("[/THINK]",), ("[TOOL_CALLS]", "[THINK]")),
    "named": Form(
        MISTRAL, ReasoningParser.MISTRAL, mistral_named, ("[/THINK]",), ("[TOOL_CALLS]", "[THINK]"),
        ("[TOOL_CALLS]",), has_json=False,
    ),
    "harmony": Form(HARMONY, ReasoningParser.HARMONY, harmony, HARMONYS, HARMONYS, HARMONYS, has_json=False),
    "gemma": Form(
        GEMMA, ReasoningParser.GEMMA, gemma, ("<channel|>",), ("<|tool_call>", "<|channel>"), (QUOTE, "<tool_call|>")
    ),
}  # fmt: skip


def drawn_answer(form: Form, chance: random.Random) -> tuple[str, str, str, list[Call]]:
    """An answer's text, and what is in it: reasoning, content and calls."""
    reasoning = text_without(chance, *form.not_in_reasoning).strip()
    if form.kind is HARMONY:
        reasoning = "\n".join(line for line in reasoning.split("\n") if line)
    elif form.kind in (HERMES, CODER):  # the mark is named, and no call follows it
        behind = [it.lstrip() for it in reasoning.split("<tool_call>")[1:]]
        reasoning = "Hm." if any(not it or it.startswith(("{", "<function=")) for it in behind) else reasoning
    content = text_without(chance, *form.not_in_content, "<think>", "[THINK]", "<|channel>").strip()
    content = f"-{content}" if form.kind is HARMONY else content
    calls = drawn_calls(chance, *form.not_in_strings)
    return form.write(reasoning, content, calls, chance), reasoning, content, calls


def deltas_of(syntax: AnswerSyntax, pieces: Iterable[str], *, prompt: str = "", **options: bool) -> list[Delta]:
    parser = syntax.parser(TOOLS, prompt, **({"is_streamed": True} | options))
    assert parser is not None
    found = [delta for piece in pieces for delta in parser.feed(piece)]
    return checked(found + parser.finish())


def checked(deltas: list[Delta]) -> list[Delta]:
    """The deltas, which a client can read: none is empty, and arguments are those of the call that has begun last."""
    num_begun, is_open = 0, False
    for delta in deltas:
        match delta:
            case CallStart(index):
                assert index == num_begun
                num_begun, is_open = num_begun + 1, True
            case ArgumentsText(index, text):
                assert text
                assert is_open, deltas
                assert index == num_begun - 1
            case CallEnd(index):
                assert is_open, deltas
                assert index == num_begun - 1
                is_open = False
            case it:
                assert it.text, deltas
    return deltas


def refuse(name: str) -> NoReturn:
    raise AssertionError(name)


def strict(text: str) -> Any:
    return json.loads(text, parse_constant=refuse)


def without_ids(answer: Answer) -> tuple[object, ...]:
    return answer.content, answer.reasoning, [(it.name, it.arguments, it.is_whole) for it in answer.calls]


def cut_up(text: str, chance: random.Random) -> list[str]:
    places = sorted({0, len(text), *(chance.randrange(len(text) + 1) for _ in range(chance.randrange(9)))})
    return [text[a:b] for a, b in pairwise(places)]


SEEDS = range(4)
NUM_ANSWERS = 12  # of each seed


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("seed", SEEDS)
def test_a_client_gets_what_the_model_has_written(name: str, seed: int) -> None:
    form, chance = FORMS[name], random.Random(seed)
    for _ in range(NUM_ANSWERS):
        text, reasoning, content, calls = drawn_answer(form, chance)
        for is_streamed, pieces in ((False, [text]), (True, [text]), (True, [*text]), (True, cut_up(text, chance))):
            answer = whole_answer(deltas_of(form.syntax(), pieces, is_streamed=is_streamed))
            assert (answer.reasoning.strip(), answer.content.strip()) == (reasoning, content), (is_streamed, pieces)
            assert [(call.name, strict(call.arguments)) for call in answer.calls] == calls, (is_streamed, pieces)
            assert all(call.is_whole for call in answer.calls)


def broken_answer(form: Form, chance: random.Random) -> str:
    """An answer that is cut anywhere, or has lost or got some text somewhere, or is no answer at all."""
    text, *_ = drawn_answer(form, chance)
    for _ in range(chance.randrange(3)):
        at = chance.randrange(len(text) + 1)
        text = text[:at] + text_without(chance, num_pieces=2) + text[at + chance.randrange(6) :]
    name = chance.choice(["5", "null", '"\\ud800"', "{}", '["ping"]', '"ping", "name": 5'])
    arguments = chance.choice(["[1]", "7", '"x"', "true", '{"a": NaN}', "null"])
    wrongs = [f'{{"name": {name}, "arguments": {{}}}}', f'{{"name": "ping", "arguments": {arguments}}}']
    wrong = {HERMES: "<tool_call>", MISTRAL: "[TOOL_CALLS]["}.get(form.kind, "") + chance.choice(wrongs)
    text = chance.choice([text, text, text + wrong, wrong])
    return text[: chance.randrange(len(text) + 1)] if chance.random() < 0.5 else text


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("seed", SEEDS)
def test_a_broken_answer_is_read_alike_however_it_comes(name: str, seed: int) -> None:
    form, chance = FORMS[name], random.Random(seed)
    for _ in range(NUM_ANSWERS):
        text, syntax = broken_answer(form, chance), form.syntax()
        pieces = cut_up(text, chance)
        for options in ({}, {"is_streamed": False}, {"is_bound": True}, {"is_bound": True, "is_forced": True}):
            answers = [whole_answer(deltas_of(syntax, cut, **options)) for cut in ([text], [*text], pieces)]
            assert without_ids(answers[0]) == without_ids(answers[1]) == without_ids(answers[2])
            for call in answers[0].calls if form.has_json else ():
                assert not call.is_whole or isinstance(strict(call.arguments), dict)
        whole = whole_answer(deltas_of(syntax, [text], is_streamed=False))
        if not whole.calls and form.kind is not HARMONY:  # nothing that was written is lost
            assert text.endswith(whole.content)
            assert len(whole.reasoning) + len(whole.content) >= len(text.strip()) - len("<|channel>thought\n<channel|>")
        first = deltas_of(syntax, pieces, parallel_tool_calls=False)
        of_first = [it for it in deltas_of(syntax, pieces) if getattr(it, "index", 0) == 0]
        assert without_ids(whole_answer(first)) == without_ids(whole_answer(of_first))


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("seed", SEEDS)
def test_a_forced_call_that_is_cut_has_no_content(name: str, seed: int) -> None:
    form, chance = FORMS[name], random.Random(seed)
    for _ in range(NUM_ANSWERS):
        calls = drawn_calls(chance, *form.not_in_strings) or [("ping", {})]
        text = form.write("", "", calls, chance)
        text = text[: chance.randrange(len(text) + 1)]
        forced = {"is_bound": True, "is_forced": True}
        whole = whole_answer(deltas_of(form.syntax(), [text], is_streamed=False, **forced))
        streamed = whole_answer(deltas_of(form.syntax(), [*text], **forced))
        assert (whole.content, streamed.content) == ("", "")
        given = streamed.calls[: max(1, sum(call.is_whole for call in streamed.calls))]
        assert [(it.name, it.arguments) for it in whole.calls] == [(it.name, it.arguments) for it in given]
        for call, (function, arguments) in zip(whole.calls, calls, strict=False):
            assert call.name == function
            if call.is_whole:
                assert strict(call.arguments) == arguments
            else:
                with pytest.raises(ValueError, match=r"line \d+ column"):
                    strict(call.arguments)  # no client takes it for whole


@pytest.mark.parametrize("name", [name for name in FORMS if name != "gemma"])
def test_arguments_stream_before_the_call_is_whole(name: str) -> None:
    form = FORMS[name]
    text = form.write("", "", [("write", {"text": "some words"}), ("ping", {})], random.Random(0))
    deltas = deltas_of(form.syntax(), [*text])
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
    ("name", "text", "reasoning", "num_calls"),
    [
        ("hermes", 'so<tool_call>{"name": "ping", "arguments": {}}</tool_call>', "so", 1),
        ("hermes", 'so<tool_call>\n{"name": "ping", "arguments": {}}</tool_call>', "so", 1),
        ("hermes", "Use <tool_call> tags? No.</think>Paris.", "Use <tool_call> tags? No.", 0),
        ("hermes", "Use <tool_call><function=f></think>Paris.", "Use <tool_call><function=f>", 0),
        ("coder", "so<tool_call>\n<function=ping></function></tool_call>", "so", 1),
        ("coder", "Use <tool_call>{</think>Paris.", "Use <tool_call>{", 0),
        ("coder", "Use <tool_call>", "Use <tool_call>", 0),
    ],
)
def test_a_call_ends_reasoning_and_its_mark_alone_does_not(
    name: str, text: str, reasoning: str, num_calls: int
) -> None:
    for pieces in ([text], [*text]):
        answer = whole_answer(deltas_of(FORMS[name].syntax(), ["<think>", *pieces]))
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
    if writer.form in (ToolCallParser.PYTHONIC, ToolCallParser.FUNCTIONARY_V31, ToolCallParser.FUNCTIONARY_V32):
        return  # their calls begin with nothing that a thought could not have
    text = f"{writer.think[0]}so {writer.openings[0]} or{writer.calls([('ping', {})], First())}"
    for pieces in ([text], [*text]):
        answer = whole_answer(deltas_of(AnswerSyntax(writer.form, writer.reasoning), pieces))
        assert (answer.reasoning, [call.name for call in answer.calls]) == (f"so {writer.openings[0]} or", ["ping"])
