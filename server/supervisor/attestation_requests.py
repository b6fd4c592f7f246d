"""The API process's side of attestation: the latest report, and those who wait for the next one."""

from collections.abc import Callable

from server.protocol.messages import AttestationReport
from server.supervisor.requests import Replies

_TIMEOUT_S = 60.0  # a few batches, each behind a step; the profiler's first use may take seconds


class Attestations:
    """Of one engine after the other."""

    def __init__(self, ask: Callable[[], None]) -> None:
        """`ask` sends the engine its request."""
        self._ask = ask
        self.latest: AttestationReport | None = None
        self._replies: Replies[AttestationReport] = Replies()

    async def ask(self, timeout_s: float = _TIMEOUT_S) -> AttestationReport | None:
        """Have forward passes profiled. None when no report comes in time."""
        return await self._replies.ask(lambda _: self._ask(), timeout_s)

    def put(self, report: AttestationReport) -> None:
        """Give a report to all who wait."""
        self.latest = report
        self._replies.put(report)

    def give_up(self) -> None:
        """The engine is gone: who waits for its report gets none."""
        self._replies.put(None)
