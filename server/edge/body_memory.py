"""The memory that bodies of requests take together, from their first byte until they are parsed."""

import asyncio
from collections.abc import Callable
from typing import TypeVar

from server.errors import TooManyRequests

T = TypeVar("T")

_RETRY_AFTER_S = 1  # a body is parsed in a fraction of that


class Bodies:
    """Counts, exactly, the bytes of all bodies that arrive or wait to be parsed."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.num_bytes = 0


class Body:
    """One request's body, counted among all; `drop` may be called more than once."""

    def __init__(self, bodies: Bodies) -> None:
        self.num_bytes = 0
        self._bodies = bodies
        self._data: bytes | bytearray = b""

    def grow(self, num_bytes: int) -> None:
        """Count bytes that have come. Raises TooManyRequests when they do not fit; a body that is alone always does."""
        bodies = self._bodies
        total = bodies.num_bytes + num_bytes
        if total > bodies.max_bytes and bodies.num_bytes > self.num_bytes:
            message = f"{total} bytes of requests would wait to be parsed, the limit is {bodies.max_bytes}."
            raise TooManyRequests(message, retry_after_s=_RETRY_AFTER_S)
        bodies.num_bytes = total
        self.num_bytes += num_bytes

    def put(self, data: bytes | bytearray) -> None:
        """Hold the whole body."""
        self._data = data

    def take(self) -> bytes | bytearray:
        """The whole body, once: what is taken is held here no longer."""
        data, self._data = self._data, b""
        return data

    def drop(self) -> None:
        """Forget the body and stop counting it."""
        self._bodies.num_bytes -= self.num_bytes
        self.num_bytes = 0
        self._data = b""


async def in_thread(body: bytes | bytearray, work: Callable[[bytes | bytearray], T]) -> T:
    """Call `work` with a body off the event loop, and return its result.

    A call that is cancelled before it has a thread holds its body no longer, but keeps its turn.
    """
    waiting = [body]
    del body
    try:
        return await asyncio.to_thread(lambda: work(waiting.pop()))
    finally:
        waiting.clear()
