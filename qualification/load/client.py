"""Sends a trace to one server on time, from one event loop, and says how late it was itself."""

import asyncio
import gc
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, TypeVar

from qualification.load.connection import Connection, Exchange, payload_of
from qualification.load.sample import ClientLag, LoadRequest, LoadResult, Sample, Target

try:
    import uvloop
except ImportError:  # there is none for Windows
    new_event_loop: Callable[[], asyncio.AbstractEventLoop] = asyncio.new_event_loop
else:
    new_event_loop = uvloop.new_event_loop

Progress = Callable[[int], None]  # requests that have ended
Result = TypeVar("Result")
_TICK_S = 0.01
_CONNECT_TIMEOUT_S = 10.0


class LoadClient:
    """Keeps its connections between runs. Call `close`, or the loop's resources leak."""

    def __init__(self, target: Target, *, timeout_s: float = 300.0) -> None:
        """`timeout_s` is of one request."""
        self._target = target
        self._timeout_s = timeout_s
        self._runner = asyncio.Runner(loop_factory=new_event_loop)
        self._idle: list[Connection] = []

    def run(self, requests: Sequence[LoadRequest], progress: Progress = lambda _: None) -> LoadResult:
        """Send each request at its time, and wait for all answers. What fails is a sample with an error."""
        return self.execute(self.drive(self.prepare(requests), time.monotonic, progress))

    def run_in_turn(self, requests: Sequence[LoadRequest], progress: Progress = lambda _: None) -> LoadResult:
        """Send each request after the answer to the one before; the trace's times are ignored."""
        results = []
        for n, request in enumerate(requests):
            results.append(self.run([request]))
            progress(n + 1)
        return joined(results)

    def execute(self, work: Coroutine[Any, Any, Result]) -> Result:
        return self._runner.run(work)

    def close(self) -> None:
        self._runner.run(self._close_idle())
        self._runner.close()

    def prepare(self, requests: Sequence[LoadRequest]) -> list[tuple[LoadRequest, bytes]]:
        """Encoded before the clock starts: 32k token ids take longer than a small model's first token."""
        return [(request, payload_of(self._target, request)) for request in requests]

    async def connect(self, num_connections: int) -> None:
        """Open so many idle connections that these requests at once find one. Raises OSError."""
        self._idle = [connection for connection in self._idle if connection.is_usable]
        missing = range(num_connections - len(self._idle))
        self._idle += await asyncio.gather(*(self._open() for _ in missing))

    async def drive(
        self, prepared: Sequence[tuple[LoadRequest, bytes]], started_at: Callable[[], float], progress: Progress
    ) -> LoadResult:
        """`started_at` gives the start of the trace on the monotonic clock, once connections stand."""
        num_first = sum(request.at_s == 0.0 for request, _ in prepared)
        try:
            await self.connect(num_first)
        except (OSError, TimeoutError) as error:
            failed = [_failed(request, f"cannot connect: {_line(error)}") for request, _ in prepared]
            return LoadResult(failed, ClientLag(0.0, 0.0, 0.0, 0.0))
        gc.disable()  # a collection in the middle is a late send
        lags: list[float] = []
        ticker = asyncio.create_task(_tick(lags))
        try:
            samples = await self._send_all(prepared, started_at(), progress)
        finally:
            ticker.cancel()
            gc.enable()
        late = [sample.sent_at - sample.planned_at for sample in samples if sample.error is None]
        return LoadResult(samples, ClientLag(_p99(lags), max(lags, default=0.0), _p99(late), max(late, default=0.0)))

    async def _send_all(
        self, prepared: Sequence[tuple[LoadRequest, bytes]], start: float, progress: Progress
    ) -> list[Sample]:
        tasks: list[asyncio.Task[Sample]] = []
        num_ended = 0

        def count(_: asyncio.Task[Sample]) -> None:
            nonlocal num_ended
            num_ended += 1
            progress(num_ended)

        for request, payload in sorted(prepared, key=lambda pair: pair[0].at_s):
            while (wait_s := start + request.at_s - time.monotonic()) > 0:  # uvloop wakes up to 0.5 ms early
                await asyncio.sleep(wait_s)
            tasks.append(asyncio.create_task(self._exchange(request, payload, start)))
            tasks[-1].add_done_callback(count)
        return list(await asyncio.gather(*tasks))

    async def _exchange(self, request: LoadRequest, payload: bytes, start: float) -> Sample:
        loop = asyncio.get_running_loop()
        while True:
            exchange = Exchange(payload, loop)
            try:
                connection = self._take() or await self._open()
            except (OSError, TimeoutError) as error:
                return _failed(request, f"cannot connect: {_line(error)}")
            connection.send(exchange)
            try:
                await asyncio.wait_for(exchange.ended, self._timeout_s)
            except TimeoutError:
                connection.close()
                return _failed(request, f"no end of the answer within {self._timeout_s:g} s")
            if exchange.error is not None and not exchange.has_answer and connection.was_used:
                continue  # the server had closed an idle connection: the next one is another, at last a fresh one
            if connection.is_usable:
                self._idle.append(connection)
            return _sample(request, exchange, start)

    def _take(self) -> Connection | None:
        while self._idle:
            connection = self._idle.pop()
            if connection.is_usable:
                return connection
        return None

    async def _open(self) -> Connection:
        target = self._target
        made = asyncio.get_running_loop().create_connection(
            Connection, target.host, target.port, ssl=True if target.is_tls else None
        )
        _, connection = await asyncio.wait_for(made, _CONNECT_TIMEOUT_S)
        return connection

    async def _close_idle(self) -> None:
        for connection in self._idle:
            connection.close()
        await asyncio.sleep(0)
        await asyncio.sleep(0)  # one turn of the loop for the transports to end


def joined(results: Sequence[LoadResult]) -> LoadResult:
    """Join several runs: every sample, the worst lags."""
    lags = [result.lag for result in results]
    return LoadResult(
        [sample for result in results for sample in result.samples],
        ClientLag(
            max((lag.loop_p99_s for lag in lags), default=0.0),
            max((lag.loop_max_s for lag in lags), default=0.0),
            max((lag.send_p99_s for lag in lags), default=0.0),
            max((lag.send_max_s for lag in lags), default=0.0),
        ),
    )


def _sample(request: LoadRequest, exchange: Exchange, start: float) -> Sample:
    num_tokens = exchange.reader.num_tokens
    return Sample(
        num_prompt_tokens=len(request.token_ids),
        label=request.label,
        planned_at=request.at_s,
        sent_at=round(exchange.sent_at - start, 6),
        read_at=[round(at - start, 6) for at in exchange.read_at],
        num_tokens=exchange.reader.num_events if num_tokens is None else num_tokens,
        has_usage=num_tokens is not None,
        error=exchange.error,
    )


def _failed(request: LoadRequest, error: str) -> Sample:
    return Sample(len(request.token_ids), request.label, request.at_s, request.at_s, [], 0, False, error)


async def _tick(lags: list[float]) -> None:
    """Measure how much later than asked for this loop wakes up."""
    while True:
        before = time.monotonic()
        await asyncio.sleep(_TICK_S)
        lags.append(max(0.0, time.monotonic() - before - _TICK_S))


def _p99(values: Sequence[float]) -> float:
    """Return the p99 of the client's own lag; below a hundred values the largest."""
    return sorted(values)[min(len(values) - 1, int(0.99 * len(values)))] if values else 0.0


def _line(error: Exception) -> str:
    return (str(error).splitlines() or [""])[0] or type(error).__name__
