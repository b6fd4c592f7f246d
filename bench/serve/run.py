"""Sends each case to every side in turn. No torch."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from bench.serve.cases import ServeCase
from bench.serve.row import LatencyObjectives, rows_of
from qualification.load.client import LoadClient
from qualification.load.sample import LoadRequest, LoadResult, Target
from qualification.load.served import ServeRow
from qualification.load.workers import run_in_workers

Progress = Callable[[int, int, str], None]  # requests done, of all, what
_MIN_WORKER_REQUESTS = 16  # fewer streams are no load for one process: some 10 us of it a token


@dataclass(frozen=True, slots=True)
class Side:
    """One server under load."""

    name: str
    url: str
    target: Target
    max_model_len: int | None


@dataclass(slots=True)
class SideRows:
    side: Side
    rows: list[ServeRow] = field(default_factory=list)


class Load:
    """Sends rounds to one side, from this process or from several."""

    def __init__(self, side: Side, *, num_processes: int, timeout_s: float) -> None:
        self.side = side
        self._num_processes = num_processes
        self._timeout_s = timeout_s
        self._client = LoadClient(side.target, timeout_s=timeout_s)

    def send(self, requests: Sequence[LoadRequest], *, is_in_turn: bool, progress: Callable[[int], None]) -> LoadResult:
        """Send the requests and return their samples. Raises WorkerError."""
        if is_in_turn:
            return self._client.run_in_turn(requests, progress)
        if self._num_processes == 1 or len(requests) < _MIN_WORKER_REQUESTS:
            return self._client.run(requests, progress)
        num_workers = self._num_processes
        return run_in_workers(self.side.target, requests, num_workers, timeout_s=self._timeout_s, progress=progress)

    def close(self) -> None:
        self._client.close()


def measure(
    cases: Sequence[ServeCase],
    loads: Sequence[Load],
    *,
    objectives: LatencyObjectives,
    progress: Progress,
) -> list[SideRows]:
    """Every case on every side; rounds alternate, and so does who goes first. Raises WorkerError."""
    found = [SideRows(load.side) for load in loads]
    total, done = sum(case.num_requests for case in cases) * len(loads), 0
    for case in cases:
        results: dict[str, list[LoadResult]] = {load.side.name: [] for load in loads}
        for load in loads:
            progress(done, total, f"{case.name} on {load.side.name}: warm-up")
            load.send(case.warm_up, is_in_turn=case.is_in_turn, progress=lambda _: None)
        for index, requests in enumerate(case.rounds):
            for load in loads if index % 2 == 0 else reversed(loads):
                what = f"{case.name} on {load.side.name}"

                def step(ended: int, done: int = done, what: str = what) -> None:
                    progress(min(done + ended, total - 1), total, what)

                results[load.side.name].append(load.send(requests, is_in_turn=case.is_in_turn, progress=step))
                done += len(requests)
        for side_rows in found:
            side_rows.rows += rows_of(case, results[side_rows.side.name], objectives)
    progress(total, total, "measured")
    return found
