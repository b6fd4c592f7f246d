"""A process that sends its part of a trace: `python -m qualification.load.worker`, JSON lines in and out.

in   the job, then, once every worker is ready, the start on the monotonic clock that all processes share
out  `{"ended": 0}` when ready, `{"ended": n}` while it runs, and the result last
"""

import sys
import time

import msgspec

from qualification.load.client import LoadClient
from qualification.load.sample import LoadRequest, LoadResult, Target

_REPORT_INTERVAL_S = 0.2


class WorkerJob(msgspec.Struct, frozen=True):
    target: Target
    requests: list[LoadRequest]
    timeout_s: float


class WorkerReport(msgspec.Struct, frozen=True):
    ended: int  # requests so far
    result: LoadResult | None = None


def main() -> None:
    job = msgspec.json.decode(sys.stdin.buffer.readline(), type=WorkerJob)
    client = LoadClient(job.target, timeout_s=job.timeout_s)
    reported_at = 0.0

    def progress(num_ended: int) -> None:
        nonlocal reported_at
        if time.monotonic() - reported_at >= _REPORT_INTERVAL_S:
            reported_at = time.monotonic()
            _send(WorkerReport(num_ended))

    def started_at() -> float:
        _send(WorkerReport(0))
        return float(msgspec.json.decode(sys.stdin.buffer.readline(), type=float))

    try:
        result = client.execute(client.drive(client.prepare(job.requests), started_at, progress))
    finally:
        client.close()
    _send(WorkerReport(len(job.requests), result))


def _send(report: WorkerReport) -> None:
    sys.stdout.buffer.write(msgspec.json.encode(report) + b"\n")
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
