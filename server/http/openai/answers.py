"""Answers in the formats of OpenAI's clients: whole, and as server-sent events."""

import abc
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec

from server.http.openai.completion import Piece

DONE = b"data: [DONE]\n\n"


@dataclass(frozen=True, slots=True)
class Usage:
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int  # of the prompt, not computed again

    def as_dict(self) -> dict[str, Any]:
        total = self.prompt_tokens + self.completion_tokens
        return {
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
    created: int = field(default_factory=lambda: int(time.time()))
    _around: dict[int, tuple[bytes, bytes]] = field(default_factory=dict)  # by choice: an event but for its text

    @abc.abstractmethod
    def opening(self, num_choices: int) -> bytes:
        """Events before the first text."""

    @abc.abstractmethod
    def event(self, piece: Piece) -> bytes:
        """The events of a piece; empty when it has neither text nor a finish reason."""

    @abc.abstractmethod
    def text_event(self, index: int, text: str) -> bytes:
        """The event of a choice's text, which is not empty."""

    @abc.abstractmethod
    def opened(self, first: Piece) -> bytes:
        """The events of the first piece, never empty: a reader must see that the first token is there."""

    @abc.abstractmethod
    def usage_event(self, usage: Usage) -> bytes: ...

    @abc.abstractmethod
    def whole(self, texts: list[str], finish_reasons: list[str], usage: Usage) -> bytes:
        """The body of an answer that is no stream."""

    @abc.abstractmethod
    def choices(self, choices: list[dict[str, Any]], usage: Usage) -> bytes:
        """The body around choices that are made already."""

    def _text_event(self, index: int, text: str, empty: Callable[[int], bytes], mark: bytes) -> bytes:
        """The event `empty` makes, with `text` where it has `mark` and nothing; most of it is made once a stream."""
        around = self._around.get(index)
        if around is None:  # inside a string the mark's quotes would be escaped
            head, _, tail = empty(index).partition(mark + b'""')
            around = self._around[index] = head + mark, tail
        return b"".join((around[0], msgspec.json.encode(text), around[1]))

    def _chunk(self, kind: str, prefix: str, choices: list[dict[str, Any]], usage: Usage | None = None) -> bytes:
        body: dict[str, Any] = {
            "id": f"{prefix}-{self.unique_id}",
            "object": kind,
            "created": self.created,
            "model": self.model,
            "choices": choices,
        }
        if self.has_usage_chunk:
            body["usage"] = usage.as_dict() if usage else None
        return b"data: " + msgspec.json.encode(body) + b"\n\n"

    def _whole(self, kind: str, prefix: str, choices: list[dict[str, Any]], usage: Usage) -> bytes:
        return msgspec.json.encode(
            {
                "id": f"{prefix}-{self.unique_id}",
                "object": kind,
                "created": self.created,
                "model": self.model,
                "choices": choices,
                "usage": usage.as_dict(),
            }
        )


class CompletionFormat(AnswerFormat):
    def opening(self, num_choices: int) -> bytes:  # noqa: ARG002 -- a chat's role
        return b""

    def event(self, piece: Piece) -> bytes:
        if not piece.text and piece.finish_reason is None:
            return b""
        return self.opened(piece)

    def text_event(self, index: int, text: str) -> bytes:
        return self._text_event(index, text, self._empty, b'"text":')

    def _empty(self, index: int) -> bytes:
        return self._chunk("text_completion", "cmpl", [_text_choice(index, "", None)])

    def opened(self, first: Piece) -> bytes:
        if first.finish_reason is None:
            return self.text_event(first.index, first.text)
        return self._chunk("text_completion", "cmpl", [_text_choice(first.index, first.text, first.finish_reason)])

    def usage_event(self, usage: Usage) -> bytes:
        return self._chunk("text_completion", "cmpl", [], usage)

    def whole(self, texts: list[str], finish_reasons: list[str], usage: Usage) -> bytes:
        return self.choices(
            [_text_choice(i, *it) for i, it in enumerate(zip(texts, finish_reasons, strict=True))], usage
        )

    def choices(self, choices: list[dict[str, Any]], usage: Usage) -> bytes:
        return self._whole("text_completion", "cmpl", choices, usage)


class ChatFormat(AnswerFormat):
    def opening(self, num_choices: int) -> bytes:
        return b"".join(self._delta(i, {"role": "assistant", "content": ""}, None) for i in range(num_choices))

    def event(self, piece: Piece) -> bytes:
        text = self.text_event(piece.index, piece.text) if piece.text else b""
        return text + self._delta(piece.index, {}, piece.finish_reason) if piece.finish_reason else text

    def opened(self, first: Piece) -> bytes:
        return self.event(first)  # the role went before it

    def usage_event(self, usage: Usage) -> bytes:
        return self._chunk("chat.completion.chunk", "chatcmpl", [], usage)

    def whole(self, texts: list[str], finish_reasons: list[str], usage: Usage) -> bytes:
        choices = [
            {
                "index": i,
                "message": {"role": "assistant", "content": text, "refusal": None},
                "logprobs": None,
                "finish_reason": reason,
            }
            for i, (text, reason) in enumerate(zip(texts, finish_reasons, strict=True))
        ]
        return self.choices(choices, usage)

    def choices(self, choices: list[dict[str, Any]], usage: Usage) -> bytes:
        return self._whole("chat.completion", "chatcmpl", choices, usage)

    def text_event(self, index: int, text: str) -> bytes:
        return self._text_event(index, text, self._empty, b'"content":')

    def _empty(self, index: int) -> bytes:
        return self._delta(index, {"content": ""}, None)

    def _delta(self, index: int, delta: dict[str, str], finish_reason: str | None) -> bytes:
        choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": finish_reason}
        return self._chunk("chat.completion.chunk", "chatcmpl", [choice])


def _text_choice(index: int, text: str, finish_reason: str | None) -> dict[str, Any]:
    return {"index": index, "text": text, "logprobs": None, "finish_reason": finish_reason}
