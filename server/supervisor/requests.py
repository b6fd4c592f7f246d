"""Those who wait in the API process for an answer of the engine, from whichever thread's event loop they ask."""

import asyncio
import threading
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class Replies(Generic[T]):
    """Waiters by a number that names the answer they wait for; the admin port asks from a thread of its own."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: dict[int, asyncio.Future[T | None]] = {}
        self._last = 0

    async def ask(self, send: Callable[[int], None], timeout_s: float) -> T | None:
        """`send` a question under a new number; its answer, or None when none comes in time, or none can come."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T | None] = loop.create_future()
        with self._lock:
            self._last += 1
            number = self._last
            self._waiting[number] = future
        try:
            send(number)
            return await asyncio.wait_for(future, timeout_s)
        except TimeoutError:
            return None
        finally:
            with self._lock:
                self._waiting.pop(number, None)

    def put(self, answer: T | None, number: int | None = None) -> None:
        """Give an answer to who waits for this number, or to all. None: the engine that was asked is gone."""
        with self._lock:
            numbers = list(self._waiting) if number is None else [number]
            futures = [self._waiting.pop(each) for each in numbers if each in self._waiting]
        for future in futures:
            future.get_loop().call_soon_threadsafe(_settle, future, answer)


def _settle(future: "asyncio.Future[T | None]", answer: T | None) -> None:
    if not future.done():
        future.set_result(answer)
