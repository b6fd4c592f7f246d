"""An answer that is written while it comes, as server-sent events."""

import asyncio
from collections.abc import AsyncGenerator, Callable

from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from server.edge.context import send_of
from server.edge.direct_stream import DirectStream
from server.http.openai.answers import DONE, AnswerFormat, Usage
from server.http.openai.completion import Piece

_HEADERS = [
    (b"cache-control", b"no-store"),
    (b"x-accel-buffering", b"no"),
    (b"content-type", b"text/event-stream; charset=utf-8"),
]
HEAD: Message = {"type": "http.response.start", "status": 200, "headers": _HEADERS}


class EventStream(Response):
    """Writes pieces as events while they come. A slow client holds up its own reading only: the engine's tokens of
    the meantime are merged into the next piece, hence into one write."""

    def __init__(
        self,
        shape: AnswerFormat,
        first: Piece,
        rest: AsyncGenerator[Piece],
        direct: DirectStream | None,
        *,
        num_choices: int,
        usage: Callable[[], Usage] | None,
    ) -> None:
        """first, rest  the pieces that did not go to the `direct` stream
        usage        is called at the end, for an event of its own"""
        self.background = None  # Response's other attributes are about bodies of a known length
        self._shape = shape
        self._first = first
        self._rest = rest
        self._direct = direct
        self._num_choices = num_choices
        self._usage = usage

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG002 -- the guard watches
        shape = self._shape
        send = send_of(scope)  # past two frames of the framework for each event
        if self._direct is not None and self._direct.is_open:
            events = shape.event(self._first)
        else:
            await send(HEAD)
            events = shape.opening(self._num_choices) + shape.opened(self._first)
        if events:
            await send({"type": "http.response.body", "body": events, "more_body": True})
        if self._direct is not None:
            self._direct.is_open = True
        await asyncio.sleep(0)  # the loop writes when this task pauses, so before what is left to do for a first token
        async for piece in self._rest:
            events = shape.event(piece)
            if events:
                await send({"type": "http.response.body", "body": events, "more_body": True})
        last = b"" if self._usage is None else shape.usage_event(self._usage())
        await send({"type": "http.response.body", "body": last + DONE})
        await asyncio.sleep(0)  # so too before the log and the metrics of its end
