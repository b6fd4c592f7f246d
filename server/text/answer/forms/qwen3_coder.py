"""Qwen3-Coder and Qwen3.5: <tool_call><function=NAME><parameter=KEY>VALUE</parameter></function></tool_call>.

A value is bare text between two line breaks; the tool's schema says what it is. A string is given while it is written.
"""

import json
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from server.text.answer.deltas import ContentText, Delta, new_call_id
from server.text.answer.parser import StepParser, Tools
from server.text.answer.texts.values import json_of, types_of

OPENS, CLOSES = "<tool_call>", "</tool_call>"
FUNCTION, FUNCTION_END = "<function=", "</function>"
PARAMETER, PARAMETER_END = "<parameter=", "</parameter>"
_STRING = frozenset({"string"})


class Qwen3Coder(StepParser):
    """Content may stand before, between and behind calls. What has no function in it is content."""

    marks = (OPENS, CLOSES)
    ends_reasoning = (OPENS, FUNCTION)

    def __init__(self, tools: Tools, new_id: Callable[[], str] = new_call_id) -> None:
        super().__init__(tools, new_id)
        self._written = ""  # since the mark that may begin a call
        self._tool = ""  # its name
        self._types = _STRING  # of the parameter that is read
        self._value = ""  # of it, not given yet
        self._num_parameters = 0
        self._is_value_new = True
        self._key = ""  # of the parameter that is read
        self._properties: Mapping[str, Any] = {}  # schemas of the tool's parameters

    def _begin(self, is_last: bool) -> Iterable[Delta]:
        text, mark = self._cut(OPENS, FUNCTION, is_last=is_last)
        yield from self._content(text)
        if mark is not None:
            self._written = mark
            self._step = self._preamble if mark == OPENS else self._name

    def _preamble(self, is_last: bool) -> Iterable[Delta]:
        text, mark = self._cut(FUNCTION, CLOSES, is_last=is_last)
        self._written += text + (mark or "")
        if mark == FUNCTION:
            self._step = self._name
        elif mark == CLOSES or is_last:
            yield from self._no_call()

    def _name(self, is_last: bool) -> Iterable[Delta]:
        text, mark = self._cut(">", FUNCTION_END, is_last=is_last)
        self._written += text + (mark or "")
        self._tool += text
        if mark is None:
            if is_last:
                yield from self._no_call()
            return
        name = self._tool.strip()
        self._tool = ""
        if not name:
            yield from self._no_call()
            return
        schema = self._tools.get(name, {}).get("properties")
        self._properties = schema if isinstance(schema, dict) else {}
        self._num_parameters = 0
        yield self._start(name)
        if mark == ">":
            self._step = self._between
        else:
            yield from self._end_call()

    def _no_call(self) -> Iterable[Delta]:
        yield ContentText(self._blank + self._written)
        self._blank = self._tool = ""
        self._step = self._begin

    def _between(self, is_last: bool) -> Iterable[Delta]:
        """Drop what stands between two parameters."""
        _, mark = self._cut(PARAMETER, FUNCTION_END, is_last=is_last)
        if mark == PARAMETER:
            self._key = ""
            self._step = self._parameter
        elif mark == FUNCTION_END or is_last:
            self.is_cut = mark is None
            yield from self._end_call()

    def _parameter(self, is_last: bool) -> Iterable[Delta]:
        text, mark = self._cut(">", FUNCTION_END, is_last=is_last)
        self._key += text
        if mark == ">":
            self._types = types_of(self._properties.get(self._key))
            self._value, self._is_value_new = "", True
            if self._types == _STRING:
                yield self._arguments(self._next_key() + '"')
            self._step = self._in_value
        elif mark == FUNCTION_END or is_last:
            self.is_cut = mark is None
            yield from self._end_call()

    def _next_key(self) -> str:
        self._num_parameters += 1
        return f"{', ' if self._num_parameters > 1 else '{'}{json.dumps(self._key, ensure_ascii=False)}: "

    def _in_value(self, is_last: bool) -> Iterable[Delta]:
        text, mark = self._cut(PARAMETER_END, PARAMETER, FUNCTION_END, is_last=is_last)
        self._value += text
        is_whole = mark is not None or is_last
        if self._is_value_new and (self._value or is_whole):
            self._value = self._value.removeprefix("\n")
            self._is_value_new = False
        if is_whole:
            self._value = self._value.removesuffix("\n")
        if self._types == _STRING:
            given = self._value if is_whole else self._value.removesuffix("\n")
            self._value = self._value[len(given) :]
            escaped = json.dumps(given, ensure_ascii=False)[1:-1]
            if escaped or is_whole:
                yield self._arguments(escaped + ('"' if is_whole else ""))
        elif mark is not None:  # one that is cut off is left out
            yield self._arguments(self._next_key() + json_of(self._value, self._types))
        if is_whole:
            self._step = self._between
            if mark is not None and mark != PARAMETER_END:
                self._text = mark + self._text

    def _end_call(self) -> Iterable[Delta]:
        yield self._arguments("}" if self._num_parameters else "{}")
        if not self.is_cut:
            yield self._end()
        self._step = self._behind

    def _behind(self, is_last: bool) -> Iterable[Delta]:
        """Drop what stands between a function's end and the call's."""
        _, mark = self._cut(CLOSES, OPENS, FUNCTION, is_last=is_last)
        if mark == CLOSES:
            self._step = self._begin
        elif mark is not None:
            self._written = mark
            self._step = self._preamble if mark == OPENS else self._name
        return ()
