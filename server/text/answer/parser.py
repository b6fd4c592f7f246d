"""The one interface of all formats, and what they share."""

import abc
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from server.text.answer.deltas import (
    ArgumentsText,
    CallEnd,
    CallStart,
    ContentText,
    Delta,
    ReasoningText,
    new_call_id,
    whole_answer,
)
from server.text.answer.texts.cutting import cut
from server.text.answer.think_tags import CallSigns, ThinkTags, Unwrapped

Tools = Mapping[str, Mapping[str, Any]]  # by name: the JSON schema of its arguments


class AnswerParser(abc.ABC):
    """Reads one answer, text by text. However the text is cut, the deltas join to the same.

    No text is malformed: what is no call after all is content. `marks` are what it looks for; where they are special
    tokens, the text that it is fed must have them.
    """

    marks: tuple[str, ...] = ()

    @property
    def is_reasoning(self) -> bool:
        """Return whether the text that comes next is reasoning, as far as is known."""
        return False

    @abc.abstractmethod
    def feed(self, text: str) -> list[Delta]:
        """Return the deltas that are certain after this text and were not before."""

    @abc.abstractmethod
    def finish(self) -> list[Delta]:
        """Return the deltas that are left when the answer has ended."""


class CallParser(AnswerParser):
    """Finds calls in what is not reasoning. A format is written as `_read`, which takes from `_text` what it can."""

    ends_reasoning: CallSigns = MappingProxyType({})

    def __init__(self, tools: Tools, new_id: Callable[[], str] = new_call_id) -> None:
        self.is_malformed = False  # something began as a call and is none, in a format where that voids the others
        self.is_cut = False  # the answer ended within its last call, whose arguments may be JSON for all that
        self.cut_name: str | None = None  # of a call that ended behind its name, and is content for want of arguments
        self._tools = tools
        self._new_id = new_id
        self._text = ""  # not read yet
        self._num_calls = 0
        self._blank = ""  # the end of the content so far; not given before a call

    def feed(self, text: str) -> list[Delta]:
        self._text += text
        return [*self._read(is_last=False)]

    def finish(self) -> list[Delta]:
        deltas = [*self._read(is_last=True)]
        if self._blank and not self._num_calls:
            deltas.append(ContentText(self._blank))
        return deltas

    def cut_call(self) -> list[Delta]:
        """Return the start of a first call that ended behind its name."""
        return [] if self.cut_name is None or self._num_calls else [self._start(self.cut_name)]

    @abc.abstractmethod
    def _read(self, *, is_last: bool) -> Iterable[Delta]:
        """Read `_text` as far as it is certain, or all of it when it is the last."""

    def _content(self, text: str) -> Iterable[Delta]:
        """Content; white space is kept back until it is known that no call follows."""
        body = text.rstrip()
        if not body:
            self._blank += text
            return
        whole, self._blank = self._blank + body, text[len(body) :]
        yield ContentText(whole)

    def _start(self, name: str) -> CallStart:
        self._blank = ""
        self._num_calls += 1
        return CallStart(self._num_calls - 1, self._new_id(), name)

    def _arguments(self, text: str) -> ArgumentsText:
        """More arguments of the call that has begun last."""
        return ArgumentsText(self._num_calls - 1, text)

    def _end(self) -> CallEnd:
        """The end of the call that has begun last."""
        return CallEnd(self._num_calls - 1)

    def _cut(self, *marks: str, is_last: bool) -> tuple[str, str | None]:
        """Take from `_text` what stands before the first of `marks`, and the mark; or what cannot begin one."""
        before, mark, self._text = cut(self._text, marks, is_last=is_last)
        return before, mark


class StepParser(CallParser):
    """A format with states: `_step` reads on from one, and sets the next one."""

    def __init__(self, tools: Tools, new_id: Callable[[], str] = new_call_id) -> None:
        super().__init__(tools, new_id)
        self._step: Callable[[bool], Iterable[Delta]] = self._begin

    @abc.abstractmethod
    def _begin(self, is_last: bool) -> Iterable[Delta]:
        """Read on from the beginning of an answer."""

    def _rest(self, is_last: bool) -> Iterable[Delta]:  # noqa: ARG002 -- as the others
        """Give all that follows as content: no call can come any more."""
        text, self._text = self._text, ""
        if text:
            yield ContentText(text)

    def _read(self, *, is_last: bool) -> Iterable[Delta]:
        while True:
            step = self._step
            yield from step(is_last)
            if self._step == step:
                return


class Split(AnswerParser):
    """An answer that begins with reasoning, perhaps, and goes on with content and calls, perhaps."""

    def __init__(
        self,
        tags: ThinkTags | None,
        calls: CallParser | None,
        *,
        wrapped: Unwrapped | None = None,
        is_whole: bool,
        is_bound: bool = False,
        is_forced: bool = False,
    ) -> None:
        """wrapped    takes away what stands around the answer
        is_whole   nothing is given before the end, and one malformed call makes content of all that is written
        is_bound   a grammar binds the answer: its last call at most is malformed, for want of room
        is_forced  to calls alone: what else is written is the beginning of a cut one, and no content
        """
        self.marks = (*(tags.marks if tags else ()), *(calls.marks if calls else ()))
        self._tags = tags
        self._calls = calls
        self._wrapped = wrapped
        self._written: list[str] | None = [] if is_whole and calls is not None else None
        self._held: list[Delta] = []
        self._is_bound = is_bound
        self._is_forced = is_forced
        self._has_breaks = is_bound and tags is not None  # line breaks behind reasoning are no part of a bound answer

    @property
    def is_reasoning(self) -> bool:
        if self._calls is not None and self._calls.is_reasoning:
            return True
        return self._tags is not None and self._tags.is_open

    def feed(self, text: str) -> list[Delta]:
        if self._tags is None:
            return self._answer(text)
        reasoning, text = self._tags.feed(text)
        return [*([ReasoningText(reasoning)] if reasoning else []), *(self._answer(text) if text else [])]

    def finish(self) -> list[Delta]:
        deltas: list[Delta] = []
        reasoning, text = ("", "") if self._tags is None else self._tags.finish()
        deltas += [ReasoningText(reasoning)] if reasoning else []
        deltas += self._answer(text, is_last=True)
        if self._calls is None:
            return deltas
        rest = self._last(self._calls)
        if self._written is None:
            return [*deltas, *rest]
        found = [*self._held, *rest]
        if self._is_bound:
            return [*deltas, *self._whole_calls(found)]
        return [*deltas, ContentText("".join(self._written))] if self._calls.is_malformed else [*deltas, *found]

    def _answer(self, text: str, *, is_last: bool = False) -> list[Delta]:
        if self._wrapped is not None:
            text = self._wrapped.feed(text, is_last=is_last)
        if not text:
            return []
        if self._has_breaks and self._tags is not None and self._tags.has_ended:
            text = text.lstrip("\n")
            self._has_breaks = not text
        if self._calls is None:
            return [ContentText(text)] if text else []
        deltas = self._without_content(self._calls.feed(text))
        if self._written is None:
            return deltas
        self._written.append(text)
        self._held += deltas
        return []

    def _last(self, calls: CallParser) -> list[Delta]:
        """The deltas at the end, without what closes the arguments of a bound call that is cut: they are not whole."""
        rest = self._without_content(calls.finish())
        if self._is_bound and calls.is_cut:
            rest = [it for it in rest if not isinstance(it, ArgumentsText)]
        return [*rest, *calls.cut_call()] if self._is_forced else rest

    def _without_content(self, deltas: list[Delta]) -> list[Delta]:
        return [it for it in deltas if not isinstance(it, ContentText)] if self._is_forced else deltas

    def _whole_calls(self, found: list[Delta]) -> list[Delta]:
        """All of a bound answer but a call that is cut behind whole ones; the first is given as far as it goes."""
        assert self._calls is not None
        calls = whole_answer(found).calls
        if not calls:
            return found
        is_whole = [call.is_whole for call in calls]
        num_given = max(is_whole.index(False), 1) if False in is_whole else len(calls)
        return [it for it in found if not isinstance(it, ContentText) and _index_of(it) < num_given]


def _index_of(delta: Delta) -> int:
    return delta.index if isinstance(delta, CallStart | ArgumentsText | CallEnd) else 0


class Filtered(AnswerParser):
    """An answer without what its request does not want: reasoning, calls of other names, or calls behind the first."""

    def __init__(
        self, parser: AnswerParser, *, has_reasoning: bool, has_many_calls: bool, names: Collection[str] | None = None
    ) -> None:
        """names  of the tools whose calls are kept; None: of all"""
        self.marks = parser.marks
        self._parser = parser
        self._has_reasoning = has_reasoning
        self._has_many_calls = has_many_calls
        self._names = names
        self._places: dict[int, int] = {}  # of the calls that are kept: by the parser's index, the answer's

    @property
    def is_reasoning(self) -> bool:
        return self._parser.is_reasoning

    def feed(self, text: str) -> list[Delta]:
        return [*self._wanted(self._parser.feed(text))]

    def finish(self) -> list[Delta]:
        return [*self._wanted(self._parser.finish())]

    def _wanted(self, deltas: Iterable[Delta]) -> Iterable[Delta]:
        for delta in deltas:
            match delta:
                case ReasoningText():
                    if self._has_reasoning:
                        yield delta
                case CallStart(index=index, name=name):
                    is_named = self._names is None or name in self._names
                    if is_named and (self._has_many_calls or not self._places):
                        self._places[index] = len(self._places)
                        yield replace(delta, index=self._places[index])
                case ArgumentsText(index=index) | CallEnd(index=index):
                    if index in self._places:
                        yield replace(delta, index=self._places[index])
                case ContentText():
                    yield delta
