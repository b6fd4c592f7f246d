"""Answers in the formats of OpenAI's clients: whole, and as server-sent events."""

import abc
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import msgspec

from server.http.common.json_pieces import json_pieces
from server.http.generation.pieces import Piece
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

DONE = b"data: [DONE]\n\n"
Events = bytes | Iterator[bytes]  # in pieces where an event may be long: it has the details of a prompt


@dataclass(frozen=True, slots=True)
class Usage:
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int  # of the prompt, not computed again
    reasoning_tokens: int | None = None  # of the completion; None where the answer is not parsed

    def as_dict(self) -> dict[str, Any]:
        total = self.prompt_tokens + self.completion_tokens
        details: dict[str, Any] = {"reasoning_tokens": self.reasoning_tokens}
        return ({} if self.reasoning_tokens is None else {"completion_tokens_details": details}) | {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": total,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }


@dataclass(frozen=True, slots=True)
class AnswerFormat(abc.ABC):
    """The bytes of one request's answer, written by msgspec: a token's event in 1 us. `responses` documents them."""

    unique_id: str
    model: str
    has_usage_chunk: bool  # then every chunk has a usage, null but in the last
    system_fingerprint: str | None = None
    details: Details | None = None  # of the answer's tokens, where the request asks for them
    may_call: bool = False  # the model has tools: an answer may have calls and no content
    usage_now: Callable[[], Usage] | None = None  # where every chunk has the usage so far
    created: int = field(default_factory=lambda: int(time.time()))
    _around: dict[int, tuple[bytes, bytes]] = field(default_factory=dict)  # by choice: an event but for its text

    @property
    def is_plain(self) -> bool:
        """Return whether a chunk has nothing that changes but its text."""
        return self.details is None and self.usage_now is None

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

    @abc.abstractmethod
    def usage_event(self, usage: Usage) -> bytes: ...

    @abc.abstractmethod
    def whole(self, answers: list[Answer], finish_reasons: list[str], usage: Usage) -> bytes:
        """The body of an answer that is no stream."""

    @abc.abstractmethod
    def whole_with_details(self, pieces: list[Piece], usage: Usage) -> Iterator[bytes]:
        """The same in pieces, with details: of one piece a choice, in their order."""

    def _detailed(self, piece: Piece) -> tuple[Piece, Fields, Fields]:
        """The piece as it is given out, more fields of its choice, and fields beside the choices."""
        return (piece, {}, {}) if self.details is None else self.details.of(piece)

    def _text_event(self, index: int, text: str, empty: Callable[[int], bytes], mark: bytes) -> bytes:
        """The event `empty` makes, with `text` where it has `mark` and nothing; most of it is made once a stream."""
        around = None if self.usage_now is not None else self._around.get(index)
        if around is None:  # inside a string the mark's quotes would be escaped
            head, _, tail = empty(index).partition(mark + b'""')
            around = self._around[index] = head + mark, tail
        return b"".join((around[0], msgspec.json.encode(text), around[1]))

    def _chunk(
        self, kind: str, prefix: str, choices: list[Fields], usage: Usage | None = None, beside: Fields | None = None
    ) -> bytes:
        return b"".join(self._chunk_pieces(kind, prefix, choices, usage, beside))

    def _chunk_pieces(
        self, kind: str, prefix: str, choices: list[Fields], usage: Usage | None = None, beside: Fields | None = None
    ) -> Iterator[bytes]:
        body = self._head(kind, prefix, choices) | (beside or {})
        if usage is None and self.usage_now is not None:
            usage = self.usage_now()
        if self.has_usage_chunk or usage is not None:
            body["usage"] = usage.as_dict() if usage else None
        return json_pieces(body, before=b"data: ", behind=b"\n\n")

    def _whole(self, kind: str, prefix: str, choices: list[Fields], usage: Usage) -> bytes:
        return msgspec.json.encode(self._body(kind, prefix, choices, usage))

    def _body(
        self, kind: str, prefix: str, choices: list[Fields], usage: Usage, beside: Fields | None = None
    ) -> Fields:
        return self._head(kind, prefix, choices) | {"usage": usage.as_dict()} | (beside or {})

    def _head(self, kind: str, prefix: str, choices: list[Fields]) -> Fields:
        """The fields of a chunk and of a whole answer alike."""
        return {
            "id": f"{prefix}-{self.unique_id}",
            "object": kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": self.system_fingerprint,
            "choices": choices,
        }


class CompletionFormat(AnswerFormat):
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
        return self._chunk("text_completion", "cmpl", [_text_choice(index, "", None)])

    def opened(self, first: Piece) -> Events:
        if first.finish_reason is None and self.details is None:
            return self.text_event(first.index, first.text)
        return self._chunk_pieces("text_completion", "cmpl", [self._choice(first)])

    def usage_event(self, usage: Usage) -> bytes:
        return self._chunk("text_completion", "cmpl", [], usage)

    def whole(self, answers: list[Answer], finish_reasons: list[str], usage: Usage) -> bytes:
        both = zip(answers, finish_reasons, strict=True)
        choices = [_text_choice(i, it.content, reason) for i, (it, reason) in enumerate(both)]
        return self._whole("text_completion", "cmpl", choices, usage)

    def whole_with_details(self, pieces: list[Piece], usage: Usage) -> Iterator[bytes]:
        return json_pieces(self._body("text_completion", "cmpl", [self._choice(piece) for piece in pieces], usage))

    def _choice(self, piece: Piece) -> Fields:
        piece, more, _ = self._detailed(piece)
        return _text_choice(piece.index, piece.text, piece.finish_reason) | more


class ChatFormat(AnswerFormat):
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

    def usage_event(self, usage: Usage) -> bytes:
        return self._chunk("chat.completion.chunk", "chatcmpl", [], usage)

    def whole(self, answers: list[Answer], finish_reasons: list[str], usage: Usage) -> bytes:
        choices = [
            {"index": i, "message": _message(answer), "logprobs": None, "finish_reason": reason}
            for i, (answer, reason) in enumerate(zip(answers, finish_reasons, strict=True))
        ]
        return self._whole("chat.completion", "chatcmpl", choices, usage)

    def whole_with_details(self, pieces: list[Piece], usage: Usage) -> Iterator[bytes]:
        choices: list[Fields] = []
        beside: Fields = {}
        for piece in pieces:
            _, more, others = self._detailed(piece)
            message = _message(whole_answer([*piece.deltas]))
            choice = {"index": piece.index, "message": message, "logprobs": None, "finish_reason": piece.finish_reason}
            choices.append(choice | more)
            beside |= others
        return json_pieces(self._body("chat.completion", "chatcmpl", choices, usage, beside))

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
        return self._chunk("chat.completion.chunk", "chatcmpl", [choice], beside=beside)


def _text_choice(index: int, text: str, finish_reason: str | None) -> dict[str, Any]:
    return {"index": index, "text": text, "logprobs": None, "finish_reason": finish_reason}


def _function(name: str, arguments: str) -> dict[str, Any]:
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


def _message(answer: Answer) -> dict[str, Any]:
    """The message of a whole answer. It has no content where it has calls and nothing else."""
    content = None if answer.calls and not answer.content else answer.content
    message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
    if answer.reasoning:
        message |= {"reasoning_content": answer.reasoning, "reasoning": answer.reasoning}
    if answer.calls:
        message["tool_calls"] = [
            {"id": call.call_id, "type": "function"} | _function(call.name, call.arguments) for call in answer.calls
        ]
    return message
