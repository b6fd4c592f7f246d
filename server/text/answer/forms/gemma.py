"""Gemma 4: <|tool_call>call:NAME{key:<|"|>text<|"|>,other:42,list:[...],object:{...}}<tool_call|>.

The arguments are not JSON, and are given when the call is whole.
"""

import json
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from server.text.answer.deltas import ContentText, Delta, new_call_id
from server.text.answer.parser import CallParser, Tools
from server.text.answer.texts.values import json_of, types_of

OPENS, CLOSES = "<|tool_call>", "<tool_call|>"
CALL = "call:"
QUOTE = '<|"|>'
_MAX_DEPTH = 64
_UNSAID = frozenset({"integer", "number", "boolean", "null", "object", "array"})  # of a bare text without a schema


class Gemma(CallParser):
    marks = (OPENS, CLOSES, QUOTE)

    def __init__(self, tools: Tools, new_id: Callable[[], str] = new_call_id) -> None:
        super().__init__(tools, new_id)
        self._written: str | None = None  # of the open call, behind its mark

    def _read(self, *, is_last: bool) -> Iterable[Delta]:
        while True:
            if self._written is None:
                text, mark = self._cut(OPENS, is_last=is_last)
                yield from self._content(text)
                if mark is None:
                    return
                self._written = ""
            text, mark = self._cut(CLOSES, is_last=is_last)
            self._written += text
            if mark is None and not is_last:
                return
            self.is_cut = mark is None
            yield from self._call(self._written, mark or "")
            self._written = None

    def _call(self, written: str, mark: str) -> Iterable[Delta]:
        name, brace, text = written.partition(CALL)[2].partition("{")
        name = name.strip()
        if not name or not brace:
            yield ContentText(self._blank + OPENS + written + mark)
            self._blank = ""
            return
        yield self._start(name)
        yield self._arguments(_object(_Text(text.strip().removesuffix("}")), self._tools.get(name, {}), 0))
        if mark:
            yield self._end()


class _Text:
    """A text and the place up to which it is read."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.at = 0

    @property
    def is_at_end(self) -> bool:
        return self.at >= len(self.text)

    def skip(self, characters: str) -> None:
        while not self.is_at_end and self.text[self.at] in characters:
            self.at += 1

    def take_until(self, mark: str) -> str:
        """Return the text before the mark, or all of it; the mark is passed."""
        place = self.text.find(mark, self.at)
        end = len(self.text) if place < 0 else place
        found = self.text[self.at : end]
        self.at = end + len(mark)
        return found

    def takes(self, mark: str) -> bool:
        is_here = self.text.startswith(mark, self.at)
        self.at += len(mark) if is_here else 0
        return is_here


def _object(text: _Text, schema: Mapping[str, Any], depth: int) -> str:
    """The JSON of the fields up to a closing brace or the end."""
    properties = schema.get("properties")
    fields: dict[str, str] = {}
    while True:
        text.skip(" ,\n\t")
        if text.is_at_end or text.takes("}"):
            break
        if ":" not in text.text[text.at :]:
            text.at = len(text.text)
            break
        key = text.take_until(":").strip().removeprefix(QUOTE).removesuffix(QUOTE)
        fields[key] = _value(text, properties.get(key) if isinstance(properties, Mapping) else None, depth)
    inside = ", ".join(f"{json.dumps(key, ensure_ascii=False)}: {value}" for key, value in fields.items())
    return f"{{{inside}}}"


def _value(text: _Text, schema: Any, depth: int) -> str:
    is_known = isinstance(schema, Mapping)
    text.skip(" \n\t")
    if text.takes(QUOTE):
        return json_of(text.take_until(QUOTE), types_of(schema))
    if depth < _MAX_DEPTH and text.takes("{"):
        return _object(text, schema if is_known else {}, depth + 1)
    if depth < _MAX_DEPTH and text.takes("["):
        items: list[str] = []
        while True:
            text.skip(" ,\n\t")
            if text.is_at_end or text.takes("]"):
                return f"[{', '.join(items)}]"
            items.append(_value(text, schema.get("items") if is_known else None, depth + 1))
    start = text.at
    while not text.is_at_end and text.text[text.at] not in ",}]":
        text.at += 1
    if text.at == start:
        text.at += 1  # a bracket that nothing has opened
    bare = text.text[start : text.at].strip()
    return json_of(bare, types_of(schema) if is_known else _UNSAID)
