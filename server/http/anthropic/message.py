"""The answer of /v1/messages as it grows: its blocks, and the events that report them to a client."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import msgspec

from server.http.anthropic.signatures import signature_of
from server.http.chat.tools import object_of
from server.http.common.provenance import Namer
from server.http.generation.event_stream import named_event
from server.http.generation.pieces import Piece
from server.http.generation.usage import Usage
from server.text.answer.deltas import ArgumentsText, CallEnd, CallStart, ContentText, Delta, ReasoningText

_EMPTY: dict[str, dict[str, Any]] = {
    "text": {"type": "text", "text": ""},
    "thinking": {"type": "thinking", "thinking": "", "signature": ""},
}
_PING = named_event({"type": "ping"})
_STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


class MessageFormat:
    """One answer. Whole or streamed, its blocks are those that the events make."""

    def __init__(
        self,
        unique_id: str,
        model: str,
        usage: Callable[[], Usage],
        name: Namer,
        *,
        applied_edits: Sequence[Mapping[str, Any]] | None = None,
        left_out_tools: Sequence[str] = (),
        hides_thinking: bool = False,
        has_less_room: bool = False,
    ) -> None:
        """name            adds the kernels where they are asked for
        applied_edits   of the conversation; None where the request asks for none
        left_out_tools  types of tools that the model did not see
        hides_thinking  whether signatures hold the thinking, which is empty
        has_less_room   whether the context holds fewer tokens than `max_tokens`"""
        self._reasons = _STOP_REASONS | ({"length": "model_context_window_exceeded"} if has_less_room else {})
        self._edits = {} if applied_edits is None else {"context_management": {"applied_edits": applied_edits}}
        self._left_out = {"left_out_tools": left_out_tools} if left_out_tools else {}
        self._id = f"msg_{unique_id}"
        self._model = model
        self._hides_thinking = hides_thinking
        self._usage = usage
        self._name = name
        self._blocks: list[dict[str, Any]] = []
        self._texts: list[str] = []  # of the block that is open
        self._is_open = False
        self._stop_reason: str | None = None
        self._stop_sequence: str | None = None

    def opening(self, first: Piece) -> bytes:
        # What of the prompt was cached is known with the first token: `message_delta` has it.
        counts = {"input_tokens": self._usage().prompt_tokens, "output_tokens": 0}
        return named_event({"type": "message_start", "message": self._message(counts)}) + _PING + self.event(first)

    def event(self, piece: Piece) -> bytes:
        return b"".join(map(named_event, self._events(piece)))

    def closing(self) -> bytes:
        delta = {"stop_reason": self._stop_reason, "stop_sequence": self._stop_sequence}
        last = {"type": "message_delta", "delta": delta, "usage": self._counts(), **self._edits}
        return named_event(last) + self._name(named_event({"type": "message_stop"}))

    def take(self, piece: Piece) -> None:
        for _ in self._events(piece):
            pass

    def whole(self) -> bytes:
        return self._name(msgspec.json.encode(self._message(self._counts()) | self._edits))

    def _message(self, counts: dict[str, Any]) -> dict[str, Any]:
        return {
            "id": self._id,
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": self._blocks,
            "stop_reason": self._stop_reason,
            "stop_sequence": self._stop_sequence,
            "usage": counts,
            **self._left_out,
        }

    def _counts(self) -> dict[str, Any]:
        usage = self._usage()
        return {
            "input_tokens": usage.prompt_tokens - usage.cached_tokens,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": usage.cached_tokens,
            "output_tokens": usage.completion_tokens,
            "output_tokens_details": {"thinking_tokens": usage.reasoning_tokens},
        }

    def _events(self, piece: Piece) -> Iterator[dict[str, Any]]:
        for delta in piece.all_deltas:
            yield from self._emitted(delta)
        if piece.finish_reason is None:
            return
        if not self._blocks:
            yield from self._opened("text")
        yield from self._closed()
        self._stop_reason, self._stop_sequence = self._reasons[piece.finish_reason], piece.stop
        if piece.stop is not None:
            self._stop_reason = "stop_sequence"

    def _emitted(self, delta: Delta) -> Iterator[dict[str, Any]]:
        match delta:
            case ContentText(text):
                yield from self._opened("text")
                yield self._more({"type": "text_delta", "text": text}, text)
            case ReasoningText(text):
                yield from self._opened("thinking")
                if self._hides_thinking:
                    self._texts.append(text)
                else:
                    yield self._more({"type": "thinking_delta", "thinking": text}, text)
            case CallStart():
                yield from self._closed()
                yield self._begun({"type": "tool_use", "id": delta.call_id, "name": delta.name, "input": {}})
            case CallEnd():
                pass  # the block ends where another begins, or the answer
            case ArgumentsText(_, text):
                yield self._more({"type": "input_json_delta", "partial_json": text}, text)

    def _opened(self, kind: str) -> Iterator[dict[str, Any]]:
        if self._is_open and self._blocks[-1]["type"] == kind:
            return
        yield from self._closed()
        yield self._begun(_EMPTY[kind].copy())

    def _begun(self, block: dict[str, Any]) -> dict[str, Any]:
        self._blocks.append(block)
        self._is_open = True
        return {"type": "content_block_start", "index": len(self._blocks) - 1, "content_block": block}

    def _more(self, delta: dict[str, str], text: str) -> dict[str, Any]:
        self._texts.append(text)
        return {"type": "content_block_delta", "index": len(self._blocks) - 1, "delta": delta}

    def _closed(self) -> Iterator[dict[str, Any]]:
        if not self._is_open:
            return
        text, block, index = "".join(self._texts), self._blocks[-1], len(self._blocks) - 1
        self._texts.clear()
        self._is_open = False
        if block["type"] == "tool_use":
            block["input"] = object_of(text)
        elif block["type"] == "text":
            block["text"] = text
        else:  # nothing signs it; clients wait for the event
            block |= {"signature": signature_of(text)} if self._hides_thinking else {"thinking": text}
            delta = {"type": "signature_delta", "signature": block["signature"]}
            yield {"type": "content_block_delta", "index": index, "delta": delta}
        yield {"type": "content_block_stop", "index": index}
