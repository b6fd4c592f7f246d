"""Calls as a list of Python's: Llama 3.2 and 4, LFM2, OLMo 3.

    [NAME(KEY="text", OTHER=5), ...]
    <|tool_call_start|>[NAME(KEY="text")]<|tool_call_end|>

A call's arguments are given when it is whole. One form is a `PythonMarks`.
"""

import json
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from server.text.answer.deltas import ContentText, Delta, new_call_id
from server.text.answer.parser import StepParser, Tools
from server.text.answer.texts.literals import Literals, NoLiteral
from server.text.answer.texts.values import json_of, types_of

_NAME = re.compile(r"[\s,;]{0,64}([\w.:/-]{0,128})\s{0,16}")


@dataclass(frozen=True, slots=True)
class PythonMarks:
    """The marks of one form.

    marks         around the calls; None: the list's bracket begins them
    has_brackets  the calls are a list; else each stands in a line
    dropped       marks that some models write beside the list
    """

    marks: tuple[str, str] | None = None
    has_brackets: bool = True
    dropped: tuple[str, ...] = ()

    def parser(self, tools: Tools) -> "Pythonic":
        return Pythonic(tools, self)


class Pythonic(StepParser):
    """Content may stand before and behind the calls; without marks they begin at a bracket and the name of a tool."""

    def __init__(self, tools: Tools, form: PythonMarks, new_id: Callable[[], str] = new_call_id) -> None:
        super().__init__(tools, new_id)
        self.marks = (*(form.marks or ()), *form.dropped)
        self._form = form
        self._opening, self._closing = form.marks or ("[", "")
        if form.marks is not None:
            self.ends_reasoning = {self._opening: ("[",) if form.has_brackets else tuple(f"{it}(" for it in tools)}
        self._written = ""  # since the mark, before the first call
        self._is_first = True  # no call of the list is read
        self._call = _CallText()

    def _begin(self, is_last: bool) -> Iterable[Delta]:
        while True:
            text, mark = self._cut(self._opening, *self._form.dropped, is_last=is_last)
            yield from self._content(text)
            if mark is None or mark not in self._form.dropped:
                break
            self._blank += mark  # dropped before calls, as blanks are
        if mark == self._opening:
            self._written, self._is_first = mark, True
            self._step = self._bracket if self._form.marks is not None and self._form.has_brackets else self._next

    def _bracket(self, is_last: bool) -> Iterable[Delta]:
        begun = self._text.lstrip()
        if begun.startswith("["):
            self._written += self._text[: len(self._text) - len(begun) + 1]
            self._text = begun[1:]
            self._step = self._next
        elif begun or is_last:
            yield from self._no_calls()

    def _next(self, is_last: bool) -> Iterable[Delta]:
        """Read the name of the next call, or the end of all."""
        found = _NAME.match(self._text)
        assert found is not None
        name, behind = found[1], self._text[found.end() :]
        is_only_named = self._form.marks is None and self._is_first
        if behind.startswith("(") and name and (not is_only_named or name in self._tools):
            self._call = _CallText(name, self._text[: found.end() + 1])
            self._text = behind[1:]
            self._step = self._in_call
        elif self._may_go_on(name, behind, is_last=is_last) or self._ends(name, behind, is_last=is_last):
            return
        elif is_only_named:  # a bracket in a text
            yield ContentText(self._blank + self._written)
            self._blank = ""
            self._step = self._begin
        else:
            yield from self._no_calls()

    def _may_go_on(self, name: str, behind: str, *, is_last: bool) -> bool:
        """Return whether the text may become the beginning of a call."""
        is_only_named = self._form.marks is None and self._is_first
        return not behind and not is_last and (not is_only_named or any(it.startswith(name) for it in self._tools))

    def _ends(self, name: str, behind: str, *, is_last: bool) -> bool:
        """Return whether the calls end here, or may end here when more of the text has come."""
        if name or self._is_first:
            return False
        end = "]" if self._form.has_brackets else self._closing
        if behind.startswith(end):
            self._text = behind.removeprefix(end)
            self._step = self._behind if self._form.has_brackets and self._closing else self._begin
            return True
        return not is_last and end.startswith(behind)

    def _in_call(self, is_last: bool) -> Iterable[Delta]:
        call = self._call
        self._text = call.feed(self._text)
        if not (call.is_whole or is_last):
            return
        arguments = call.arguments(self._tools.get(call.name, {})) if call.is_whole else None
        if arguments is None:
            self.cut_name = call.name if is_last else None
            self._written += call.written
            yield from self._no_calls()
            return
        yield self._start(call.name)
        yield self._arguments(arguments)
        yield self._end()
        self._written, self._is_first = "", False
        self._step = self._next

    def _no_calls(self) -> Iterable[Delta]:
        """Take for content what is written, and all that follows."""
        self.is_malformed = True
        text, self._text = self._blank + self._written + self._text, ""
        self._written = self._blank = ""
        if text:
            yield ContentText(text)
        self._step = self._rest

    def _behind(self, is_last: bool) -> Iterable[Delta]:
        """Drop the closing mark."""
        begun = self._text.lstrip()
        if not is_last and self._closing.startswith(begun) and begun != self._closing:
            return ()
        if begun.startswith(self._closing):
            self._text = begun.removeprefix(self._closing)
        self._step = self._begin
        return ()


class _CallText:
    """Finds the end of a call's arguments. A quote ends its string only where something may follow the string."""

    def __init__(self, name: str = "", head: str = "") -> None:
        self.name = name
        self.is_whole = False
        self._parts = [head]
        self._head_size = len(head)
        self._depth = 1
        self._quote = ""  # of the string that is read
        self._is_escaped = False
        self._is_ending = False  # a quote stands there, and perhaps blanks

    @property
    def written(self) -> str:
        return "".join(self._parts)

    def feed(self, text: str) -> str:
        """Read on, and return what stands behind the closing parenthesis."""
        for index, char in enumerate(text):
            self._take(char)
            if self.is_whole:
                self._parts.append(text[: index + 1])
                return text[index + 1 :]
        self._parts.append(text)
        return ""

    def arguments(self, schema: Mapping[str, Any]) -> str | None:
        """Return the JSON of the arguments, None where they are no literals with names.

        schema  of all: what it says to be no string may stand in quotes, as Llama 4's template writes everything
        """
        properties = schema.get("properties")
        fields: Mapping[str, Any] = properties if isinstance(properties, dict) else {}

        def typed(key: str, value: str) -> str:
            types = types_of(fields.get(key))
            return value if "string" in types or not value.startswith('"') else json_of(json.loads(value), types)

        reader = Literals(self.written, self._head_size)
        try:
            found = reader.arguments(typed)
        except NoLiteral:
            return None
        return found if reader.is_at_end else None

    def _take(self, char: str) -> None:
        if self._is_ending:
            if char.isspace():
                return
            self._is_ending = False
            if char in ",)]}:":
                self._quote = ""
        if self._quote:
            if self._is_escaped:
                self._is_escaped = False
            elif char == "\\":
                self._is_escaped = True
            elif char == self._quote:
                self._is_ending = True
        elif char in "\"'":
            self._quote = char
        elif char in "([{":
            self._depth += 1
        elif char in ")]}":
            self._depth -= 1
            self.is_whole = self._depth == 0
