"""JSON whose long lists are made while they are written, so that no answer is ever in memory whole.

A log probability takes 4 bytes as the engine sends it, some 75 as JSON and 300 as Python's objects: a request for those
of 75,000 tokens beside 20 likeliest each would take 0.6 GiB, and stop the event loop for as long as msgspec encodes it.
"""

import asyncio
from collections.abc import Callable, Iterable, Iterator
from itertools import chain, pairwise
from typing import Any

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

PIECE_BYTES = (
    16 * 1024
)  # some 220 log probabilities: made in 0.5 ms, or 7 where each names a new token, in which the loop waits
_MARK = b"\x00"  # stands for a lazy list; in JSON no such byte can be, strings escape it


class LazyList:  # no dataclass: msgspec would write its fields
    """A list in a JSON document, whose items are made when they are written."""

    __slots__ = ("items",)

    def __init__(self, items: Callable[[], Iterable[object]]) -> None:
        """`items` is called once for each time that the document is written."""
        self.items = items


def json_pieces(document: object, *, before: bytes = b"", behind: bytes = b"") -> Iterator[bytes]:
    """Yield the JSON of a document that may hold lazy lists, in pieces of some PIECE_BYTES; at least one piece.

    before, behind  what the first piece begins and the last one ends with; the document's own end is in the last, too
    """
    lists: list[LazyList] = []

    def marked(value: Any) -> msgspec.Raw:
        if not isinstance(value, LazyList):
            raise NotImplementedError(f"{type(value).__name__} has no JSON")
        lists.append(value)
        return msgspec.Raw(_MARK)

    first, *texts = msgspec.json.encode(document, enc_hook=marked).split(_MARK)
    piece = bytearray(before + first)
    for lazy, text in zip(lists, texts, strict=True):
        piece += b"["
        for index, item in enumerate(lazy.items()):
            if index:
                piece += b","
            piece += msgspec.json.encode(item)
            if len(piece) >= PIECE_BYTES:
                yield bytes(piece)
                piece.clear()
        piece += b"]" + text
    yield bytes(piece + behind)


async def send_pieces(send: Send, pieces: Iterable[bytes], *, more_body: bool) -> None:
    """Send pieces of a body while they are made; `more_body`: others come behind them."""
    for piece, behind in pairwise(chain(pieces, (None,))):
        assert piece is not None
        await send({"type": "http.response.body", "body": piece, "more_body": more_body or behind is not None})
        if behind is not None:
            await asyncio.sleep(0)  # a client that reads at once would keep all others from the event loop


class JsonInPieces(Response):
    """A JSON body that is written while it is made: its length is not known before."""

    def __init__(self, pieces: Iterable[bytes]) -> None:
        self.background = None  # Response's other attributes are about bodies of a known length
        self._pieces = pieces

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG002 -- the guard watches
        headers = [(b"content-type", b"application/json")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send_pieces(send, self._pieces, more_body=False)


def json_response(body: bytes | Iterator[bytes]) -> Response:
    """Respond with JSON, which may come in pieces."""
    if not isinstance(body, bytes):
        pieces = body
        body, second = next(pieces), next(pieces, None)
        if second is not None:
            return JsonInPieces(chain((body, second), pieces))
    return Response(body, media_type="application/json")
