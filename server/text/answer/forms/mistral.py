"""Mistral: [TOOL_CALLS][{"name": ..., "arguments": {...}}, ...], and newer [TOOL_CALLS]name{...}[TOOL_CALLS]name{...}.

A call's id has nine letters and digits: Mistral's templates refuse any other.
"""

import secrets
import string
from collections.abc import Callable, Iterable

from server.text.answer.deltas import ContentText, Delta
from server.text.answer.parser import StepParser, Tools
from server.text.answer.texts.call_object import CallObject
from server.text.answer.texts.json_text import JsonText
from server.text.answer.texts.values import is_json

CALLS, ARGS, CALL_ID = "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"
_ALPHABET = string.ascii_letters + string.digits


def mistral_id() -> str:
    return "".join(secrets.choice(_ALPHABET) for _ in range(9))


class Mistral(StepParser):
    marks = (CALLS, ARGS, CALL_ID)

    def __init__(self, tools: Tools, new_id: Callable[[], str] = mistral_id) -> None:
        super().__init__(tools, new_id)
        self._object: CallObject | None = None
        self._name = ""
        self._braces = JsonText()  # of the arguments behind a name
        self._given: list[str] = []  # those arguments
        self._skipped = ""  # text of an array before its first object

    def _begin(self, is_last: bool) -> Iterable[Delta]:
        text, mark = self._cut(CALLS, is_last=is_last)
        if not self._num_calls:
            yield from self._content(text)
        if mark is not None:
            self._step = self._first

    def _first(self, is_last: bool) -> Iterable[Delta]:
        """Decide by the first character which of the two formats follows."""
        self._text = self._text.lstrip()
        if self._text:
            self._step = self._array if self._text[0] in "[{" else self._named
        elif is_last:
            yield from self._malformed("")
            self._step = self._drop

    def _array(self, is_last: bool) -> Iterable[Delta]:
        """An array of objects, or one object; what follows it is dropped."""
        while True:
            if self._object is None:
                text, mark, self._text = _first_of(self._text, "{]")
                self._skipped += text
                if mark != "{":
                    if (mark or is_last) and not self._num_calls:
                        yield from self._malformed(self._skipped + mark)
                    if mark:
                        self._step = self._drop
                    return
                self._object = CallObject(("arguments",), may_lack_arguments=True)
                self._text = mark + self._text
            call = self._object
            self._text = call.feed(self._text)
            yield from call.deltas(self._start, self._arguments)
            if not (call.is_whole or call.is_wrong or is_last):
                return
            self._object = None
            if not call.is_call():
                self._step = self._drop
                self.cut_name = call.name
                yield from self._malformed(None if call.has_begun else self._skipped + call.written)
                if call.has_whole_arguments:
                    yield self._end()
                return
            yield self._end()

    def _named(self, is_last: bool) -> Iterable[Delta]:
        """Read a name, then its arguments: a text in braces, whatever it is. What follows is dropped."""
        text, mark = self._cut("{", CALLS, is_last=is_last)
        self._name += text
        if mark == "{":
            self._text = mark + self._text
            yield self._start(_named(self._name))
            self._braces, self._given = JsonText(), []
            self._step = self._named_arguments
        elif mark == CALLS:
            yield from self._malformed(self._name)
            self._step = self._first
        elif is_last:
            self.cut_name = _named(self._name) if ARGS in self._name else None
            yield from self._malformed(self._name)
            self._step = self._drop
        if mark is not None:
            self._name = ""

    def _named_arguments(self, is_last: bool) -> Iterable[Delta]:
        text, mark = self._cut(CALLS, is_last=is_last)
        if text and not self._braces.is_whole:
            given = text.removesuffix(self._braces.feed(text))
            self._given.append(given)
            yield self._arguments(given)
        if mark is not None or (is_last and is_json("".join(self._given))):
            yield self._end()
        if mark is not None:
            self._step = self._first
        elif is_last:
            self._step = self._drop

    def _malformed(self, written: str | None) -> Iterable[Delta]:
        self.is_malformed = True
        if written is not None:
            yield ContentText(self._blank + CALLS + written)
            self._blank = ""

    def _drop(self, is_last: bool) -> Iterable[Delta]:  # noqa: ARG002 -- as the others
        self._text = ""
        return ()


def _named(written: str) -> str:
    """The name in what stands before a call's arguments."""
    return written.partition(CALL_ID)[0].replace(ARGS, "").strip()


def _first_of(text: str, characters: str) -> tuple[str, str, str]:
    """Return the text before the first of the characters, the character, and the rest."""
    place = min((place for char in characters if (place := text.find(char)) >= 0), default=len(text))
    return text[:place], text[place : place + 1], text[place + 1 :]
