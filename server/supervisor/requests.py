"""Requests of the API process that the engine answers: attestations, and changes of the quarantine by an operator."""

import asyncio
import threading
from collections.abc import Callable, Iterable
from typing import Generic, TypeVar

from server.protocol.messages import Attest, AttestationReport, ChangeQuarantine, QuarantineChanged

_ATTEST_TIMEOUT_S = 60.0  # a few batches, each behind a step; the profiler's first use may take seconds
_QUARANTINE_TIMEOUT_S = 30.0  # a change waits for the step under way

T = TypeVar("T")


class Replies(Generic[T]):
    """Futures of the answers that requests wait for, by the number of the request.

    The admin port asks from a thread of its own.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: dict[int, asyncio.Future[T | None]] = {}
        self._last = 0

    async def ask(self, send: Callable[[int], None], timeout_s: float) -> T | None:
        """Send a request under a new number. Return its answer, or None if the engine ends or the time is over."""
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
        """Answer the request of this number, or all requests. None: the engine that was asked has ended."""
        with self._lock:
            numbers = list(self._waiting) if number is None else [number]
            futures = [self._waiting.pop(each) for each in numbers if each in self._waiting]
        for future in futures:
            future.get_loop().call_soon_threadsafe(_settle, future, answer)


class AttestationRequests:
    """Requests for an attestation, to whichever engine runs, and its latest report."""

    def __init__(self, send: Callable[[Attest], None]) -> None:
        self._send = send
        self.latest: AttestationReport | None = None
        self._replies: Replies[AttestationReport] = Replies()

    async def ask(self, timeout_s: float = _ATTEST_TIMEOUT_S) -> AttestationReport | None:
        """Have forward passes profiled. Return None when no report comes in time."""
        return await self._replies.ask(lambda _: self._send(Attest()), timeout_s)

    def put(self, report: AttestationReport) -> None:
        """Answer every open request with a report."""
        self.latest = report
        self._replies.put(report)

    def give_up(self) -> None:
        """Answer every open request with None: the engine has ended."""
        self._replies.put(None)


class QuarantineRequests:
    """Changes of the quarantine by operators, kept across restarts of the engine but not of this process."""

    def __init__(self, send: Callable[[ChangeQuarantine], None]) -> None:
        self._send = send
        self.by_operator: list[tuple[str, str]] = []  # (path, shape) pairs, as the engine last confirmed them
        self._replies: Replies[QuarantineChanged] = Replies()

    async def ask(
        self,
        *,
        add: Iterable[tuple[str, str]] = (),
        lift: Iterable[tuple[str, str]] = (),
        timeout_s: float = _QUARANTINE_TIMEOUT_S,
    ) -> QuarantineChanged | None:
        """Quarantine (path, shape) pairs, or lift their quarantine. Return None when no answer comes in time."""
        added, lifted = list(add), list(lift)
        return await self._replies.ask(lambda number: self._send(ChangeQuarantine(number, added, lifted)), timeout_s)

    def put(self, answer: QuarantineChanged) -> None:
        """Answer the request that the engine has carried out or refused."""
        self.by_operator = answer.quarantined
        self._replies.put(answer, answer.request)

    def give_up(self) -> None:
        """Answer every open request with None: the engine has ended."""
        self._replies.put(None)


def _settle(future: "asyncio.Future[T | None]", answer: T | None) -> None:
    if not future.done():
        future.set_result(answer)
