"""The API process's end of the socket: each message is handled where its bytes are read, in one turn of the loop."""

import asyncio
import logging
import os
from collections import deque
from collections.abc import Callable
from typing import cast

from server.protocol import wire
from server.protocol.liveness import DeathCause
from server.protocol.messages import EngineFailed, FromEngine, ToEngine

logger = logging.getLogger(__name__)

_HANDLED_AT_ONCE = 16


class EngineConnection(asyncio.Protocol):
    """Connection to an engine process. `ended` has the cause to end the process, or None where it ended of itself.

    A few messages that were read together are handled before any task runs: when this process lags behind,
    streams find their tokens merged. Between more of them their readers get their turn, for they must keep up.
    """

    def __init__(self, handle: Callable[[FromEngine], None], connected: "asyncio.Future[EngineConnection]") -> None:
        """`connected` is called when the process has connected."""
        self._loop = asyncio.get_running_loop()
        self.ended: asyncio.Future[DeathCause | None] = self._loop.create_future()
        self._handle = handle
        self._connected = connected
        self._frames = wire.Frames()
        self._bodies: deque[bytes] = deque()  # not handled yet
        self._has_failed = False
        self._transport: asyncio.Transport | None = None
        self._file = -1

    @property
    def is_behind(self) -> bool:
        """Return whether more messages have been read than handled."""
        return bool(self._bodies)

    def send(self, message: ToEngine) -> None:
        """Now, as far as the socket takes it: a transport writes when all that is ready to run has run."""
        transport = self._transport
        if transport is None or transport.is_closing():
            return
        frame = wire.frame(message)
        if not transport.get_write_buffer_size():
            try:
                frame = frame[os.write(self._file, frame) :]
            except BlockingIOError:
                pass
            except OSError:
                return  # it is gone, which `connection_lost` is about to hear
        if frame:
            transport.write(frame)

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is no subclass of it
        self._file = transport.get_extra_info("socket").fileno()
        if self._connected.done():
            self._transport.abort()  # there is one engine
        else:
            self._connected.set_result(self)

    def data_received(self, data: bytes) -> None:
        if self.ended.done():
            return
        is_handling = bool(self._bodies)
        try:
            self._bodies += self._frames.feed(data)
        except wire.WireError as error:
            self._handle_all()
            self._break(error)
        if not is_handling:
            self._handle_some()

    def _handle_some(self) -> None:
        try:
            for _ in range(min(_HANDLED_AT_ONCE, len(self._bodies))):
                message = wire.from_engine(self._bodies.popleft())
                self._has_failed |= isinstance(message, EngineFailed)
                self._handle(message)
        except wire.WireError as error:
            self._break(error)
        except Exception as error:  # ours, not the engine's: its supervisor must hear of it
            self._end_with(error)
        if self._bodies:
            self._loop.call_soon(self._handle_some)

    def _handle_all(self) -> None:
        """Handle the messages that an ended process has sent."""
        while self._bodies:
            self._handle_some()

    def _break(self, error: wire.WireError) -> None:
        logger.error("engine broke the protocol: %s", error)
        self._end_with(DeathCause.PROTOCOL)

    def _end_with(self, why: DeathCause | Exception | None) -> None:
        self._bodies.clear()
        if self.ended.done():
            return
        if isinstance(why, Exception):
            self.ended.set_exception(why)
        else:
            self.ended.set_result(why)

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 -- asyncio's signature
        self._handle_all()
        self._end_with(DeathCause.DEVICE if self._has_failed else None)
