"""Hermes: <tool_call>{"name": ..., "arguments": {...}}</tool_call>, as Qwen2.5, Qwen3 and many others write it.

Text behind the first call is dropped, as vLLM does: models put line breaks there.
"""

from collections.abc import Iterable
from types import MappingProxyType

from server.text.answer.deltas import ContentText, Delta
from server.text.answer.parser import CallParser
from server.text.answer.texts.call_object import CallObject

OPENS, CLOSES = "<tool_call>", "</tool_call>"


class Hermes(CallParser):
    marks = (OPENS, CLOSES)
    ends_reasoning = MappingProxyType({OPENS: ("{",)})
    _object: CallObject | None = None  # that of the open call
    _behind = ""  # what the open call has behind its object

    def _read(self, *, is_last: bool) -> Iterable[Delta]:
        while True:
            if self._object is None:
                text, mark = self._cut(OPENS, is_last=is_last)
                if not self._num_calls and not self.is_malformed:
                    yield from self._content(text)
                elif self.is_malformed and text:
                    yield ContentText(text)
                if mark is None:
                    return
                self._object, self._behind = CallObject(("arguments",)), ""
            text, mark = self._cut(CLOSES, is_last=is_last)
            yield from self._inside(self._object, text)
            if mark is not None and self._object.is_in_string:
                yield from self._inside(self._object, mark)
                continue
            if mark is None and not is_last:
                return
            yield from self._close(self._object, mark or "")
            self._object = None

    def _inside(self, call: CallObject, text: str) -> Iterable[Delta]:
        if call.is_whole or call.is_wrong:
            self._behind += text
            return
        self._behind += call.feed(text)
        yield from call.deltas(self._start, self._arguments)

    def _close(self, call: CallObject, mark: str) -> Iterable[Delta]:
        if call.is_call() and not self._behind.strip():
            yield self._end()
            return
        self.is_malformed = True
        if call.has_whole_arguments:
            yield self._end()
        elif not call.has_begun:
            self.cut_name = call.name
            yield ContentText(self._blank + OPENS + call.written + self._behind + mark)
            self._blank = ""
