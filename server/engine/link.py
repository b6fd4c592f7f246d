"""The engine's end of the socket, read and written by the thread that steps.

A thread of its own for each direction had to be woken for each message, and to get the interpreter's lock: a request
came 0.1 ms later to its step, and a token 0.1 ms later to the socket.
"""

import contextlib
import logging
import queue
import select
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Protocol

from server.protocol import wire
from server.protocol.messages import FromEngine, ToEngine

logger = logging.getLogger(__name__)

EXIT_PROTOCOL = 76  # EX_PROTOCOL
_READ_BYTES = 256 * 1024


class Inbox(Protocol):
    """Source of messages: a `Link`, or a `queue.SimpleQueue`."""

    def get(self, block: bool = True, timeout: float | None = None) -> ToEngine:
        """The next message. Raises queue.Empty when none is there in `timeout` seconds, or at once if not `block`."""


class Link:
    """Messages to and from the API process over a non-blocking socket.

    Any thread may call `put`, one thread the rest. Bytes that the socket does not take go out with a later call.
    """

    def __init__(self, connection: socket.socket, leave: Callable[[int], None]) -> None:
        """`leave` ends the process with a status, when the API process has gone or sent what no message is."""
        connection.setblocking(False)
        self._connection = connection
        self._leave = leave
        self._poll = select.poll()
        self._messages: deque[ToEngine] = deque()
        self._frames = wire.Frames()
        self._lock = threading.Lock()  # guards the unsent bytes
        self._unsent = bytearray()
        self._is_drained = False  # by the latest read: the next look may do without one

    def get(self, block: bool = True, timeout: float | None = None) -> ToEngine:
        """The next message. Raises queue.Empty when none is there in `timeout` seconds, or at once if not `block`."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while not self._messages:
            if self._is_drained and not block:
                self._is_drained = False
                raise queue.Empty
            self._flush()
            self._read()
            if self._messages:
                break
            left_s = None if deadline is None else deadline - time.monotonic()
            if not block or (left_s is not None and left_s <= 0):
                raise queue.Empty
            self._wait(left_s)
        return self._messages.popleft()

    def put(self, message: FromEngine) -> None:
        """Send a message, after all earlier ones."""
        frame = wire.frame(message)
        with self._lock:
            if self._unsent:
                self._unsent += frame
            elif (num_sent := self._send(frame)) < len(frame):
                self._unsent += frame[num_sent:]

    def close(self, timeout_s: float = 2.0) -> None:
        """Send the unsent bytes."""
        self._connection.settimeout(timeout_s)
        with self._lock, contextlib.suppress(OSError):
            self._connection.sendall(self._unsent)

    def _flush(self) -> None:
        if self._unsent:
            with self._lock:
                del self._unsent[: self._send(self._unsent)]

    def _send(self, data: bytes | bytearray) -> int:
        """Send and return how many bytes are done with."""
        try:
            return self._connection.send(data)
        except BlockingIOError:
            return 0
        except OSError:  # the API process is gone; `get` sees it too and ends this one
            return len(data)

    def _read(self) -> None:
        """Read the bytes that have arrived."""
        try:
            data = self._connection.recv(_READ_BYTES)
            self._is_drained = len(data) < _READ_BYTES
            self._messages.extend(map(wire.to_engine, self._frames.feed(data)))
        except BlockingIOError:
            return
        except wire.WireError as error:
            logger.critical("the API process broke the protocol: %s", error)
            self._leave(EXIT_PROTOCOL)
            return
        except OSError as error:
            logger.warning("the connection to the API process broke: %s", error)
            data = b""
        if not data:
            self._leave(0)

    def _wait(self, timeout_s: float | None) -> None:
        """Wait until there is something to read, or room for unsent bytes."""
        events = select.POLLIN | (select.POLLOUT if self._unsent else 0)
        self._poll.register(self._connection, events)
        self._poll.poll(None if timeout_s is None else timeout_s * 1000)
