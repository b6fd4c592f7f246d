"""One HTTP/1.1 connection: uvicorn's protocol with limits on headers, trailers, silence and pipelined requests."""

import asyncio
import socket
import sys
from typing import Any

import httptools
import msgspec
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from server.edge.direct_stream import ChunkWriter, attach_writer, writer_of
from server.edge.headers import MAX_HEADER_BYTES, MAX_HEADERS
from server.errors import HeadersTooLarge, InvalidHttp

HEADER_TIMEOUT_S = 10.0
MAX_WAITING = 4  # pipelined requests behind the one that is being answered; more are not parsed yet
# The bytes of a request that are not body (headers, chunk sizes and extensions, trailers) may be MAX_HEADER_BYTES and,
# for chunk sizes, one more for each of so many bytes of body: a large body may have chunks of 48 bytes.
BODY_BYTES_PER_EXTRA = 8
PART_BYTES = 4096  # are parsed before the limits are looked at: some 100 requests, about a millisecond
TURN_BYTES = 8192  # are parsed before other connections have their turn
# How soon, and how often, a client that has closed its side is looked for; most answers are there before.
HALF_CLOSED_CHECK_S = 0.1


class InputFlow(FlowControl):
    """Flow control that reads nothing while bytes wait to be parsed, whatever uvicorn asks for."""

    def __init__(self, transport: asyncio.Transport) -> None:
        super().__init__(transport)
        self._is_held = False
        self._is_paused = False  # by uvicorn

    def pause_reading(self) -> None:
        self._is_paused = True
        super().pause_reading()

    def resume_reading(self) -> None:
        self._is_paused = False
        if not self._is_held:
            super().resume_reading()

    def hold_reading(self, is_held: bool) -> None:
        self._is_held = is_held
        if is_held:
            super().pause_reading()
        elif not self._is_paused:
            super().resume_reading()


def _answer_without_chunks(cycle: RequestResponseCycle) -> None:
    """Let a body of unknown length end with the connection: a client of HTTP/1.0 would take the sizes of chunks for
    text (RFC 9112, 6.1 and 6.3), and uvicorn sends them to each."""
    send_framed = cycle.send
    is_without_length = False

    async def send(message: Any) -> None:
        nonlocal is_without_length
        if message["type"] == "http.response.start":
            is_without_length = all(name != b"content-length" for name, _ in message.get("headers", ()))
            if is_without_length:
                cycle.chunked_encoding = False
                cycle.expected_content_length = sys.maxsize
        elif is_without_length and message["type"] == "http.response.body" and not message.get("more_body", False):
            cycle.expected_content_length = len(message.get("body", b""))
        await send_framed(message)

    cycle.send = send  # type: ignore[method-assign]
    writer = writer_of(cycle.scope)
    if writer is not None:
        writer.has_chunks = False


class LimitedProtocol(HttpToolsProtocol):
    """Serve one connection within limits.

    Refuses requests with too many bytes beside their body, and drops trailers. Closes connections that send no request,
    never end its headers, or never end the body of a request that is answered already. Answers a client that has closed
    its side of the connection after its requests.
    """

    flow: InputFlow
    header_timeout_s = HEADER_TIMEOUT_S
    _input = memoryview(b"")  # read and not parsed; while there is any, nothing is read
    _timer: asyncio.TimerHandle | None = None
    _check: asyncio.TimerHandle | None = None  # of a client that has closed its side
    _is_in_message = False  # a request has begun and not ended
    _is_in_headers = False
    _is_repeated = False  # the head that is parsed now was parsed before
    _is_turn_due = False  # the rest of the input is parsed soon
    _has_ended = False  # the client has closed its side: nothing more will come
    _len_part = 0  # of the input that is being parsed
    _is_part_shared = False  # by more than one request
    _num_fields = 0  # headers and trailers of the request that is being read
    _num_body_bytes = 0  # of the same request
    _num_other_bytes = 0  # of the same request; too low where it shares a part with the request before
    _unanswered: tuple[RequestResponseCycle, ...] = ()  # of this connection

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.flow = InputFlow(transport)
        self._start_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        self._input = memoryview(b"")
        if self._check is not None:
            self._check.cancel()
        for cycle in self._unanswered:  # uvicorn notifies the latest only; the others would compute on without a reader
            cycle.disconnected = True
            cycle.message_event.set()
            writer = writer_of(cycle.scope)
            if writer is not None:
                writer.connection_lost()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        assert not self._input  # reading is held while there is any
        self._input = memoryview(data)
        self._parse_input()

    def eof_received(self) -> bool:  # type: ignore[override]
        """Keep the connection while whole requests are not answered. No input is left: with some, nothing is read.

        Under TLS a client's end is both sides': asyncio closes the connection whatever is returned.
        """
        if self.scheme == "https" or not self._is_owed():
            return False
        if not self._has_ended:
            self._has_ended = True
            self._check = self.loop.call_later(HALF_CLOSED_CHECK_S, self._probe_client)
        return True

    def _parse_input(self) -> None:
        """Parse input until none is left, too many requests are unanswered, or TURN_BYTES are parsed."""
        self._is_turn_due = False
        self._unset_keepalive_if_required()
        num_left = TURN_BYTES
        while self._input and num_left > 0 and not self.transport.is_closing() and not self._is_full():
            part, self._input = self._input[:PART_BYTES], self._input[PART_BYTES:]
            num_left -= len(part)
            self._parse_part(part)
        if self.transport.is_closing():
            self._input = memoryview(b"")
            return
        if self._input and not self._is_full():
            self._is_turn_due = True
            self.loop.call_soon(self._parse_input)
        self.flow.hold_reading(bool(self._input))

    def _is_full(self) -> bool:
        return sum([not cycle.response_complete for cycle in self._unanswered]) > 1 + MAX_WAITING

    def _is_owed(self) -> bool:
        """Return whether a whole request is not answered yet, and none misses a part of its body."""
        return any(not cycle.response_complete for cycle in self._unanswered) and not self.cycle.more_body

    def _parse_part(self, part: memoryview) -> None:
        self._len_part, self._is_part_shared = len(part), self._is_in_message
        try:
            self._parse(part)
        except httptools.HttpParserError:
            self.send_400_response("This is not HTTP/1.1.")
            return
        if not self._is_in_message:
            return
        self._num_other_bytes = max(0, self._num_other_bytes + len(part))
        if self._is_in_headers and self._timer is None:
            self._start_timer()
        limit = MAX_HEADER_BYTES + self._num_body_bytes // BODY_BYTES_PER_EXTRA
        if self._num_other_bytes > limit or self._num_fields > MAX_HEADERS:
            message = (
                f"A request's headers, chunk sizes and trailers may have {limit} bytes ({MAX_HEADER_BYTES}, and one "
                f"for each {BODY_BYTES_PER_EXTRA} of its body) in {MAX_HEADERS} fields, they have at least "
                f"{self._num_other_bytes} in {self._num_fields}."
            )
            self._refuse(b"431 Request Header Fields Too Large", HeadersTooLarge.code, message)

    def _parse(self, data: memoryview) -> None:
        while True:
            try:
                self.parser.feed_data(data)
            except httptools.HttpParserUpgrade as offer:  # a read may hold a thousand of them
                data = data[offer.args[0] :]
                self._decline()
            else:
                return

    def _decline(self) -> None:
        """Go on with HTTP/1.1 where the client offers another protocol, as Java's does with its first request: the
        parser stops behind the headers, but what is left begins with the body. A new parser is given its framing."""
        framing = [it for it in self.cycle.scope["headers"] if it[0] in (b"content-length", b"transfer-encoding")]
        head = b"".join(b"%b: %b\r\n" % it for it in framing)
        self.parser = httptools.HttpRequestParser(self)
        self._is_repeated = True
        self.parser.feed_data(b"POST / HTTP/1.1\r\n" + head + b"\r\n")

    def on_message_begin(self) -> None:
        self._is_in_message = self._is_in_headers = True
        self._num_fields = self._num_body_bytes = 0
        # How much of a part belongs to a request that begins within it, the parser does not say: it is not counted.
        self._num_other_bytes = -self._len_part if self._is_part_shared else 0
        self._is_part_shared = True
        self._stop_timer()  # started again where the headers do not end in the same part
        super().on_message_begin()
        attach_writer(self.scope, ChunkWriter(self.transport, self.flow))

    def on_header(self, name: bytes, value: bytes) -> None:
        self._num_fields += 1
        if self._is_in_headers:  # a trailer must not pass for a header (RFC 9110, 6.5.1), and nothing here needs one
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._is_in_headers = False
        self._stop_timer()
        if not self._is_repeated:
            super().on_headers_complete()
            if self.scope["http_version"] == "1.0":
                _answer_without_chunks(self.cycle)
            self._unanswered = tuple([it for it in (*self._unanswered, self.cycle) if not it.response_complete])
            if 1 < len(self._unanswered) <= 1 + MAX_WAITING:
                self.flow.resume_reading()  # uvicorn pauses it, and would not see that the client has gone
        self._is_repeated = False

    def on_body(self, body: bytes) -> None:
        self._num_body_bytes += len(body)
        self._num_other_bytes -= len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        if self.parser.should_upgrade():
            return  # only its headers
        self._is_in_message = False
        self._stop_timer()
        super().on_message_complete()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.transport.is_closing():
            return
        if self.cycle.more_body:  # it was refused by its headers
            self._start_timer()
        if self._input and not self._is_turn_due:
            self._is_turn_due = True
            self.loop.call_soon(self._parse_input)
        if self._has_ended and not self._is_owed():
            self.transport.close()

    def send_400_response(self, msg: str) -> None:
        self._refuse(b"400 Bad Request", InvalidHttp.code, msg)

    def _refuse(self, status: bytes, code: str, message: str) -> None:
        cycle = self.cycle
        is_answered = self._is_in_message and not self._is_in_headers and cycle.response_complete
        if is_answered or self.pipeline or (cycle and cycle.response_started and not cycle.response_complete):
            self.transport.close()  # in the middle of an answer, or behind it, there is nowhere to say why
            return
        error = {"message": message, "type": "invalid_request_error", "param": None, "code": code}
        body = msgspec.json.encode({"error": error})
        head = b"HTTP/1.1 %b\r\ncontent-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n"
        self.transport.write(head % (status, len(body)) + body)
        self.transport.close()

    def _probe_client(self) -> None:
        """Send "100 Continue" to a client that has closed its side: if its program has ended, its system resets the
        connection. Clients ignore it before an answer (RFC 9110, 15.2); once that has begun, its bytes do the same."""
        waiting = [cycle for cycle in self._unanswered if not cycle.response_complete]
        if waiting and not waiting[0].response_started and waiting[0].scope["http_version"] == "1.1":
            self.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        self._check_client()

    def _check_client(self) -> None:
        if self.transport.get_extra_info("socket").getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            self.transport.abort()
        else:
            self._check = self.loop.call_later(HALF_CLOSED_CHECK_S, self._check_client)

    def _start_timer(self) -> None:
        self._stop_timer()
        self._timer = self.loop.call_later(self.header_timeout_s, self._expire)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _expire(self) -> None:
        if self.cycle is not None and not self.cycle.response_complete:
            self._start_timer()  # a pipelined request dawdles while the one before it is still being answered
        else:
            self.transport.close()
