"""A trace shared out to several processes, so that the client is not what is measured."""

import asyncio
import time
from asyncio.subprocess import PIPE, Process
from collections.abc import Callable, Sequence

import msgspec

from kernels.system.child_process import python_command
from qualification.load.client import Progress, joined, new_event_loop
from qualification.load.sample import LoadRequest, LoadResult, Target
from qualification.load.worker import WorkerJob, WorkerReport

_LEAD_S = 0.05  # between the last worker's being ready and the start
_LINE_LIMIT = 2**30  # bytes; a result is one line


CountEnded = Callable[[int, int], None]  # a worker's index, its requests that have ended


class WorkerError(Exception):
    """A worker died; one line."""


def run_in_workers(
    target: Target, requests: Sequence[LoadRequest], num_workers: int, *, timeout_s: float, progress: Progress
) -> LoadResult:
    """Run a LoadClient in each of `num_workers` processes that begin together. Raises WorkerError."""
    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        return runner.run(_run(target, requests, num_workers, timeout_s, progress))


async def _run(
    target: Target, requests: Sequence[LoadRequest], num_workers: int, timeout_s: float, progress: Progress
) -> LoadResult:
    jobs = [WorkerJob(target, list(requests[n::num_workers]), timeout_s) for n in range(num_workers)]
    command = python_command("qualification.load.worker")
    workers = [await asyncio.create_subprocess_exec(*command, stdin=PIPE, stdout=PIPE, limit=_LINE_LIMIT) for _ in jobs]
    try:
        reports = await asyncio.gather(*(_prepare(*pair) for pair in zip(workers, jobs, strict=True)))
        refused = [report.result for report in reports if report.result is not None]
        if refused:  # no connection: nothing was sent
            return joined(refused)
        start = time.monotonic() + _LEAD_S
        ended = [0] * num_workers

        def count(worker: int, num_ended: int) -> None:
            ended[worker] = num_ended
            progress(sum(ended))

        results = await asyncio.gather(*(_follow(n, worker, start, count) for n, worker in enumerate(workers)))
    finally:
        for worker in workers:
            if worker.returncode is None:
                worker.kill()
            await worker.wait()
    return joined(results)


async def _prepare(worker: Process, job: WorkerJob) -> WorkerReport:
    await _write(worker, msgspec.json.encode(job))
    return await _read(worker)


async def _follow(index: int, worker: Process, start: float, count: CountEnded) -> LoadResult:
    await _write(worker, msgspec.json.encode(start))
    while True:
        report = await _read(worker)
        count(index, report.ended)
        if report.result is not None:
            await worker.wait()
            return report.result


async def _write(worker: Process, line: bytes) -> None:
    assert worker.stdin is not None
    worker.stdin.write(line + b"\n")
    try:
        await worker.stdin.drain()
    except ConnectionError as error:
        raise WorkerError(f"a load worker ended early: {error}") from error


async def _read(worker: Process) -> WorkerReport:
    assert worker.stdout is not None
    line = await worker.stdout.readline()
    if not line:
        raise WorkerError("a load worker ended without a result")
    return msgspec.json.decode(line, type=WorkerReport)
