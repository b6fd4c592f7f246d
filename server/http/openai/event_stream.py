"""An answer that is written while it comes, as server-sent events."""

from collections.abc import AsyncGenerator, Callable
from itertools import chain

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from server.edge.context import send_of
from server.edge.direct_stream import DirectStream
from server.http.common.provenance import Provenance, named_pieces, with_provenance
from server.http.generation.event_stream import HEAD, send_events, write_rest
from server.http.generation.pieces import Piece
from server.http.openai.answers import DONE, AnswerFormat, Events, Usage


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
        provenance: Callable[[], Provenance] | None = None,
    ) -> None:
        """first, rest  the pieces that did not go to the `direct` stream
        usage        is called at the end, for an event of its own
        provenance   is called at the end, for the last chunk"""
        self.background = None  # Response's other attributes are about bodies of a known length
        self._shape = shape
        self._first = first
        self._rest = rest
        self._direct = direct
        self._num_choices = num_choices
        self._usage = usage
        self._provenance = provenance
        self._num_open = num_choices

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG002 -- the guard watches
        shape = self._shape
        send = send_of(scope)  # past two frames of the framework for each event
        if self._direct is not None and self._direct.is_open:
            events = self._events(self._first, shape.event(self._first))
        else:
            await send(HEAD)
            opening, events = shape.opening(self._num_choices), self._events(self._first, shape.opened(self._first))
            events = opening + events if isinstance(events, bytes) else chain((opening,), events)
        await send_events(send, events)
        if self._direct is not None:
            self._direct.is_open = True
        await write_rest(send, self._rest, lambda piece: self._events(piece, shape.event(piece)), self._last)

    def _last(self) -> bytes:
        usage = b"" if self._usage is None else self._named(self._shape.usage_event(self._usage()))
        return usage + DONE

    def _events(self, piece: Piece, events: Events) -> Events:
        """The events of a piece; those of the last end with the stream's last chunk, but for one with the usage."""
        if piece.finish_reason is None:
            return events
        self._num_open -= 1
        if self._num_open or self._usage is not None:
            return events
        return self._named(events) if isinstance(events, bytes) else named_pieces(events, self._provenance)

    def _named(self, events: bytes) -> bytes:
        return events if self._provenance is None else with_provenance(events, self._provenance())
