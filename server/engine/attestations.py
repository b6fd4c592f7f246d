"""The API process's side of attestation: the latest report, and those who wait for the next one."""

import asyncio
from collections.abc import Callable

from server.engine.messages import AttestationReport

_TIMEOUT_S = 60.0  # a few batches, each behind a step; the profiler's first use may take seconds


class Attestations:
    """Of one engine after the other."""

    def __init__(self, ask: Callable[[], None]) -> None:
        """`ask` sends the engine its request."""
        self._ask = ask
        self.latest: AttestationReport | None = None
        self._waiting: list[asyncio.Future[AttestationReport]] = []

    async def ask(self, timeout_s: float = _TIMEOUT_S) -> AttestationReport | None:
        """Have forward passes profiled. None when no report comes in time."""
        future: asyncio.Future[AttestationReport] = asyncio.get_running_loop().create_future()
        self._waiting.append(future)
        self._ask()
        try:
            return await asyncio.wait_for(future, timeout_s)
        except TimeoutError:
            return None

    def put(self, report: AttestationReport) -> None:
        """Give a report to all who wait."""
        self.latest = report
        waiting, self._waiting = self._waiting, []
        for future in waiting:
            if not future.done():
                future.set_result(report)
