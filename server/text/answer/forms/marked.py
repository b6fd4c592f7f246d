"""Calls with their name before their arguments, which are JSON, between marks: Kimi K2, DeepSeek V3, functionary v3.1.

    <|tool_calls_section_begin|>
    <|tool_call_begin|>functions.NAME:0<|tool_call_argument_begin|>{...}<|tool_call_end|>
    <|tool_calls_section_end|>

One form is a `Marks`. Arguments are given while they are written.
"""

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from server.text.answer.deltas import CallStart, ContentText, Delta, new_call_id
from server.text.answer.forms.json_arguments import JsonArguments
from server.text.answer.parser import Tools

_NOTHING = ("", "null", '""')  # arguments of a call without arguments


@dataclass(frozen=True, slots=True)
class Marks:
    """The marks of one form.

    section  around all calls; empty: there is none
    call     before a call, and behind it
    head     what stands between the call's mark and its arguments, with the groups `name` and, perhaps, `id`
    written  the head as a grammar has it: `{name}` is the name, `{number}` some digits
    tail     between the arguments and the call's end
    between  two calls
    tokens   what may be a token of its own in `written`
    """

    section: tuple[str, str]
    call: tuple[str, str]
    head: re.Pattern[str]
    written: str
    tail: str = ""
    between: str = ""
    tokens: tuple[str, ...] = ()

    def parser(self, tools: Tools) -> "Marked":
        return Marked(tools, self)

    @property
    def marks(self) -> tuple[str, ...]:
        """The marks that may be tokens of their own: those that are whole."""
        return tuple(it for it in (*self.section, *self.call, *self.tokens) if it.endswith(">"))


class Marked(JsonArguments):
    """Content may stand before and behind the calls."""

    def __init__(self, tools: Tools, form: Marks, new_id: Callable[[], str] = new_call_id) -> None:
        super().__init__(tools, new_id)
        self._form = form
        self.marks = form.marks
        self._openings = tuple(it for it in (form.section[0], form.call[0]) if it)
        if form.section[0]:
            self.ends_reasoning = {form.section[0]: (form.call[0],)}
        self._written = ""  # since the mark that may begin a call
        self._head = ""  # what stands before the call's arguments

    def _begin(self, is_last: bool) -> Iterable[Delta]:
        text, mark = self._cut(*self._openings, is_last=is_last)
        yield from self._content(text)
        if mark is not None:
            self._written = mark
            self._open(mark)

    def _open(self, mark: str) -> None:
        self._head = ""
        self._step = self._in_section if mark == self._form.section[0] else self._in_head

    def _in_section(self, is_last: bool) -> Iterable[Delta]:
        opening, closing = self._form.call[0], self._form.section[1]
        text, mark = self._cut(opening, closing, is_last=is_last)
        self._written += text + (mark or "")
        if mark == opening:
            self._open(opening)
        elif mark is not None or is_last:
            yield from self._no_call()

    def _in_head(self, is_last: bool) -> Iterable[Delta]:
        closing = self._form.call[1]
        text, mark = self._cut("{", closing, is_last=is_last)
        self._head += text
        if mark is None and not is_last:
            return
        found = self._form.head.match(self._head)
        is_empty = found is not None and mark == closing and self._head[found.end() :].strip() in _NOTHING
        if found is None or mark is None or not (is_empty or (mark == "{" and found.end() == len(self._head))):
            self._written += self._head + (mark or "")
            is_named = found is not None and mark is None and found.end("name") < len(self._head)  # the name has ended
            self.cut_name = found["name"] if found is not None and is_named else None
            yield from self._no_call()
            return
        yield self._start_of(found)
        if is_empty:
            yield self._arguments("{}")
            yield self._end()
            self._text = closing + self._text
            self._step = self._behind
        else:
            self._text = "{" + self._text
            self._open_arguments()

    def _start_of(self, found: re.Match[str]) -> CallStart:
        """Return the start of a call, with the id that the model gave it, if any."""
        start = self._start(found["name"])
        own = found.groupdict().get("id")
        return start if own is None else CallStart(start.index, own, start.name)

    def _no_call(self) -> Iterable[Delta]:
        self.is_malformed = True
        yield ContentText(self._blank + self._written)
        self._blank = ""
        self._step = self._begin

    def _behind(self, is_last: bool) -> Iterable[Delta]:
        """Drop what stands between a call's arguments and the next call, or the end of all."""
        opening, closing = self._form.call[0], self._form.section[1]
        _, mark = self._cut(opening, closing or self._form.call[1], is_last=is_last)
        if mark == opening:
            self._written = mark
            self._open(opening)
        elif mark is not None:
            self._step = self._begin
        return ()
