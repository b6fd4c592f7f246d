"""Calls of every format come to the client as the model has written them, wherever the text is cut."""

import random
import time
from collections.abc import Iterable
from itertools import pairwise

import pytest

from server.text.answer.deltas import Answer, whole_answer
from server.text.answer.syntax import AnswerSyntax
from support.answers.drawn import Call, ToolSchemas, drawn_calls, drawn_text, drawn_tools
from support.answers.reading import deltas_of, strict, without_ids
from support.answers.writers import WRITERS, Writer

NUM_ANSWERS = 200  # of each format; of each eighth, the text comes letter by letter
MARKS_OF_REASONING = ("<think>", "</think>", "<response>")


def read(writer: Writer, tools: ToolSchemas, pieces: Iterable[str], **options: bool) -> Answer:
    return whole_answer(deltas_of(AnswerSyntax(writer.form, writer.reasoning), tools, pieces, **options))


def drawn(writer: Writer, chance: random.Random) -> tuple[ToolSchemas, str, str, list[Call], str]:
    """Tools, and what an answer has: reasoning, text before the calls, calls, text behind them."""
    tools = drawn_tools(chance)

    def text(*unwritable: str) -> str:
        found = drawn_text(chance, *unwritable, *MARKS_OF_REASONING).strip() if chance.random() < 0.4 else ""
        return found.rstrip(">") if ">>>" in writer.openings else found  # three of four in a row would be the mark

    reasoning = text(*(writer.openings if writer.ends_thought else writer.think))
    before, behind = text(*writer.openings), "" if writer.is_last else text(*writer.openings)
    calls = drawn_calls(chance, tools, *writer.not_in_text, never=writer.never)
    return tools, reasoning, before, calls, behind


@pytest.mark.parametrize("name", WRITERS)
def test_calls_are_read_as_they_are_written(name: str) -> None:
    writer, chance = WRITERS[name], random.Random(name)
    for number in range(NUM_ANSWERS):
        tools, reasoning, before, calls, behind = drawn(writer, chance)
        text = writer.answer(reasoning, before, calls, behind, chance)
        whole = read(writer, tools, [text], is_streamed=False)
        found = [(call.name, strict(call.arguments)) for call in whole.calls]
        assert found == calls, text
        assert all(call.is_whole for call in whole.calls)
        assert whole.reasoning.strip() == reasoning, text
        assert "".join(whole.content.split()) == "".join(f"{before}{behind}".split()), text
        place = chance.randrange(len(text) + 1)
        cuts = [[text[:place], text[place:]]]
        if number % 8 == 0:
            cuts.append([*text])
        if number % 100 == 0:
            cuts += [[text[:it], text[it:]] for it in range(len(text))]
        for pieces in cuts:
            assert without_ids(read(writer, tools, pieces)) == without_ids(whole), pieces


@pytest.mark.parametrize("name", WRITERS)
def test_a_broken_call_is_read_alike_however_it_comes(name: str) -> None:
    writer, chance = WRITERS[name], random.Random(name)
    for _ in range(NUM_ANSWERS // 10):
        tools, reasoning, before, calls, behind = drawn(writer, chance)
        text = writer.answer(reasoning, before, calls or [(next(iter(tools)), {})], behind, chance)
        for _ in range(chance.randrange(3)):
            at = chance.randrange(len(text) + 1)
            text = text[:at] + drawn_text(chance, num_pieces=3) + text[at + chance.randrange(8) :]
        text = text[: chance.randrange(len(text) + 1)] if chance.random() < 0.5 else text
        places = sorted({0, len(text), *(chance.randrange(len(text) + 1) for _ in range(4))})
        pieces = [text[a:b] for a, b in pairwise(places)]
        options = chance.choice([{}, {"is_streamed": False}, {"is_bound": True}, {"is_bound": True, "is_forced": True}])
        answers = [without_ids(read(writer, tools, cut, **options)) for cut in ([text], [*text], pieces)]
        assert answers[0] == answers[1] == answers[2], (options, text)
        whole = read(writer, tools, [text], is_streamed=False)
        for call in whole.calls if writer.has_json else ():
            assert not call.is_whole or isinstance(strict(call.arguments), dict), text
        if (
            not whole.calls
            and not reasoning
            and name not in ("functionary_v3.2", "harmony")
            and "<response>" not in text
        ):
            assert whole.content.split() == text.split(), text  # nothing that was written is lost
        parallel, first = (without_ids(read(writer, tools, [text], parallel_tool_calls=it)) for it in (True, False))
        assert (first[0], first[1], first[2]) == (parallel[0], parallel[1], parallel[2][:1])


@pytest.mark.parametrize("name", WRITERS)
def test_a_forced_call_that_is_cut_has_no_content(name: str) -> None:
    writer, chance = WRITERS[name], random.Random(name)
    for _ in range(NUM_ANSWERS // 10):
        tools = drawn_tools(chance)
        no_string_has = (*writer.not_in_text, *writer.never)
        calls = drawn_calls(chance, tools, never=no_string_has) or [(next(iter(tools)), {})]
        text = writer.answer("", "", calls, "", chance)
        text = text[: chance.randrange(len(text) + 1)]
        forced = {"is_bound": True, "is_forced": True}
        whole, streamed = (
            read(writer, tools, [text], is_streamed=False, **forced),
            read(writer, tools, [*text], **forced),
        )
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


def test_quoted_values_of_python_calls_have_the_type_of_the_schema() -> None:
    properties = {"days": {"type": "integer"}, "wet": {"type": "boolean"}, "places": {"type": "array"}, "zip": {}}
    tools = {"f": {"properties": {**properties, "text": {"type": "string"}}}}
    text = """[f(days="5", wet="True", places="['a', None]", zip='007', text="5")]"""
    [call] = read(WRITERS["pythonic"], tools, [*text]).calls
    assert strict(call.arguments) == {"days": 5, "wet": True, "places": ["a", None], "zip": "007", "text": "5"}


@pytest.mark.parametrize(
    ("written", "value"),
    [
        ("'it's'", "it's"),
        ("'a\\'b'", "a'b"),
        ('"\\ud83d\\ude00 \\x41\\n"', "😀 A\n"),
        ("'two\nlines'", "two\nlines"),
        ("(1, -2.5, 1_000)", [1, -2.5, 1000]),
        ("{'a': None, 'b': {'c': [True, false]}}", {"a": None, "b": {"c": [True, False]}}),
        ("' , '", " , "),
    ],
)
def test_pythons_literals_become_json(written: str, value: object) -> None:
    [call] = read(
        WRITERS["pythonic"], {"f": {"properties": {"x": {"type": ["string", "array"]}}}}, [f"[f(x={written})]"]
    ).calls
    assert strict(call.arguments) == {"x": value}


@pytest.mark.parametrize("written", ["x", "open('a')", "f'{x}'", "NaN", "1e999x", "{1, 2}", "1 +", "'\\ud800'"])
def test_what_is_no_literal_is_no_call(written: str) -> None:
    text = f"[f(x={written})]"
    answer = read(WRITERS["pythonic"], {"f": {}}, [text], is_streamed=False)
    assert (answer.content, answer.calls) == (text, ())


def test_a_value_with_a_quote_too_few_ends_at_its_tag() -> None:
    tools = {"f": {"properties": {"a": {"type": "array"}, "b": {"type": "integer"}}}}
    text = (
        '<tool_call>f<arg_key>a</arg_key><arg_value>["x]</arg_value><arg_key>b</arg_key><arg_value>5</arg_value>'
        "</tool_call> So."
    )
    for pieces in ([text], [*text]):
        answer = read(WRITERS["glm47"], tools, pieces)
        [call] = answer.calls
        assert (strict(call.arguments), call.is_whole, answer.content.strip()) == ({"a": '["x]', "b": 5}, True, "So.")


@pytest.mark.parametrize("name", WRITERS)
def test_long_hostile_answers_cost_no_seconds(name: str) -> None:
    writer, mark = WRITERS[name], WRITERS[name].openings[0]
    call = writer.calls([("f", {"a": ["'\"{", "["]})], random.Random(0))
    tools: ToolSchemas = {"f": {"properties": {"a": {"type": "array"}}}}
    for text in (mark * 1000, call[:-9] * 200, call * 100, "[" * 5_000, mark + "({[" * 3000):
        start = time.process_time()
        read(writer, tools, [text[at : at + 16] for at in range(0, len(text), 16)])
        assert time.process_time() - start < 3
