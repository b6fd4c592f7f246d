"""Llama 3.x: objects {"name": ..., "parameters": {...}} separated by semicolons, perhaps behind <|python_tag|>."""

from collections.abc import Iterable

from server.text.answer.deltas import ContentText, Delta
from server.text.answer.parser import CallParser
from server.text.answer.texts.call_object import CallObject

TAG = "<|python_tag|>"


class Llama3Json(CallParser):
    """Parser of calls as JSON objects; from the first object on that is no call, all is content."""

    marks = (TAG,)
    _object: CallObject | None = None
    _tag = ""  # the mark and blanks behind it; given only if no call follows

    def _read(self, *, is_last: bool) -> Iterable[Delta]:
        while True:
            if self.is_malformed:
                text, self._text = self._text, ""
                if text:
                    yield ContentText(text)
                return
            if self._object is None:
                text, mark = self._cut(TAG, "{", is_last=is_last)
                if not self._num_calls:
                    yield from self._before_call(text)
                if mark is None:
                    if is_last and not self._num_calls and self._tag:
                        yield ContentText(self._blank + self._tag)
                        self._blank = self._tag = ""
                    return
                if mark == TAG:
                    self._tag += TAG
                    continue
                self._object = CallObject(("arguments", "parameters"))
                self._text = "{" + self._text
            yield from self._inside(self._object, is_last=is_last)
            if not self.is_malformed and self._object is not None:
                return

    def _before_call(self, text: str) -> Iterable[Delta]:
        if not self._tag:
            yield from self._content(text)
            return
        self._tag += text
        if text.strip():  # no call follows the mark
            held, self._tag = self._tag, ""
            yield from self._content(held)

    def _inside(self, call: CallObject, *, is_last: bool) -> Iterable[Delta]:
        self._text = call.feed(self._text)
        yield from call.deltas(self._start, self._arguments)
        if call.is_whole and call.is_call():
            self._object = None
            self._tag = ""
            yield self._end()
        elif call.is_whole or call.is_wrong or is_last:
            self.is_malformed = True
            if call.has_whole_arguments:
                yield self._end()
            elif not call.has_begun:
                self.cut_name = call.name
                yield ContentText(self._blank + self._tag + call.written)
                self._blank = self._tag = ""
