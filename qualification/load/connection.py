"""One HTTP/1.1 connection that streams completions: a parser in C and a clock read, nothing else, for each read."""

import asyncio
import time
from collections.abc import Callable
from typing import Any, cast

import httptools
import msgspec

from qualification.load.events import EventReader, error_text
from qualification.load.sample import LoadRequest, Target

_MAX_ERROR_BYTES = 4096
Clock = Callable[[], float]


class Exchange:
    """One request and what its answer has been so far."""

    def __init__(self, payload: bytes, loop: asyncio.AbstractEventLoop) -> None:
        self.payload = payload
        self.sent_at = 0.0
        self.read_at: list[float] = []
        self.reader = EventReader()
        self.ended: asyncio.Future[None] = loop.create_future()
        self.error: str | None = None
        self.has_answer = False  # any byte of one
        self.status = 0
        self._refusal = b""

    def body(self, data: bytes, now: float) -> None:
        if self.status != 200:
            self._refusal = (self._refusal + data)[:_MAX_ERROR_BYTES]
        elif self.reader.feed(data) and (not self.read_at or self.read_at[-1] != now):
            self.read_at.append(now)  # a read that holds several events counts once

    def end(self, error: str | None = None) -> None:
        if self.ended.done():
            return
        self.error = error or self.reader.error
        if self.error is None and self.status != 200:
            self.error = f"HTTP {self.status}: {error_text(self._refusal)}"
        elif self.error is None and not self.read_at:
            self.error = "the answer held no token"
        self.ended.set_result(None)


class Connection(asyncio.Protocol):
    """Serves one exchange at a time. httptools calls the on_ methods."""

    def __init__(self, clock: Clock = time.monotonic) -> None:
        self.is_usable = False
        self.was_used = False
        self._clock = clock
        self._now = 0.0
        self._parser: Any = None
        self._exchange: Exchange | None = None

    def send(self, exchange: Exchange) -> None:
        self._parser = httptools.HttpResponseParser(self)
        self._exchange = exchange
        exchange.sent_at = self._clock()
        self._transport.write(exchange.payload)

    def close(self) -> None:
        self.is_usable = False
        self._transport.close()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is no subclass of it
        self.is_usable = True

    def connection_lost(self, exc: Exception | None) -> None:
        self.is_usable = False
        self._end(f"the connection was lost: {exc or 'closed by the server'}")

    def data_received(self, data: bytes) -> None:
        self._now = self._clock()
        if self._exchange is None:
            self.close()  # bytes that no request asked for
            return
        self._exchange.has_answer = True
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._end(f"the answer is no HTTP: {error}")
            self.close()

    def on_headers_complete(self) -> None:
        if self._exchange is not None:
            self._exchange.status = self._parser.get_status_code()

    def on_body(self, body: bytes) -> None:
        if self._exchange is not None:
            self._exchange.body(body, self._now)

    def on_message_complete(self) -> None:
        self.was_used = True
        if not self._parser.should_keep_alive():
            self.close()
        self._end(None)

    def _end(self, error: str | None) -> None:
        exchange, self._exchange = self._exchange, None
        if exchange is not None:
            exchange.end(error)


def payload_of(target: Target, request: LoadRequest) -> bytes:
    """The bytes of a whole HTTP request."""
    body = msgspec.json.encode(
        {
            "model": target.model,
            "prompt": request.token_ids,
            "max_tokens": request.max_tokens,
            "temperature": 0.0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
    )
    host = f"[{target.host}]" if ":" in target.host else target.host
    lines = [
        f"POST {target.path}/v1/completions HTTP/1.1",
        f"Host: {host}:{target.port}",
        "Content-Type: application/json",
        "Accept: text/event-stream",
        f"Content-Length: {len(body)}",
        *([] if target.bearer is None else [f"Authorization: Bearer {target.bearer}"]),
    ]
    return "\r\n".join([*lines, "", ""]).encode() + body
