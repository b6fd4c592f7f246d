"""An answer of one prompt that is written while it comes, as server-sent events of any protocol."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Mapping
from typing import Any, Protocol

import msgspec
from fastapi import Request
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from server.edge.context import send_of
from server.http.common.json_pieces import send_pieces
from server.http.common.provenance import Provenance, json_response, with_provenance
from server.http.generation.admitted import Admitted
from server.http.generation.pieces import Piece

_HEADERS = [
    (b"cache-control", b"no-store"),
    (b"x-accel-buffering", b"no"),
    (b"content-type", b"text/event-stream; charset=utf-8"),
]
HEAD: Message = {"type": "http.response.start", "status": 200, "headers": _HEADERS}


class AnswerShape(Protocol):
    def opening(self) -> bytes:
        """Events before the first piece."""

    def event(self, piece: Piece) -> bytes:
        """The events of a piece; may be empty."""

    def closing(self) -> bytes:
        """Events behind the last piece."""

    def whole(self, pieces: Iterable[Piece]) -> bytes:
        """The body of an answer that is no stream."""


class AnswerStream(Response):
    """Writes pieces as events while they come. A slow client holds up its own reading only."""

    def __init__(
        self,
        shape: AnswerShape,
        first: Piece,
        rest: AsyncGenerator[Piece],
        *,
        provenance: Callable[[], Provenance] | None,
    ) -> None:
        """first       has come already, so that what fails before it gets a status of its own
        provenance  is called at the end, for the last event"""
        self.background = None  # Response's other attributes are about bodies of a known length
        self._shape = shape
        self._first = first
        self._rest = rest
        self._provenance = provenance

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG002 -- the guard watches
        shape = self._shape
        send = send_of(scope)  # past two frames of the framework for each event
        await send(HEAD)
        body = shape.opening() + shape.event(self._first)
        await send({"type": "http.response.body", "body": body, "more_body": True})
        await write_rest(send, self._rest, shape.event, self._last)

    def _last(self) -> bytes:
        last = self._shape.closing()
        return last if self._provenance is None else with_provenance(last, self._provenance())


async def send_events(send: Send, events: bytes | Iterator[bytes]) -> None:
    """Send events, whole or in pieces, of a stream that goes on; nothing for none."""
    if not isinstance(events, bytes):
        await send_pieces(send, events, more_body=True)
    elif events:
        await send({"type": "http.response.body", "body": events, "more_body": True})


async def write_rest(
    send: Send,
    rest: AsyncGenerator[Piece],
    events_of: Callable[[Piece], bytes | Iterator[bytes]],
    last: Callable[[], bytes],
) -> None:
    """Write the events of all pieces behind the first, and those of the end."""
    await asyncio.sleep(0)  # the loop writes when this task pauses, so before what is left to do for a first token
    async for piece in rest:
        await send_events(send, events_of(piece))
    await send({"type": "http.response.body", "body": last()})
    await asyncio.sleep(0)  # so too before the log and the metrics of its end


async def answered(request: Request, it: Admitted[Any], shape: AnswerShape, *, names_kernels: bool) -> Response:
    """Answer an admitted request of one prompt, whole or as a stream.

    names_kernels  whether its body asks for the kernels that serve it
    """
    provenance = it.provenance(request.scope, names_kernels)
    answer = it.answer()
    if it.prepared.is_stream:
        return AnswerStream(shape, await anext(answer), answer, provenance=provenance)
    body = shape.whole([piece async for piece in answer])
    return json_response(body, provenance)


def named_event(event: Mapping[str, Any]) -> bytes:
    """A server-sent event that is named by the `type` of its data."""
    return b"event: %b\ndata: %b\n\n" % (event["type"].encode(), msgspec.json.encode(event))
