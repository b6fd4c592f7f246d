"""An answer that is written while it comes."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine
from typing import Any, cast

from starlette.types import Message, Receive, Scope, Send

from server.edge.context import Writer
from server.http.answers import DONE, AnswerFormat, Usage
from server.http.completion import Piece

_STREAM_HEADERS = [
    (b"cache-control", b"no-store"),
    (b"x-accel-buffering", b"no"),
    (b"content-type", b"text/event-stream; charset=utf-8"),
]


class StreamOutlet:
    """Writes text as events on the spot, the first one behind the response's head."""

    def __init__(self, shape: AnswerFormat, writer: Writer, send: Send) -> None:
        self.is_open = False
        self._shape = shape
        self._writer = writer
        self._send = send

    def has_room(self) -> bool:
        return self._writer.has_room()

    def put(self, text: str) -> None:
        if self.is_open:
            if text:
                self._writer.write(self._shape.text_event(0, text))
            return
        self.is_open = True
        self._begin()
        self._writer.write(self._shape.opening(1) + self._shape.opened(Piece(0, text, None)))

    def _begin(self) -> None:
        """Send the head at once: where the writer has room, nobody waits for anything."""
        sending = cast(Coroutine[Any, Any, None], self._send(_head()))
        try:
            sending.send(None)
        except StopIteration:
            return
        sending.close()
        raise RuntimeError("the head of a response waits, although there is room")


def _head() -> Message:
    return {"type": "http.response.start", "status": 200, "headers": _STREAM_HEADERS}


class EventStream:
    """Writes pieces as events while they come. A slow client holds up its own reading only: the engine's tokens of
    the meantime are merged into the next piece, hence into one write."""

    def __init__(
        self,
        shape: AnswerFormat,
        first: Piece,
        rest: AsyncGenerator[Piece],
        outlet: StreamOutlet | None,
        *,
        num_choices: int,
        usage: Callable[[], Usage] | None,
    ) -> None:
        """`first`, `rest`: but for what goes to the `outlet`. `usage` is asked at the end, for an event of its own."""
        self._shape = shape
        self._first = first
        self._rest = rest
        self._outlet = outlet
        self._num_choices = num_choices
        self._usage = usage

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG002 -- the guard watches
        shape = self._shape
        if self._outlet is not None and self._outlet.is_open:
            events = shape.event(self._first)
        else:
            await send(_head())
            events = shape.opening(self._num_choices) + shape.opened(self._first)
        if events:
            await send({"type": "http.response.body", "body": events, "more_body": True})
        if self._outlet is not None:
            self._outlet.is_open = True
        await asyncio.sleep(0)  # the loop writes when this task pauses, so before what is left to do for a first token
        async for piece in self._rest:
            events = shape.event(piece)
            if events:
                await send({"type": "http.response.body", "body": events, "more_body": True})
        last = b"" if self._usage is None else shape.usage_event(self._usage())
        await send({"type": "http.response.body", "body": last + DONE})
        await asyncio.sleep(0)  # so too before the log and the metrics of its end
