"""Answers read piece by piece, and what every client may rely on of what is read."""

import json
from collections.abc import Iterable
from typing import Any, NoReturn

from server.text.answer.deltas import Answer, ArgumentsText, CallEnd, CallStart, Delta
from server.text.answer.syntax import AnswerSyntax
from support.answers.drawn import ToolSchemas


def refuse(name: str) -> NoReturn:
    raise AssertionError(name)


def strict(text: str) -> Any:
    return json.loads(text, parse_constant=refuse)


def without_ids(answer: Answer) -> tuple[object, ...]:
    return answer.content, answer.reasoning, [(it.name, it.arguments, it.is_whole) for it in answer.calls]


def deltas_of(
    syntax: AnswerSyntax, tools: ToolSchemas, pieces: Iterable[str], *, prompt: str = "", **options: Any
) -> list[Delta]:
    parser = syntax.parser(tools, prompt, **({"is_streamed": True} | options))
    assert parser is not None
    found = [delta for piece in pieces for delta in parser.feed(piece)]
    return checked([*found, *parser.finish()])


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
