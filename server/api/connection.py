"""One HTTP/1.1 connection: uvicorn's protocol with what it lacks, limits on headers and on silence."""

import asyncio

import httptools
import msgspec
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from server.api.context import attach_writer
from server.api.guard import MAX_HEADER_BYTES

HEADER_TIMEOUT_S = 10.0
MAX_WAITING = 4  # requests of a connection behind the one that is answered, until which it is read on


class ChunkWriter:
    """Chunks of a response that uvicorn has begun: of unknown length, hence chunked."""

    def __init__(self, transport: asyncio.Transport, flow: FlowControl) -> None:
        self._transport = transport
        self._flow = flow

    def has_room(self) -> bool:
        return not self._flow.write_paused

    def write(self, body: bytes) -> None:
        if not self._transport.is_closing():
            self._transport.write(b"%x\r\n%b\r\n" % (len(body), body))

    def hang_up(self) -> None:
        self._transport.abort()


class LimitedProtocol(HttpToolsProtocol):
    """Closes connections that send no request, never end its headers, or never end a body that nobody waits for."""

    _timer: asyncio.TimerHandle | None = None
    _num_header_bytes = 0
    _is_in_headers = False
    _is_repeated = False  # the head that is parsed now was parsed before
    _unanswered: tuple[RequestResponseCycle, ...] = ()  # of this connection

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._start_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        for cycle in self._unanswered:  # uvicorn tells the latest alone: the others would compute on, for nobody
            cycle.disconnected = True
            cycle.message_event.set()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self._unset_keepalive_if_required()
        try:
            self._parse(data)
        except httptools.HttpParserError:
            self.send_400_response("This is not HTTP/1.1.")
            return
        if self._is_in_headers:
            if self._timer is None:
                self._start_timer()
            self._num_header_bytes += len(data)
            if self._num_header_bytes > MAX_HEADER_BYTES:
                self._refuse(b"431 Request Header Fields Too Large", "headers_too_large", "The headers are too large.")

    def _parse(self, data: bytes | memoryview) -> None:
        while True:
            try:
                self.parser.feed_data(data)
            except httptools.HttpParserUpgrade as offer:  # a read may hold a thousand of them
                data = memoryview(data)[offer.args[0] :]
                self._decline()
            else:
                return

    def _decline(self) -> None:
        """Go on with HTTP/1.1 where the client offers another protocol, as Java's does with its first request: the
        parser stops behind the headers, but what is left begins with the body. A new one is told how that is framed."""
        framing = [it for it in self.cycle.scope["headers"] if it[0] in (b"content-length", b"transfer-encoding")]
        head = b"".join(b"%b: %b\r\n" % it for it in framing)
        self.parser = httptools.HttpRequestParser(self)
        self._is_repeated = True
        self.parser.feed_data(b"POST / HTTP/1.1\r\n" + head + b"\r\n")

    def on_message_begin(self) -> None:
        self._is_in_headers = True
        self._num_header_bytes = 0
        self._stop_timer()  # started again where the headers do not end in the same read
        super().on_message_begin()
        attach_writer(self.scope, ChunkWriter(self.transport, self.flow))

    def on_headers_complete(self) -> None:
        self._is_in_headers = False
        self._stop_timer()
        if not self._is_repeated:
            super().on_headers_complete()
            self._unanswered = tuple([it for it in (*self._unanswered, self.cycle) if not it.response_complete])
            if 1 < len(self._unanswered) <= 1 + MAX_WAITING:
                self.flow.resume_reading()  # uvicorn pauses it, and would not see that the client has gone
        self._is_repeated = False

    def on_message_complete(self) -> None:
        if self.parser.should_upgrade():
            return  # only its headers
        self._stop_timer()
        super().on_message_complete()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.cycle.more_body and not self.transport.is_closing():  # it was refused by its headers
            self._start_timer()

    def send_400_response(self, msg: str) -> None:
        self._refuse(b"400 Bad Request", "invalid_http", msg)

    def _refuse(self, status: bytes, code: str, message: str) -> None:
        cycle = self.cycle
        if self.pipeline or (cycle is not None and cycle.response_started and not cycle.response_complete):
            self.transport.close()  # in the middle of an answer there is nowhere to say why
            return
        error = {"message": message, "type": "invalid_request_error", "param": None, "code": code}
        body = msgspec.json.encode({"error": error})
        head = b"HTTP/1.1 %b\r\ncontent-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n"
        self.transport.write(head % (status, len(body)) + body)
        self.transport.close()

    def _start_timer(self) -> None:
        self._stop_timer()
        self._timer = self.loop.call_later(HEADER_TIMEOUT_S, self._expire)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _expire(self) -> None:
        if self.cycle is not None and not self.cycle.response_complete:
            self._start_timer()  # a pipelined request dawdles while the one before it is still being answered
        else:
            self.transport.close()
