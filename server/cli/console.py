"""Lines that `hallmark` prints for people: progress, the plan as a table, and calls to try."""

import math
import time
from collections import Counter
from collections.abc import Callable, Iterable

from qualification.common.progress import duration
from qualification.common.table import table
from server.protocol.messages import (
    AttestationReport,
    EngineListener,
    EngineProgress,
    EngineReady,
    EngineRefused,
    Heartbeat,
    PlanRow,
    ReplayReport,
    ShadowReport,
    StepRecord,
)
from server.settings import Task

Print = Callable[[str], None]
_PROGRESS_EVERY_S = 2.0  # of one stage: the qualification of an 8B reports 122 times
_SILENT_AT_MOST_S = 8.0  # while an engine starts, or it looks as if it hung
_IMPORTING = "starting: the engine process loads PyTorch"


class Console:
    """An EngineListener that prints, and passes everything on."""

    def __init__(
        self,
        inner: EngineListener,
        *,
        model: str,
        url: str,
        print_line: Print,
        needs_key: bool = False,
        task: Task = Task.GENERATE,
        on_attestation: Callable[[AttestationReport], None] = lambda _: None,
        on_replay: Callable[[ReplayReport], None] = lambda _: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`on_attestation` and `on_replay` are called with each report besides. `clock` is monotonic, in seconds."""
        self._inner = inner
        self._model = model
        self._url = url
        self._print = print_line
        self._needs_key = needs_key
        self._task = task
        self._on_attestation = on_attestation
        self._on_replay = on_replay
        self._clock = clock
        self._down_since = self._reported_at = clock()
        self._printed_at = -math.inf
        self._stage: str | None = None
        self._latest = _IMPORTING

    def on_progress(self, progress: EngineProgress) -> None:
        self._inner.on_progress(progress)
        now = self._reported_at = self._clock()
        self._latest = f"{progress.stage}: {progress.detail}"
        if progress.stage != self._stage or now - self._printed_at >= _PROGRESS_EVERY_S:
            self._stage, self._printed_at = progress.stage, now
            self._print(self._latest)

    def on_waiting(self) -> None:
        self._inner.on_waiting()
        now = self._clock()
        if now - self._printed_at >= _SILENT_AT_MOST_S:
            self._printed_at = now
            self._print(f"{self._latest}, for {duration(now - self._reported_at)}")

    def on_ready(self, ready: EngineReady) -> None:
        self._inner.on_ready(ready)
        for line in plan_table(ready.plan):
            self._print(line)
        self._print("")
        if ready.is_bound_by_cache:
            self._print(f"A request may have {ready.max_model_len} tokens: the KV cache holds no more.")
        waited_s = self._clock() - self._down_since
        self._print(f"Hallmark is ready on {self._url} with {self._model}, after {waited_s:.1f} s")
        self._print("Try it:")
        self._print(f"  {curl_line(self._url, needs_key=self._needs_key, task=self._task)}")

    def on_refused(self, refused: EngineRefused) -> None:
        self._inner.on_refused(refused)
        if refused.is_final:
            return  # the program ends, and prints why
        for line in plan_table(refused.plan) if refused.plan else ():
            self._print(line)
        self._print(f"Hallmark refuses to serve: {refused.message}")
        self._print(f"Until it is ended, {self._url}/readyz answers 503 with the reason.")  # or it looks as if it hung

    def on_plan(self, plan: list[PlanRow]) -> None:
        self._inner.on_plan(plan)
        fallbacks = [row for row in plan if row.fallback_reasons]
        self._print(f"The plan has changed: {len(fallbacks)} of {len(plan)} shapes fall back")
        for line in plan_table(fallbacks) if fallbacks else ():
            self._print(line)

    def on_step(self, record: StepRecord) -> None:
        self._inner.on_step(record)

    def on_heartbeat(self, heartbeat: Heartbeat) -> None:
        self._inner.on_heartbeat(heartbeat)

    def on_attestation(self, report: AttestationReport) -> None:
        self._inner.on_attestation(report)
        self._on_attestation(report)
        for batch in report.batches:
            if batch.detail is not None:
                self._print(f"Attestation {batch.result}: {batch.detail}")

    def on_shadow(self, report: ShadowReport) -> None:
        self._inner.on_shadow(report)
        if report.result == "mismatch":
            self._print(f"Shadow check: {report.detail}")

    def on_replay(self, report: ReplayReport) -> None:
        self._inner.on_replay(report)
        self._on_replay(report)
        if report.cause is not None:
            self._print(f"Replay of an answer served by route {report.route}: {report.detail}")

    def on_death(self, cause: str) -> None:
        self._inner.on_death(cause)
        self._down_since = self._printed_at = self._reported_at = self._clock()
        self._stage, self._latest = None, _IMPORTING
        self._print(f"The engine has died ({cause}); it is restarted.")


# A request that each task answers.
_TRIALS = {
    Task.GENERATE: (
        "-N",
        "/v1/completions",
        '{"prompt": "Once upon a time", "max_tokens": 64, "temperature": 0.7, "stream": true}',
    ),
    Task.EMBED: ("", "/v1/embeddings", '{"input": "The capital of China is Beijing."}'),
    Task.SCORE: (
        "",
        "/v1/rerank",
        '{"query": "What is the capital of China?", "documents": ["Beijing.", "Apples are red."]}',
    ),
}


def curl_line(url: str, *, needs_key: bool, task: Task = Task.GENERATE) -> str:
    flag, path, body = _TRIALS[task]
    key = " -H 'Authorization: Bearer KEY'" if needs_key else ""
    command = " ".join(filter(None, ("curl", flag, url + path)))
    return f"{command} -H 'Content-Type: application/json'{key} -d '{body}'"


def plan_table(plan: Iterable[PlanRow]) -> list[str]:
    """A line a shape: what serves it, how well that is proven, and why it is no better.

    Shapes of another operator than attention that are served alike share a line; GET /plan has each.
    """
    rows: list[tuple[str, ...]] = []
    alike: Counter[tuple[str, str, str, str]] = Counter()
    for row in plan:
        if row.head_dim is None:
            alike[row.phase, row.path or "none", row.status, _note(row)] += 1
        else:
            buckets = row.query_bucket, row.context_bucket
            rows.append((row.phase, *buckets, row.path or "none", row.status, _note(row)))
    for (phase, *served), count in alike.items():
        rows.append((phase, "1 shape" if count == 1 else f"{count} shapes", "", *served))
    return table(("phase", "query", "context", "path", "status", "notes"), rows)


def _note(row: PlanRow) -> str:
    reasons = [f"from {row.wanted}: {', '.join(row.fallback_reasons)}"] if row.fallback_reasons else []
    order = [] if row.order is None else [f"order {row.order}"]
    return "; ".join([*reasons, *order, *row.notes])
