"""Answers in the formats of OpenAI's clients: whole, and as server-sent events."""

import abc
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import chain
from typing import ClassVar

import msgspec

from server.http.common.json_pieces import json_pieces
from server.http.common.provenance import Namer, named_pieces
from server.http.generation.event_stream import Events
from server.http.generation.pieces import Gathered, Piece
from server.http.generation.usage import Usage
from server.http.openai.details import Details, Fields
from server.text.answer.deltas import (
    Answer,
    ArgumentsText,
    CallEnd,
    CallStart,
    ContentText,
    Delta,
    ReasoningText,
    whole_answer,
)

_DONE = b"data: [DONE]\n\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerFormat(abc.ABC):
    """The bytes of one request's answer, written by msgspec: a token's event in 1 us. `schemas` documents them."""

    prefix: ClassVar[str]  # of an answer's id
    chunk_kind: ClassVar[str]
    whole_kind: ClassVar[str]

    unique_id: str
    model: str
    usage: Callable[[], Usage]  # so far
    has_usage_chunk: bool = False  # then every chunk has a usage, null but in the last
    has_usage_in_each: bool = False
    has_reasoning_count: bool = False  # in the usage
    system_fingerprint: str | None = None
    details: Details | None = None  # of the answer's tokens, where the request asks for them
    may_call: bool = False  # the model has tools: an answer may have calls and no content
    created: int = field(default_factory=lambda: int(time.time()))
    _around: dict[int, tuple[bytes, bytes]] = field(default_factory=dict)  # by choice: an event but for its text

    @property
    def is_plain(self) -> bool:
        """Return whether a chunk has nothing that changes but its text."""
        return self.details is None and not self.has_usage_in_each

    @abc.abstractmethod
    def opening(self, num_choices: int) -> bytes:
        """Events before the first text."""

    @abc.abstractmethod
    def event(self, piece: Piece) -> Events:
        """The events of a piece; empty when it has neither text nor a finish reason."""

    @abc.abstractmethod
    def text_event(self, index: int, text: str) -> bytes:
        """The event of a choice's text, which is not empty."""

    @abc.abstractmethod
    def opened(self, first: Piece) -> Events:
        """The events of the first piece, never empty: a reader must see that the first token is there."""

    def usage_event(self) -> bytes:
        """The event behind those of the pieces."""
        return b"".join(self._chunk_pieces([], usage=self.usage()))

    def whole(self, pieces: Iterable[Piece]) -> Iterator[bytes]:
        """The body of an answer that is no stream, in pieces; of one piece a choice, in their order."""
        choices: list[Fields] = []
        beside: Fields = {}
        for each in pieces:
            piece, more, others = self._detailed(each)
            choices.append(self._whole_choice(piece) | more)
            beside |= others
        return json_pieces(self._head(self.whole_kind, choices) | {"usage": self._counts(self.usage())} | beside)

    @abc.abstractmethod
    def _whole_choice(self, piece: Piece) -> Fields:
        """A choice of a whole answer."""

    def _detailed(self, piece: Piece) -> tuple[Piece, Fields, Fields]:
        """The piece as it is given out, more fields of its choice, and fields beside the choices."""
        return (piece, {}, {}) if self.details is None else self.details.of(piece)

    def _text_event(self, index: int, text: str, empty: Callable[[int], bytes], mark: bytes) -> bytes:
        """The event `empty` makes, with `text` where it has `mark` and nothing; most of it is made once a stream."""
        around = None if self.has_usage_in_each else self._around.get(index)
        if around is None:  # inside a string the mark's quotes would be escaped
            head, _, tail = empty(index).partition(mark + b'""')
            around = self._around[index] = head + mark, tail
        return b"".join((around[0], msgspec.json.encode(text), around[1]))

    def _chunk(self, choice: Fields, beside: Fields | None = None) -> bytes:
        return b"".join(self._chunk_pieces([choice], beside=beside))

    def _chunk_pieces(
        self, choices: list[Fields], *, usage: Usage | None = None, beside: Fields | None = None
    ) -> Iterator[bytes]:
        body = self._head(self.chunk_kind, choices) | (beside or {})
        if usage is None and self.has_usage_in_each:
            usage = self.usage()
        if self.has_usage_chunk or usage is not None:
            body["usage"] = self._counts(usage) if usage else None
        return json_pieces(body, before=b"data: ", behind=b"\n\n")

    def _head(self, kind: str, choices: list[Fields]) -> Fields:
        """The fields of a chunk and of a whole answer alike."""
        return {
            "id": f"{self.prefix}-{self.unique_id}",
            "object": kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": self.system_fingerprint,
            "choices": choices,
        }

    def _counts(self, usage: Usage) -> Fields:
        reasoning = {"completion_tokens_details": {"reasoning_tokens": usage.reasoning_tokens}}
        return (reasoning if self.has_reasoning_count else {}) | {
            "prompt_tokens": usage.prompt_tokens,
            "completion_tokens": usage.completion_tokens,
            "total_tokens": usage.prompt_tokens + usage.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
        }


class CompletionFormat(AnswerFormat):
    prefix = "cmpl"
    chunk_kind = whole_kind = "text_completion"

    def opening(self, num_choices: int) -> bytes:  # noqa: ARG002 -- a chat's role
        return b""

    def event(self, piece: Piece) -> Events:
        has_details = self.details is not None and bool(piece.token_ids)
        if not piece.text and piece.finish_reason is None and not has_details:
            return b""
        return self.opened(piece)

    def text_event(self, index: int, text: str) -> bytes:
        return self._text_event(index, text, self._empty, b'"text":')

    def _empty(self, index: int) -> bytes:
        return self._chunk(_text_choice(index, "", None))

    def opened(self, first: Piece) -> Events:
        if first.finish_reason is None and self.details is None:
            return self.text_event(first.index, first.text)
        piece, more, _ = self._detailed(first)
        return self._chunk_pieces([self._whole_choice(piece) | more])

    def _whole_choice(self, piece: Piece) -> Fields:
        return _text_choice(piece.index, piece.text, piece.finish_reason)


class ChatFormat(AnswerFormat):
    prefix = "chatcmpl"
    chunk_kind = "chat.completion.chunk"
    whole_kind = "chat.completion"

    def opening(self, num_choices: int) -> bytes:
        content = None if self.may_call else ""  # clients show a text, be it empty, as a part of the answer
        return b"".join(self._delta(i, {"role": "assistant", "content": content}, None) for i in range(num_choices))

    def event(self, piece: Piece) -> bytes:
        if self.details is None and piece.finish_reason is None and not piece.deltas:  # most of them: 3 us less
            return self.text_event(piece.index, piece.text) if piece.text else b""
        piece, more, beside = self._detailed(piece)
        deltas = [delta for delta in piece.all_deltas if not isinstance(delta, CallEnd)]  # which no chunk has
        events = b""
        if more:  # with the first of them: clients join the details of all chunks
            first = _fields(deltas.pop(0)) if deltas else {"content": ""}
            events = self._delta(piece.index, first, None, more, beside)
        events += b"".join(self._parsed(piece.index, delta) for delta in deltas)
        return events + self._delta(piece.index, {}, piece.finish_reason) if piece.finish_reason else events

    def _parsed(self, index: int, delta: Delta) -> bytes:
        if isinstance(delta, ContentText):
            return self.text_event(index, delta.text)
        return self._delta(index, _fields(delta), None)

    def opened(self, first: Piece) -> bytes:
        return self.event(first)  # the role went before it

    def text_event(self, index: int, text: str) -> bytes:
        return self._text_event(index, text, self._empty, b'"content":')

    def _empty(self, index: int) -> bytes:
        return self._delta(index, {"content": ""}, None)

    def _delta(
        self,
        index: int,
        delta: Fields,
        finish_reason: str | None,
        more: Fields | None = None,
        beside: Fields | None = None,
    ) -> bytes:
        choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": finish_reason, **(more or {})}
        return self._chunk(choice, beside)

    def _whole_choice(self, piece: Piece) -> Fields:
        message = _message(whole_answer([*piece.all_deltas]))
        return {"index": piece.index, "message": message, "logprobs": None, "finish_reason": piece.finish_reason}


class AllChoices:
    """The answers to one request, as its stream's events or as one body."""

    def __init__(self, shape: AnswerFormat, num_choices: int, name: Namer) -> None:
        """`name`: adds the kernels to the last chunk, or to the body."""
        self._shape = shape
        self._name = name
        self._num_choices = num_choices
        self._num_open = num_choices
        self._gathered = [Gathered(index) for index in range(num_choices)]

    def opening(self, first: Piece) -> Events:
        opening, events = self._shape.opening(self._num_choices), self._named(first, self._shape.opened(first))
        return opening + events if isinstance(events, bytes) else chain((opening,), events)

    def event(self, piece: Piece) -> Events:
        return self._named(piece, self._shape.event(piece))

    def closing(self) -> bytes:
        return (self._name(self._shape.usage_event()) if self._shape.has_usage_chunk else b"") + _DONE

    def take(self, piece: Piece) -> None:
        self._gathered[piece.index].add(piece)

    def whole(self) -> Events:
        return named_pieces(self._shape.whole(it.piece for it in self._gathered), self._name)

    def _named(self, piece: Piece, events: Events) -> Events:
        """The events of a piece; those of the last end with the stream's last chunk, but for one with the usage."""
        if piece.finish_reason is None:
            return events
        self._num_open -= 1
        if self._num_open or self._shape.has_usage_chunk:
            return events
        return self._name(events) if isinstance(events, bytes) else named_pieces(events, self._name)


def _text_choice(index: int, text: str, finish_reason: str | None) -> Fields:
    return {"index": index, "text": text, "logprobs": None, "finish_reason": finish_reason}


def _function(name: str, arguments: str) -> Fields:
    return {"function": {"name": name, "arguments": arguments}}


def _fields(delta: Delta) -> Fields:
    """A part of an answer as a chunk has it."""
    match delta:
        case ContentText(text):
            return {"content": text}
        case ReasoningText(text):
            return {"reasoning_content": text, "reasoning": text}
        case CallStart(call, call_id, name):
            started = {"index": call, "id": call_id, "type": "function"}
            return {"tool_calls": [started | _function(name, "")]}
        case ArgumentsText(call, text):
            return {"tool_calls": [{"index": call, "function": {"arguments": text}}]}
        case CallEnd():
            return {}


def _message(answer: Answer) -> Fields:
    """The message of a whole answer. It has no content where it has calls and nothing else."""
    content = None if answer.calls and not answer.content else answer.content
    message: Fields = {"role": "assistant", "content": content, "refusal": None}
    if answer.reasoning:
        message |= {"reasoning_content": answer.reasoning, "reasoning": answer.reasoning}
    if answer.calls:
        message["tool_calls"] = [
            {"id": call.call_id, "type": "function"} | _function(call.name, call.arguments) for call in answer.calls
        ]
    return message
