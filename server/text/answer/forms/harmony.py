"""Harmony, the format of gpt-oss: messages with a channel each, between special tokens.

    <|channel|>analysis<|message|>...<|end|><|start|>assistant<|channel|>final<|message|>...<|return|>
    <|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{...}<|call|>

Reasoning is in `analysis`, calls have a recipient, and the rest is content. The prompt ends with <|start|>assistant.
"""

import re
from collections.abc import Callable, Iterable
from enum import Enum

from server.text.answer.deltas import ContentText, Delta, ReasoningText, new_call_id
from server.text.answer.parser import CallParser, Tools
from server.text.answer.texts.values import is_json

START, CHANNEL, MESSAGE = "<|start|>", "<|channel|>", "<|message|>"
CONSTRAIN = "<|constrain|>"
ENDS = ("<|end|>", "<|call|>", "<|return|>")
MARKS = (START, CHANNEL, MESSAGE, CONSTRAIN, *ENDS)
_FUNCTIONS = "functions."
_BUILT_IN = ("python", "browser", "container", "assistant")  # tools of OpenAI's own, which are not run here
_CHANNEL = re.compile(r"<\|channel\|>\s*([^\s<]+)")
_RECIPIENT = re.compile(r"\bto=([^\s<]+)")
_BEGINNINGS = (START, CHANNEL, MESSAGE, CONSTRAIN, "to=")


class _Part(Enum):
    HEADER = 0
    REASONING = 1
    CONTENT = 2
    CALL = 3


class Harmony(CallParser):
    """A parser of reasoning too. `has_tools`: a message to a function is a call, else it is content."""

    marks = MARKS

    def __init__(self, tools: Tools, new_id: Callable[[], str] = new_call_id, *, has_tools: bool = True) -> None:
        super().__init__(tools, new_id)
        self._has_tools = has_tools
        self._part = _Part.HEADER
        self._is_first = True  # nothing is read yet
        self._header = ""
        self._given: list[str] = []  # arguments of the call
        self._has_reasoning = self._has_content = False
        self._is_new = False  # the message has no text yet

    @property
    def is_reasoning(self) -> bool:
        return self._part is _Part.REASONING

    def _read(self, *, is_last: bool) -> Iterable[Delta]:
        while self._text or is_last:
            if self._part is _Part.HEADER:
                if self._is_first and not self._begins(is_last=is_last):
                    return
                yield from self._in_header(is_last=is_last)
                if self._part is _Part.HEADER:
                    return
            text, mark = self._cut(START, CHANNEL, *ENDS, is_last=is_last)
            yield from self._in_message(text)
            if self._part is _Part.CALL and (mark is not None or (is_last and is_json("".join(self._given)))):
                yield self._end()
            if mark is None:
                return
            self._part = _Part.HEADER
            self._header = "" if mark in ENDS else mark

    def _begins(self, *, is_last: bool) -> bool:
        """Return whether it is known how the answer begins; one that begins with no header is content."""
        begun = self._text.lstrip()
        if not is_last and any(mark.startswith(begun) and mark != begun for mark in _BEGINNINGS):
            return False
        self._is_first = False
        if begun and not begun.startswith(_BEGINNINGS):
            self._open(_Part.CONTENT)
        return True

    def _in_header(self, *, is_last: bool) -> Iterable[Delta]:
        if self._part is not _Part.HEADER:
            return
        text, mark = self._cut(MESSAGE, is_last=is_last)
        self._header += text
        if mark is None:
            if is_last and self._has_tools:
                self.cut_name = _called(self._header, is_cut=True)
            if is_last and self._header.strip() and not self._header.startswith((START, CHANNEL)):
                yield ContentText(self._header)
            return
        header, self._header = self._header, ""
        channel = _CHANNEL.search(header)
        called = _called(header)
        if called is not None and self._has_tools:
            self._part = _Part.CALL
            self._given = []
            yield self._start(called)
        elif (channel is not None and channel[1] == "analysis") or (called is None and _RECIPIENT.search(header)):
            self._open(_Part.REASONING)
        else:
            self._open(_Part.CONTENT)

    def _open(self, part: _Part) -> None:
        self._part = part
        self._is_new = True

    def _in_message(self, text: str) -> Iterable[Delta]:
        if not text:
            return
        if self._part is _Part.CALL:
            self._given.append(text)
            yield self._arguments(text)
        elif self._part is _Part.REASONING:
            yield ReasoningText("\n" + text if self._is_new and self._has_reasoning else text)
            self._has_reasoning = True
        else:
            yield ContentText("\n" + text if self._is_new and self._has_content else text)
            self._has_content = True
        self._is_new = False


def _called(header: str, *, is_cut: bool = False) -> str | None:
    """The function that a message is to; None for one without a recipient, or to a tool of OpenAI's own.

    is_cut  the header's last word may lack its end
    """
    recipient = _RECIPIENT.search(header)
    if recipient is None or recipient[1].startswith(_BUILT_IN) or (is_cut and recipient.end() == len(header)):
        return None
    return recipient[1].removeprefix(_FUNCTIONS) or None
