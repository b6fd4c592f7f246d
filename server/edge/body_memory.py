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
    """One request's; `drop` may be called more than once."""

    def __init__(self, bodies: Bodies) -> None:
        self._bodies = bodies
        self._num_bytes = 0

    def grow(self, num_bytes: int) -> None:
        """More has come. Raises TooManyRequests when it does not fit; where there is no other body any fits."""
        bodies = self._bodies
        total = bodies.num_bytes + num_bytes
        if total > bodies.max_bytes and bodies.num_bytes > self._num_bytes:
            message = f"{total} bytes of requests would wait to be parsed, the limit is {bodies.max_bytes}."
            raise TooManyRequests(message, retry_after_s=_RETRY_AFTER_S)
        bodies.num_bytes = total
        self._num_bytes += num_bytes

    def drop(self) -> None:
        """Nobody needs its bytes any more."""
        self._bodies.num_bytes -= self._num_bytes
        self._num_bytes = 0


async def in_thread(body: bytes, work: Callable[[bytes], T]) -> T:
    """What `work` makes of a body, off the event loop. Where its client goes, a job without a thread yet lets go of it:
    it is not counted any more, but keeps its turn."""
    waiting = [body]
    del body
    try:
        return await asyncio.to_thread(lambda: work(waiting.pop()))
    finally:
        waiting.clear()
