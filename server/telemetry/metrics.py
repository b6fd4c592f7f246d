"""Every Prometheus metric of the server: one registry, passed in, fed by the engine's messages and by the edge.

Label sets that are known in advance are created at 0: a counter that first appears with the value 1 is invisible to
`increase()`, so the first fallback of a process would never alert.
"""

import hashlib
import itertools
import time
from collections.abc import Callable, Iterable, Iterator
from enum import Enum

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.metrics_core import Metric

from kernels.buckets import bucket_of, buckets_up_to
from kernels.path import Reject
from qualification.decision import Status
from server.engine.client import DeathCause
from server.engine.messages import (
    EngineProgress,
    EngineReady,
    EngineRefused,
    Heartbeat,
    PlanRow,
    RequestTimes,
    StepRecord,
)

Exemplar = dict[str, str] | None  # trace_id and span_id of a sampled trace
LADDER_FACTOR = 1.3  # a quantile read from these buckets is within 1-5 % of the truth for log-normal latencies


class Outcome(Enum):
    OK = "ok"
    CLIENT_ERROR = "client_error"
    REJECTED = "rejected"  # 429 and 503: come again later
    SERVER_ERROR = "server_error"
    DISCONNECTED = "disconnected"


class RejectedFor(Enum):
    NOT_READY = "not_ready"
    DRAINING = "draining"
    QUEUE_REQUESTS = "queue_requests"
    QUEUE_TOKENS = "queue_tokens"


class DisconnectStage(Enum):
    QUEUED = "queued"  # before the first token
    STREAMING = "streaming"
    SLOW_READER = "slow_reader"  # we hung up: the client did not read


class Registry(CollectorRegistry):
    """Leaves out the `_created` samples, which double the size of a scrape and which nobody reads."""

    def collect(self) -> Iterator[Metric]:
        for metric in super().collect():
            metric.samples = [sample for sample in metric.samples if not sample.name.endswith("_created")]
            yield metric


def ladder(last_s: float) -> tuple[float, ...]:
    """Bucket edges in seconds: 1 ms times powers of 1.3, up to the first at or above `last_s`."""
    edges = [0.001]
    while edges[-1] < last_s:
        edges.append(float(f"{edges[-1] * LADDER_FACTOR:.3g}"))
    return tuple(edges)


class Metrics:
    """An EngineListener; the edge calls the rest. All methods are cheap: children are cached by the client library."""

    def __init__(
        self, model: str, registry: CollectorRegistry, *, version: str, now: Callable[[], float] = time.monotonic
    ) -> None:
        self.model = model
        self._version = version
        self.registry = registry
        self._now = now
        self._inflight: dict[str, float] = {}  # request id -> arrival; the oldest first
        self._is_ready = False
        self.loop_seen_at = now()  # when the event loop last turned
        self._create_latencies()
        self._create_attention()
        self._create_engine()
        self._create_edge()
        self._create_fixed_children()

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(f"hallmark_{name}", text, labels, registry=self.registry)

    def _gauge(self, name: str, text: str, *labels: str) -> Gauge:
        return Gauge(f"hallmark_{name}", text, labels, registry=self.registry)

    def _histogram(self, name: str, text: str, last_s: float, *labels: str) -> Histogram:
        return Histogram(f"hallmark_{name}", text, labels, registry=self.registry, buckets=ladder(last_s))

    def _create_latencies(self) -> None:
        self.ttft = self._histogram(
            "time_to_first_token_seconds", "From arrival to the first token, by prompt length", 60, "model", "bucket"
        )
        self.tpot = self._histogram(
            "time_per_output_token_seconds", "Mean time between a request's tokens", 2, "model", "bucket"
        )
        self.prefill = self._histogram(
            "prefill_seconds", "From first schedule to the first token", 60, "model", "bucket"
        )
        self.queue = self._histogram("queue_seconds", "From submission to first schedule", 60, "model")
        self.duration = self._histogram(
            "request_duration_seconds", "From arrival to the last byte", 600, "model", "outcome"
        )

    def _create_attention(self) -> None:
        build = ("version", "fingerprint", "gpu", "sm", "driver", "cuda", "torch", "triton")
        self.build_info = self._gauge("build_info", "What runs here; always 1", *build)
        self.matrix_info = self._gauge("matrix_info", "The matrix in use; always 1", "digest", "verdict")
        self.dispatch = self._counter(
            "attention_dispatch_total",
            "Decisions served, one a step and phase",
            "model",
            "phase",
            "bucket",
            "path",
            "status",
        )
        self.fallback = self._counter(
            "attention_fallback_total", "Fallback decisions served, by reason", "model", "phase", "from", "to", "reason"
        )
        self.launches = self._counter("attention_launches_total", "Attention calls: layers x steps", "path")
        self.compiles = self._counter("kernel_compiles_total", "Triton kernels compiled", "after_ready")
        self.shapes = self._gauge("qualification_shapes", "Shapes of the plan by status", "status")
        self.qualified_at = self._gauge(
            "qualification_last_success_timestamp_seconds", "When every shape of the plan last had a path"
        )

    def _create_engine(self) -> None:
        self.running = self._gauge("requests_running", "Sequences that the engine computes")
        self.waiting = self._gauge("requests_waiting", "Sequences that wait in the engine")
        self.kv_usage = self._gauge("kv_cache_usage_ratio", "Used share of the KV cache's pages")
        self.preemptions = self._counter("preemptions_total", "Sequences that lost their pages and were computed anew")
        self.nonfinite = self._counter("nonfinite_logits_total", "Sequences ended because no logit was finite")
        self.engine_up = self._gauge("engine_up", "1 while the engine is ready")
        self.steps = self._counter("engine_steps_total", "Steps of the engine")
        self.last_step_at = self._gauge("engine_last_step_timestamp_seconds", "When the last step ended")
        self.restarts = self._counter("engine_restarts_total", "Engine processes that ended unasked", "cause")

    def _create_edge(self) -> None:
        self.prompt_tokens = self._counter("prompt_tokens_total", "Prompt tokens of requests that got a first token")
        self.generation_tokens = self._counter("generation_tokens_total", "Tokens generated")
        self.requests = self._counter("requests_total", "HTTP requests answered", "route", "outcome")
        self.rejected = self._counter("rejected_total", "Requests turned away before the engine saw them", "reason")
        self.disconnects = self._counter(
            "client_disconnects_total", "Clients that left before their answer ended", "stage"
        )
        self.oldest_inflight = self._gauge(
            "oldest_inflight_seconds", "Age of the oldest request without an end; 0 if none"
        )
        self.oldest_inflight.set_function(self._oldest_inflight)
        self.event_loop_lag = self._gauge(
            "event_loop_lag_seconds", "Longest delay of the event loop in the last 5 seconds"
        )
        self.spans_dropped = self._counter("spans_dropped_total", "Spans that did not reach the collector")

    def _create_fixed_children(self) -> None:
        self.queue.labels(self.model)
        for outcome in Outcome:
            self.duration.labels(self.model, outcome.value)
        for reason in RejectedFor:
            self.rejected.labels(reason.value)
        for stage in DisconnectStage:
            self.disconnects.labels(stage.value)
        for cause in DeathCause:
            self.restarts.labels(cause.value)
        for after_ready in ("false", "true"):
            self.compiles.labels(after_ready)
        for status in Status:
            self.shapes.labels(status.value)

    # --- the engine's messages -------------------------------------------------------------------------------------

    def on_progress(self, progress: EngineProgress) -> None:
        """Nothing to count."""

    def on_ready(self, ready: EngineReady) -> None:
        self._is_ready = True
        self.engine_up.set(1)
        self.build_info.clear()  # a restarted engine may have found another driver
        self.build_info.labels(self._version, *build_labels(ready.fingerprint)).set(1)
        self.matrix_info.clear()
        self.matrix_info.labels(ready.matrix_digest or "none", ready.matrix_verdict).set(1)
        self._count_shapes(ready.plan)
        self.qualified_at.set_to_current_time()
        for bucket in buckets_up_to(ready.max_model_len):
            for family in (self.ttft, self.tpot, self.prefill):
                family.labels(self.model, bucket.label)
        for row in ready.plan:
            if row.path is not None:
                self.dispatch.labels(self.model, row.phase, row.context_bucket, row.path, row.status)
                self.launches.labels(row.path)
        for phase, wanted, path, reason in fallback_labels(ready.plan):
            self.fallback.labels(self.model, phase, wanted, path, reason)
            self.launches.labels(path)

    def on_refused(self, refused: EngineRefused) -> None:
        self.engine_up.set(0)
        self._count_shapes(refused.plan)

    def on_step(self, record: StepRecord) -> None:
        self.steps.inc()
        self.last_step_at.set_to_current_time()
        self.running.set(record.num_running)
        self.waiting.set(record.num_waiting)
        self.kv_usage.set(record.num_pages_used / record.num_pages)
        self.preemptions.inc(record.num_preemptions)
        self.nonfinite.inc(record.num_nonfinite)
        self.compiles.labels("true" if self._is_ready else "false").inc(record.num_compiles)
        for it in record.dispatches:
            self.dispatch.labels(self.model, it.phase, it.bucket, it.path, it.status).inc()
            self.launches.labels(it.path).inc(it.num_launches)
            for reason in it.fallback_reasons:
                self.fallback.labels(self.model, it.phase, it.wanted, it.path, reason).inc()

    def on_heartbeat(self, heartbeat: Heartbeat) -> None:
        self.running.set(heartbeat.num_running)
        self.waiting.set(heartbeat.num_waiting)

    def on_death(self, cause: str) -> None:
        self._is_ready = False
        self.engine_up.set(0)
        self.running.set(0)
        self.waiting.set(0)
        self.restarts.labels(cause).inc()

    # --- the edge --------------------------------------------------------------------------------------------------

    def create_routes(self, routes: Iterable[str]) -> None:
        for route, outcome in itertools.product(routes, Outcome):
            self.requests.labels(route, outcome.value)

    def request_answered(self, route: str, outcome: Outcome) -> None:
        self.requests.labels(route, outcome.value).inc()

    def generation_began(self, request_id: str, arrived_at: float) -> None:
        self._inflight[request_id] = arrived_at

    def generation_ended(self, request_id: str, outcome: Outcome, trace: Exemplar) -> None:
        elapsed = self._now() - self._inflight.pop(request_id)
        self.duration.labels(self.model, outcome.value).observe(elapsed, trace)

    def loop_turned(self, lag_s: float) -> None:
        self.loop_seen_at = self._now()
        self.event_loop_lag.set(lag_s)

    def first_token(self, num_prompt_tokens: int, ttft_s: float, times: RequestTimes | None, trace: Exemplar) -> None:
        bucket = bucket_of(num_prompt_tokens).label
        self.prompt_tokens.inc(num_prompt_tokens)
        self.ttft.labels(self.model, bucket).observe(ttft_s, trace)
        if times is not None:
            self.queue.labels(self.model).observe(times.scheduled_at - times.submitted_at, trace)
            self.prefill.labels(self.model, bucket).observe(times.first_token_at - times.scheduled_at, trace)

    def sequence_ended(self, num_prompt_tokens: int, num_gaps: int, decode_s: float, trace: Exemplar) -> None:
        """`num_gaps` >= 1 times between tokens took `decode_s` together."""
        self.tpot.labels(self.model, bucket_of(num_prompt_tokens).label).observe(decode_s / num_gaps, trace)

    def _oldest_inflight(self) -> float:
        oldest = next(iter(self._inflight.copy().values()), None)  # a copy: the scrape is another thread's
        return 0.0 if oldest is None else max(0.0, self._now() - oldest)

    def _count_shapes(self, plan: Iterable[PlanRow]) -> None:
        statuses = [row.status for row in plan]
        for status in Status:
            self.shapes.labels(status.value).set(statuses.count(status.value))


def fingerprint_digest(fingerprint: dict[str, str | int | None]) -> str:
    """Twelve hexadecimal digits that differ when any field does."""
    text = "\n".join(f"{name}={value}" for name, value in sorted(fingerprint.items()))
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def build_labels(fingerprint: dict[str, str | int | None]) -> tuple[str, ...]:
    """The values of build_info's labels after the version, in their order."""
    fields = ("gpu", "sm", "driver", "cuda", "torch", "triton")
    texts = (fingerprint.get(name) for name in fields)
    return (fingerprint_digest(fingerprint), *("none" if text is None else str(text) for text in texts))


def fallback_labels(plan: Iterable[PlanRow]) -> set[tuple[str, str, str, str]]:
    """Every (phase, from, to, reason) that a fallback of this plan could be counted under."""
    unable = {Reject.ARCH.value, Reject.LAYOUT.value}  # this machine or this phase will never be served by such a path
    found = set()
    for row in plan:
        paths = {path for path, why in row.rejected.items() if unable.isdisjoint(code for code, _ in why)}
        targets = paths if row.path is None else paths | {row.path}
        found |= {(row.phase, row.wanted, path, reason.value) for path in targets for reason in Reject}
    return found
