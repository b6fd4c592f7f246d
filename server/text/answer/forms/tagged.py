"""Calls whose arguments stand between tags, as bare text: Qwen3-Coder, GLM, MiniMax-M2, Seed-OSS, Hy3 and others.

    <tool_call>
    <function=NAME>
    <parameter=KEY>
    VALUE
    </parameter>
    </function>
    </tool_call>

The tool's schema says what a value is. A string is given while it is written. One form is a `Tags`.
"""

import json
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

from server.text.answer.deltas import ContentText, Delta, new_call_id
from server.text.answer.parser import StepParser, Tools
from server.text.answer.texts.json_text import JsonText
from server.text.answer.texts.values import json_of, types_beside, types_of

_STRING = frozenset({"string"})
_BARE_NAME = re.compile(r"\s{0,16}[\w.:/-]{0,128}\s{0,16}")


class Lines(Enum):
    """Line breaks between two tags, as a model writes them. All are read alike."""

    ALL = "all"
    NONE = "none"
    EITHER = "either"


@dataclass(frozen=True, slots=True)
class Tags:
    """The tags of one form. An empty text is a tag that the form does not have.

    section    around several calls, or around each
    call       before the name of a call, behind the name, and behind the call
    key        before and behind the name of an argument
    value      before and behind its value
    lines      between tags, for a grammar
    says_string between an argument's name and the word true or false, which says whether its value is a string
    tokens     what may be a token of its own within tags that are none
    is_shared  one section has all calls
    is_padded  a line break on each side of a value is no part of it
    is_lenient a value ends at the next argument, too, and at the end of the call
    """

    section: tuple[str, str]
    call: tuple[str, str, str]
    key: tuple[str, str]
    value: tuple[str, str]
    lines: Lines = Lines.ALL
    says_string: str = ""
    tokens: tuple[str, ...] = ()
    is_shared: bool = False
    is_padded: bool = False
    is_lenient: bool = False

    @property
    def marks(self) -> tuple[str, ...]:
        """Return what may be a token of its own: `tokens` where a form has them, else the tags that are whole."""
        tags = (*self.section, *self.call, *self.key, *self.value)
        return self.tokens or tuple(it for it in tags if it.startswith("<") and it.endswith(">"))

    @property
    def ends_of_value(self) -> tuple[str, ...]:
        closing = self.value[1]
        return (closing, self.key[0], self.call[2]) if self.is_lenient else (closing,)


@dataclass(frozen=True, slots=True)
class TaggedCalls:
    """Forms that one model may write: of the first tag that is found."""

    forms: tuple[Tags, ...]

    def parser(self, tools: Tools) -> "Tagged":
        return Tagged(tools, self.forms)


class Tagged(StepParser):
    """Content may stand before, between and behind calls. What has no function in it is content."""

    def __init__(self, tools: Tools, forms: tuple[Tags, ...], new_id: Callable[[], str] = new_call_id) -> None:
        super().__init__(tools, new_id)
        self.marks = tuple(dict.fromkeys(mark for form in forms for mark in form.marks))
        self._openings = {mark: form for form in forms for mark in (form.section[0], form.call[0]) if mark}
        self.ends_reasoning = {mark: _begins(form, mark, tools) for mark, form in self._openings.items()}
        self._tags = forms[0]
        self._written = ""  # since the mark that may begin a call
        self._tool = ""  # its name
        self._types = _STRING  # of the argument that is read
        self._value = ""  # of it, not given yet
        self._is_value_new = True
        self._nested: JsonText | None = None  # of a value that is an object or array, as far as it is read
        self._first_end: tuple[int, str] | None = None  # the first tag within a string of it, and its place
        self._is_strict = False  # a value ends at its first tag
        self._key = ""  # of the argument that is read
        self._num_keys = 0
        self._properties: Mapping[str, Any] = {}  # schemas of the tool's arguments

    def _begin(self, is_last: bool) -> Iterable[Delta]:
        text, mark = self._cut(*self._openings, is_last=is_last)
        yield from self._content(text)
        if mark is not None:
            self._tags = self._openings[mark]
            self._written, self._tool = mark, ""
            self._step = self._preamble if mark == self._tags.section[0] else self._name

    def _preamble(self, is_last: bool) -> Iterable[Delta]:
        opening, closing = self._tags.call[0], self._tags.section[1]
        text, mark = self._cut(opening, closing, is_last=is_last)
        self._written += text + (mark or "")
        if mark == opening:
            self._step = self._name
        elif mark == closing or is_last:
            yield from self._no_call()

    def _name(self, is_last: bool) -> Iterable[Delta]:
        _, behind, closing = self._tags.call
        text, mark = self._cut(behind or self._tags.key[0], closing, is_last=is_last)
        self._tool += text
        if not behind and not _BARE_NAME.fullmatch(self._tool):  # a tag in a text; the call may stand in that text
            self._text = self._tool + (mark or "") + self._text
            yield from self._no_call()
            return
        if mark is None and not is_last:
            return
        name = self._tool.strip()
        if mark is None or not name:
            self._written += self._tool + (mark or "")
            yield from self._no_call()
            return
        schema = self._tools.get(name, {}).get("properties")
        self._properties = schema if isinstance(schema, dict) else {}
        self._num_keys = 0
        yield self._start(name)
        if mark == closing:
            yield from self._end_call()
        else:
            self._key = ""
            self._step = self._between if behind else self._in_key

    def _no_call(self) -> Iterable[Delta]:
        yield ContentText(self._blank + self._written)
        self._blank = ""
        self._step = self._begin

    def _between(self, is_last: bool) -> Iterable[Delta]:
        """Drop what stands between two arguments."""
        _, mark = self._cut(self._tags.key[0], self._tags.call[2], is_last=is_last)
        if mark == self._tags.key[0]:
            self._key = ""
            self._step = self._in_key
        elif mark is not None or is_last:
            self.is_cut = mark is None
            yield from self._end_call()

    def _in_key(self, is_last: bool) -> Iterable[Delta]:
        text, mark = self._cut(self._tags.key[1], self._tags.call[2], is_last=is_last)
        self._key += text
        if mark == self._tags.key[1]:
            if self._tags.value[0]:
                self._step = self._before_value
            else:
                yield from self._begin_value()
        elif mark is not None or is_last:
            self.is_cut = mark is None
            yield from self._end_call()

    def _before_value(self, is_last: bool) -> Iterable[Delta]:
        """Drop what stands between an argument's name and its value; a name without one is left out."""
        opening, key = self._tags.value[0], self._tags.key[0]
        _, mark = self._cut(opening, key, self._tags.call[2], is_last=is_last)
        if mark == opening:
            yield from self._begin_value()
        elif mark == key:
            self._key = ""
            self._step = self._in_key
        elif mark is not None or is_last:
            self.is_cut = mark is None
            yield from self._end_call()

    def _begin_value(self) -> Iterable[Delta]:
        self._types = self._types_of_value()
        self._value, self._is_value_new = "", True
        self._nested = self._first_end = None
        if self._types == _STRING:
            yield self._arguments(self._next_key() + '"')
            self._step = self._in_string
        else:
            self._step = self._in_bare

    def _types_of_value(self) -> frozenset[str]:
        """Return the types of the value that begins, and take from its key what says whether it is a string."""
        if self._tags.says_string:
            name, found, word = self._key.rpartition(self._tags.says_string)
            if found and word in ("true", "false"):
                self._key = name
                return types_beside(self._properties.get(name), is_string=word == "true")
        return types_of(self._properties.get(self._key))

    def _next_key(self) -> str:
        self._num_keys += 1
        return f"{', ' if self._num_keys > 1 else '{'}{json.dumps(self._key, ensure_ascii=False)}: "

    def _in_string(self, is_last: bool) -> Iterable[Delta]:
        """Give a string while it is written."""
        text, mark = self._cut(*self._tags.ends_of_value, is_last=is_last)
        self._value += text
        is_whole = mark is not None or is_last
        given = self._value
        if self._tags.is_padded:
            if self._is_value_new and given:
                given = self._value = given.removeprefix("\n")
                self._is_value_new = False
            given = given.removesuffix("\n")
            self._value = "" if is_whole else self._value[len(given) :]
        else:
            self._value = ""
        escaped = json.dumps(given, ensure_ascii=False)[1:-1]
        if escaped or is_whole:
            yield self._arguments(escaped + ('"' if is_whole else ""))
        if is_whole:
            self._end_value(mark)

    def _in_bare(self, is_last: bool) -> Iterable[Delta]:
        """Give a value of another type when it is whole; one that is cut off is left out."""
        while True:
            text, mark = self._cut(*self._tags.ends_of_value, is_last=is_last)
            self._value += text
            is_in_json = self._is_in_json(text)
            if mark is None or self._is_strict or not is_in_json:
                break
            self._first_end = self._first_end or (len(self._value), mark)
            self._value += mark
            self._is_in_json(mark)
        if mark is None and not is_last:
            return
        if mark is None and self._first_end is not None:  # the value's last quote is missing: it ended there
            place, mark = self._first_end
            self._text, self._value = self._value[place + len(mark) :], self._value[:place]
            self._is_strict = True
        if mark is not None:
            value = self._value.removeprefix("\n").removesuffix("\n") if self._tags.is_padded else self._value
            yield self._arguments(self._next_key() + json_of(value, self._types))
        self._end_value(mark)

    def _is_in_json(self, text: str) -> bool:
        """Return whether the value is an object or array, and ends within a string. `text`: its newest part."""
        if self._nested is None:
            if not self._is_value_new or not (begun := self._value.lstrip()):
                return False
            self._is_value_new = False
            if begun[0] not in "{[":
                return False
            self._nested, text = JsonText(), begun
        if not self._nested.is_whole:
            self._nested.feed(text)
        return self._nested.is_in_string

    def _end_value(self, mark: str | None) -> None:
        self._step = self._between
        if mark is not None and mark != self._tags.value[1]:
            self._text = mark + self._text

    def _end_call(self) -> Iterable[Delta]:
        yield self._arguments("}" if self._num_keys else "{}")
        if not self.is_cut:
            yield self._end()
        self._step = self._behind if self._tags.section[1] else self._begin

    def _behind(self, is_last: bool) -> Iterable[Delta]:
        """Drop what stands between a call's end and the section's."""
        opening, closing = self._tags.section
        _, mark = self._cut(closing, opening, self._tags.call[0], is_last=is_last)
        if mark == closing:
            self._step = self._begin
        elif mark is not None:
            self._written, self._tool = mark, ""
            self._step = self._preamble if mark == opening else self._name
        return ()


def _begins(form: Tags, mark: str, tools: Tools) -> tuple[str, ...]:
    """Return the texts of which one follows a mark where it begins a call."""
    if mark == form.section[0]:
        return (form.call[0],)
    behind = (form.call[1],) if form.call[1] else ("\n", form.key[0], form.call[2])
    return tuple(name + it for name in tools for it in behind)
