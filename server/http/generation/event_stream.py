"""An answer in the form of any protocol: whole, or as server-sent events that are written while it comes."""

import asyncio
from collections.abc import AsyncGenerator, Iterator, Mapping
from typing import Any, Protocol

import msgspec
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from server.edge.context import send_of
from server.edge.direct_stream import DirectStream
from server.http.common.json_pieces import json_response, send_pieces
from server.http.generation.admitted import Admitted
from server.http.generation.answer import answer_of
from server.http.generation.pieces import Piece

_HEADERS = [
    (b"cache-control", b"no-store"),
    (b"x-accel-buffering", b"no"),
    (b"content-type", b"text/event-stream; charset=utf-8"),
]
HEAD: Message = {"type": "http.response.start", "status": 200, "headers": _HEADERS}


Events = bytes | Iterator[bytes]  # in pieces where an event may be long: it has the details of a prompt


class AnswerShape(Protocol):
    """An answer in the form of a protocol, whole or streamed; it names the kernels where they are asked for."""

    def opening(self, first: Piece) -> Events:
        """Events that a stream begins with, those of its first piece among them."""

    def event(self, piece: Piece) -> Events:
        """The events of a piece; may be empty."""

    def closing(self) -> bytes:
        """Events behind the last piece."""

    def take(self, piece: Piece) -> None:
        """Add a piece to an answer that is no stream."""

    def whole(self) -> Events:
        """The body of an answer that is no stream, behind its last piece."""


class EventStream(Response):
    """Writes pieces as events while they come. A slow client holds up its own reading only: the engine's tokens of
    the meantime are merged into the next piece, hence into one write."""

    def __init__(
        self, shape: AnswerShape, first: Piece, rest: AsyncGenerator[Piece], direct: DirectStream | None
    ) -> None:
        """first, rest  the pieces that did not go to the `direct` stream; the first has come already, so that what
        fails before it gets a status of its own"""
        self.background = None  # Response's other attributes are about bodies of a known length
        self._shape = shape
        self._first = first
        self._rest = rest
        self._direct = direct

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG002 -- the guard watches
        shape, direct = self._shape, self._direct
        send = send_of(scope)  # past two frames of the framework for each event
        if direct is not None and direct.is_open:
            events = shape.event(self._first)
        else:
            await send(HEAD)
            events = shape.opening(self._first)
        await _send_events(send, events)
        if direct is not None:
            direct.is_open = True
        await asyncio.sleep(0)  # the loop writes when this task pauses, so before what is left to do for a first token
        async for piece in self._rest:
            await _send_events(send, shape.event(piece))
        await send({"type": "http.response.body", "body": shape.closing()})
        await asyncio.sleep(0)  # so too before the log and the metrics of its end


async def _send_events(send: Send, events: Events) -> None:
    """Send events, whole or in pieces, of a stream that goes on; nothing for none."""
    if not isinstance(events, bytes):
        await send_pieces(send, events, more_body=True)
    elif events:
        await send({"type": "http.response.body", "body": events, "more_body": True})


async def answered(it: Admitted[Any], shape: AnswerShape, direct: DirectStream | None = None) -> Response:
    """Answer an admitted request, whole or as a stream. `direct`: as `answer_of` takes it."""
    answer = answer_of(it, direct)
    if it.prepared.is_stream:
        return EventStream(shape, await anext(answer), answer, direct)
    async for piece in answer:
        shape.take(piece)
    return json_response(shape.whole())


def named_event(event: Mapping[str, Any]) -> bytes:
    """A server-sent event that is named by the `type` of its data."""
    return b"event: %b\ndata: %b\n\n" % (event["type"].encode(), msgspec.json.encode(event))
