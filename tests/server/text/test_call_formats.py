"""Calls of every format come to the client as the model has written them, wherever the text is cut."""

import json
import random
from collections.abc import Iterable
from itertools import pairwise
from typing import Any, NoReturn

import pytest

from server.text.answer.deltas import Answer, Delta, whole_answer
from server.text.answer.syntax import AnswerSyntax
from support.answers.drawn import Call, ToolSchemas, drawn_calls, drawn_text, drawn_tools
from support.answers.writers import WRITERS, Writer

NUM_ANSWERS = 1000  # of each format; of each eighth, the text comes letter by letter
MARKS_OF_REASONING = ("<think>", "</think>", "<response>")


def refuse(name: str) -> NoReturn:
    raise AssertionError(name)


def strict(text: str) -> Any:
    return json.loads(text, parse_constant=refuse)


def read(writer: Writer, tools: ToolSchemas, pieces: Iterable[str], **options: bool) -> Answer:
    parser = AnswerSyntax(writer.form, writer.reasoning).parser(tools, "", **({"is_streamed": True} | options))
    assert parser is not None
    deltas: list[Delta] = [delta for piece in pieces for delta in parser.feed(piece)]
    return whole_answer([*deltas, *parser.finish()])


def without_ids(answer: Answer) -> tuple[object, ...]:
    return answer.content, answer.reasoning, [(it.name, it.arguments, it.is_whole) for it in answer.calls]


def drawn(writer: Writer, chance: random.Random) -> tuple[ToolSchemas, str, str, list[Call], str]:
    """Tools, and what an answer has: reasoning, text before the calls, calls, text behind them."""
    tools = drawn_tools(chance)

    def text() -> str:
        found = drawn_text(chance, *writer.openings, *MARKS_OF_REASONING).strip() if chance.random() < 0.4 else ""
        return found.rstrip(">") if ">>>" in writer.openings else found  # three of four in a row would be the mark

    reasoning, before, behind = text(), text(), text()
    return tools, reasoning, before, drawn_calls(chance, tools, *writer.not_in_text), behind


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
        if number % 200 == 0:
            cuts += [[text[:it], text[it:]] for it in range(len(text))]
        for pieces in cuts:
            assert without_ids(read(writer, tools, pieces)) == without_ids(whole), pieces


@pytest.mark.parametrize("name", WRITERS)
def test_a_broken_call_is_read_alike_however_it_comes(name: str) -> None:
    writer, chance = WRITERS[name], random.Random(name)
    for _ in range(NUM_ANSWERS // 20):
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
        for call in whole.calls:
            assert not call.is_whole or isinstance(strict(call.arguments), dict), text
        if not whole.calls and not reasoning and name != "functionary_v3.2" and "<response>" not in text:
            assert whole.content.split() == text.split(), text  # nothing that was written is lost
