"""Calls as an array of JSON objects behind a mark: Granite 3, Phi-4-mini, Hunyuan-A13B, Cohere's Command.

<|tool_call|>[{"name": ..., "arguments": {...}}, ...]
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from server.text.answer.deltas import ContentText, Delta, new_call_id
from server.text.answer.parser import StepParser, Tools
from server.text.answer.texts.call_object import CallObject

_BLANKS = " \t\n\r"


@dataclass(frozen=True, slots=True)
class ArrayMarks:
    """The marks of one form.

    pairs      a mark before the array, and the one behind it then (empty: none); the usual ones first
    name       key of a call's name
    arguments  key of its arguments
    number     key of its number, a text, before the others; empty: there is none
    is_indented each call has a line of its own, behind four blanks
    """

    pairs: tuple[tuple[str, str], ...]
    name: str = "name"
    arguments: str = "arguments"
    number: str = ""
    is_indented: bool = False

    def parser(self, tools: Tools) -> "CallArray":
        return CallArray(tools, self)

    @property
    def marks(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(it for pair in self.pairs for it in pair if it))


class CallArray(StepParser):
    """Content may stand before and behind an array. From the first item on that is no call, all is content."""

    def __init__(self, tools: Tools, form: ArrayMarks, new_id: Callable[[], str] = new_call_id) -> None:
        super().__init__(tools, new_id)
        self.marks = form.marks
        self._closings = dict(form.pairs)
        self.ends_reasoning = dict.fromkeys(self._closings, ("[{", "[ {", "[\n"))
        self._written = ""  # since the mark, before the first call
        self._closing = ""
        self._name_key = form.name
        self._object = self._new_object()

    def _new_object(self) -> CallObject:
        return CallObject(("arguments", "parameters"), name_key=self._name_key)

    def _begin(self, is_last: bool) -> Iterable[Delta]:
        text, mark = self._cut(*self._closings, is_last=is_last)
        yield from self._content(text)
        if mark is not None:
            self._written, self._closing = mark, self._closings[mark]
            self._step = self._bracket

    def _bracket(self, is_last: bool) -> Iterable[Delta]:
        """Read the array's bracket; a mark without one is content."""
        begun = self._text.lstrip(_BLANKS)
        if not begun and not is_last:
            return
        if begun.startswith("["):
            self._written += self._text[: len(self._text) - len(begun) + 1]
            self._text = begun[1:]
            self._step = self._item
            return
        yield ContentText(self._blank + self._written)
        self._blank = ""
        self._step = self._begin

    def _item(self, is_last: bool) -> Iterable[Delta]:
        """Read up to the next object, or the array's end."""
        begun = self._text.lstrip(_BLANKS + ",")
        skipped, self._text = self._text[: len(self._text) - len(begun)], begun
        self._written += skipped
        if begun.startswith("{"):
            self._object = self._new_object()
            self._step = self._in_object
        elif begun.startswith("]") and self._num_calls:
            self._text = begun[1:]
            self._step = self._behind
        elif begun or is_last:
            yield from self._no_call()

    def _in_object(self, is_last: bool) -> Iterable[Delta]:
        call = self._object
        self._text = call.feed(self._text)
        yield from call.deltas(self._start, self._arguments)
        if call.is_whole and call.is_call():
            yield self._end()
            self._written = ""
            self._step = self._item
        elif call.is_whole or call.is_wrong or is_last:
            if call.has_whole_arguments:
                yield self._end()
            elif not call.has_begun:
                self.cut_name = call.name
                self._written += call.written
            if call.has_begun:
                self._written = ""
            yield from self._no_call()

    def _no_call(self) -> Iterable[Delta]:
        self.is_malformed = True
        if self._blank + self._written:
            yield ContentText(self._blank + self._written)
        self._blank = ""
        self._step = self._rest

    def _behind(self, is_last: bool) -> Iterable[Delta]:
        """Drop the mark behind the array, where there is one."""
        begun = self._text.lstrip(_BLANKS)
        if not is_last and self._closing and self._closing.startswith(begun) and begun != self._closing:
            return ()
        if self._closing and begun.startswith(self._closing):
            self._text = begun.removeprefix(self._closing)
        self._step = self._begin
        return ()
