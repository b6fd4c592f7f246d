"""Deltas of an answer, in the order in which they come."""

import secrets
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ContentText:
    text: str


@dataclass(frozen=True, slots=True)
class ReasoningText:
    text: str


@dataclass(frozen=True, slots=True)
class CallStart:
    """The model calls a tool; the arguments follow."""

    index: int  # of the answer's calls, from 0
    call_id: str
    name: str


@dataclass(frozen=True, slots=True)
class ArgumentsText:
    """A piece of a call's arguments, which are JSON when they are whole (if the model has written JSON)."""

    index: int
    text: str


@dataclass(frozen=True, slots=True)
class CallEnd:
    """The model has written the call to its end. One that ends otherwise is cut, or malformed."""

    index: int


Delta = ContentText | ReasoningText | CallStart | ArgumentsText | CallEnd


@dataclass(frozen=True, slots=True)
class Call:
    call_id: str
    name: str
    arguments: str
    is_whole: bool


@dataclass(frozen=True, slots=True)
class Answer:
    """A whole answer. Texts are empty where there are none."""

    content: str
    reasoning: str
    calls: tuple[Call, ...]


def whole_answer(deltas: list[Delta]) -> Answer:
    """Join the deltas of one answer."""
    content, reasoning = [], []
    starts: list[CallStart] = []
    arguments: dict[int, list[str]] = {}
    ended: set[int] = set()
    for delta in deltas:
        match delta:
            case ContentText(text):
                content.append(text)
            case ReasoningText(text):
                reasoning.append(text)
            case CallStart():
                starts.append(delta)
            case ArgumentsText(index, text):
                arguments.setdefault(index, []).append(text)
            case CallEnd(index):
                ended.add(index)
    calls = (Call(it.call_id, it.name, "".join(arguments.get(it.index, ())), it.index in ended) for it in starts)
    return Answer("".join(content), "".join(reasoning), tuple(calls))


def new_call_id() -> str:
    return f"call_{secrets.token_hex(12)}"
