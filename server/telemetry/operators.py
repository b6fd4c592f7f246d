"""Metrics of the proven operators: the path that served, what it replaced and why, its speed and its evidence."""

import hashlib
import itertools
import time
from collections import deque
from collections.abc import Iterable
from functools import cache

from prometheus_client import Counter

from kernels.vocabulary.operators import Operator
from kernels.vocabulary.path import Reject
from kernels.vocabulary.recurrence_operator import CONVOLUTION, RECURRENCE
from kernels.vocabulary.shape import PLANNED_PHASES, Phase
from qualification.attest.explain import TimeClass
from qualification.decision.decision import Status
from server.protocol.messages import (
    AttestedBatch,
    DispatchCount,
    EngineReady,
    LayersStatus,
    PlanRow,
    ReplayReport,
    ShadowReport,
)
from server.protocol.plan_rows import TOWER, counted_bucket, counted_context, possible_paths
from server.protocol.served_answer import Route
from server.telemetry.factory import MetricFactory
from server.telemetry.outcomes import Attestation, Shadow

_KEPT_CHECKS = 16
_BUILD_FIELDS = ("gpu", "sm", "driver", "cuda", "torch", "triton")


class OperatorMetrics:
    def __init__(self, make: MetricFactory, model: str, version: str) -> None:
        self._model = model
        self._version = version
        self.shadow_reports: deque[ShadowReport] = deque(maxlen=_KEPT_CHECKS)  # the latest, for GET /attention
        self.replay_reports: deque[ReplayReport] = deque(maxlen=_KEPT_CHECKS)  # likewise
        self._create_proof(make)
        self._create_service(make)
        self._create_efficiency(make)

    def _create_proof(self, make: MetricFactory) -> None:
        self._build_info = make.gauge(
            "build_info", "What runs here; always 1", "version", "fingerprint", *_BUILD_FIELDS
        )
        self._matrix_info = make.gauge("matrix_info", "The matrix in use; always 1", "digest", "verdict")
        self._shapes = make.gauge("qualification_shapes", "Shapes of the plan by status", "status")
        self._fallback_shapes = make.gauge("fallback_shapes", "Shapes of the plan that a fallback serves")
        self._qualified_at = make.gauge(
            "qualification_last_success_timestamp_seconds", "When every shape of the plan last had a path"
        )
        self._layers = make.gauge(
            "layers_status", "Whether the layers compute what the plain forward pass does; 1 for what holds", "status"
        )
        self._attestations = make.counter(
            "attestation_total", "Profiled forwards, by whether the promised kernels were the ones seen", "result"
        )
        self._shadow_checks = make.counter(
            "shadow_checks_total",
            "What clients' steps computed, by operator, computed again in fp64, by whether within the limits",
            *("phase", "result"),
        )
        for phase, checked in itertools.product((*PLANNED_PHASES, Operator.LINEAR), Shadow):
            self._shadow_checks.labels(phase.value, checked.value)
        self._shadow_s = make.counter("shadow_seconds_total", "Time that shadow checks and replays took")
        self._replays = make.counter(
            "replays_total", "Served answers computed again alone and compared, by how they were served", "route"
        )
        for route in Route:
            self._replays.labels(route.value)
        self._replay_mismatches = make.counter("replay_mismatches_total", "Those that are not the same alone")
        self._forward_time = make.gauge(
            "forward_time_ratio",
            "Share of a forward pass's time on its device by what is known of the kernels, latest attestation",
            *("phase", "class"),
        )
        for status in Status:
            self._shapes.labels(status.value)
        for result in Attestation:
            self._attestations.labels(result.value)

    def _create_service(self, make: MetricFactory) -> None:
        dispatches = make.counter(
            "attention_dispatch_total",
            "Decisions served, one a step (or pass of a draft head) and phase; of other operators one a bucket of rows",
            *("model", "phase", "bucket", "path", "status"),
        )
        self._fallbacks = make.counter(
            "attention_fallback_total",
            "Fallback decisions served, by reason",
            *("model", "phase", "from", "to", "reason"),
        )

        def counted(phase: str, bucket: str, path: str, status: str) -> Counter:
            return dispatches.labels(self._model, phase, counted_context(phase, bucket), path, status)

        self._dispatch = cache(counted)  # a step's: a hit costs 0.1 us, labels() 1.2
        self._launch = cache(make.counter("attention_launches_total", "Calls of a path: layers x steps", "path").labels)
        self._launch_counts: dict[str, int] = {}
        self._compiles = make.counter("kernel_compiles_total", "Triton kernels compiled", "after_ready")
        for after_ready in ("false", "true"):
            self._compiles.labels(after_ready)

    def _create_efficiency(self, make: MetricFactory) -> None:
        self._tflops = make.gauge(
            "attention_achieved_tflops",
            "Attention's floating-point operations over its measured kernel time, latest sample; decode has none",
            *("phase", "bucket"),
        )
        self._bandwidth = make.gauge(
            "attention_achieved_bytes_per_second",
            "Attention's bytes by the IO model over its measured kernel time, latest sample",
            *("phase", "bucket"),
        )
        self._kernel_s = make.counter(
            "attention_sampled_kernel_seconds_total", "Attention's kernel time in sampled steps", "phase"
        )
        self._hbm_bytes = make.counter(
            "attention_sampled_hbm_bytes_total", "Attention's bytes by the IO model in sampled steps", "phase"
        )
        self._peak = make.gauge("peak_temporary_bytes", "Most memory a step took beyond weights and KV cache", "phase")
        self._peak_bytes: dict[str, int] = {}

    def ready(self, ready: EngineReady) -> None:
        """Take over the engine's plan: every label that can follow is created at 0."""
        self._build_info.clear()  # a restarted engine may have found another driver
        self._build_info.labels(self._version, *build_labels(ready.fingerprint)).set(1)
        self._matrix_info.clear()
        self._matrix_info.labels(ready.matrix_digest or "none", ready.matrix_verdict).set(1)
        for lane in (Operator.EXPERTS.value, RECURRENCE.value, CONVOLUTION.value, TOWER):
            if any(row.phase == lane for row in ready.plan):
                for checked in Shadow:
                    self._shadow_checks.labels(lane, checked.value)
        for layers in LayersStatus:
            self._layers.labels(layers.value).set(layers is ready.layers.status)
        self.planned(ready.plan)
        self._qualified_at.set(time.time())
        for row in ready.plan:
            if row.path is not None:
                self._dispatch(row.phase, counted_bucket(row.phase, row.context_bucket), row.path, row.status)
                self._launched(row.path, 0)
        for phase, wanted, path, reason in sorted(fallback_labels(ready.plan)):
            self._fallbacks.labels(self._model, phase, wanted, path, reason)
            self._launched(path, 0)

    def planned(self, plan: list[PlanRow]) -> None:
        statuses = [row.status for row in plan]
        for status in Status:
            self._shapes.labels(status.value).set(statuses.count(status.value))
        self._fallback_shapes.set(sum(bool(row.fallback_reasons) for row in plan))

    def replanned(self, plan: list[PlanRow]) -> None:
        """The plan has changed in service; what it will be counted under is created before anything is."""
        self.planned(plan)
        for row in plan:
            if row.path is not None:
                self._dispatch(row.phase, counted_bucket(row.phase, row.context_bucket), row.path, row.status)
                self._launched(row.path, 0)
                for reason in row.fallback_reasons:
                    self._fallbacks.labels(self._model, row.phase, row.wanted, row.path, reason)

    def served(self, dispatches: Iterable[DispatchCount]) -> None:
        for it in dispatches:
            self._dispatch(it.phase, it.bucket, it.path, it.status).inc()
            self._launched(it.path, it.num_launches)
            for reason in it.fallback_reasons:
                self._fallbacks.labels(self._model, it.phase, it.wanted, it.path, reason).inc()

    def compiled(self, num_kernels: int, *, after_ready: bool) -> None:
        if num_kernels:
            self._compiles.labels("true" if after_ready else "false").inc(num_kernels)

    def attested(self, result: Attestation, batches: Iterable[AttestedBatch] = ()) -> None:
        self._attestations.labels(result.value).inc()
        for phase, seconds in _time_by_class(batches).items():
            for time_class, of_class in seconds.items():
                self._forward_time.labels(phase, time_class).set(of_class / max(sum(seconds.values()), 1e-9))

    def shadow_checked(self, report: ShadowReport) -> None:
        self._shadow_checks.labels(report.phase, Shadow(report.result).value).inc()
        self._shadow_s.inc(report.spent_s)
        self.shadow_reports.append(report)

    def replayed(self, report: ReplayReport) -> None:
        self._shadow_s.inc(report.spent_s)
        if report.num_tokens:
            self._replays.labels(Route(report.route).value).inc()
        if report.cause is not None:
            self._replay_mismatches.inc()
        self.replay_reports.append(report)

    def measured(self, phase: str, bucket: str, *, kernel_s: float, flops: float, hbm_bytes: float) -> None:
        """Attention of one sampled step: its kernels took `kernel_s` > 0 together, by device events.

        The series appear with their first sample: 0 TFLOP/s would be a measurement.
        """
        bucket = counted_context(phase, bucket)
        if phase not in (Phase.DECODE.value, Phase.VERIFY.value):  # which memory bounds
            self._tflops.labels(phase, bucket).set(flops / kernel_s / 1e12)
        self._bandwidth.labels(phase, bucket).set(hbm_bytes / kernel_s)
        self._kernel_s.labels(phase).inc(kernel_s)
        self._hbm_bytes.labels(phase).inc(hbm_bytes)

    def peaked(self, phase: str, num_bytes: int) -> None:
        """The largest value since the start stays."""
        self._peak_bytes[phase] = max(num_bytes, self._peak_bytes.get(phase, 0))
        self._peak.labels(phase).set(self._peak_bytes[phase])

    def launch_counts(self) -> dict[str, int]:
        """Launches by path since the start."""
        return dict(self._launch_counts)

    def _launched(self, path: str, num_launches: int) -> None:
        self._launch(path).inc(num_launches)
        self._launch_counts[path] = self._launch_counts.get(path, 0) + num_launches


def _time_by_class(batches: Iterable[AttestedBatch]) -> dict[str, dict[str, float]]:
    """Return the seconds of each phase by class, its batches added up."""
    found: dict[str, dict[str, float]] = {}
    for batch in batches:
        if batch.explained is not None:
            seconds = found.setdefault(batch.phase, dict.fromkeys((it.value for it in TimeClass), 0.0))
            for time_class, of_class in batch.explained.seconds.items():
                seconds[time_class] += of_class
    return found


def fingerprint_digest(fingerprint: dict[str, str | int | None]) -> str:
    """Twelve hexadecimal digits that differ when any field does."""
    text = "\n".join(f"{name}={value}" for name, value in sorted(fingerprint.items()))
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def build_labels(fingerprint: dict[str, str | int | None]) -> tuple[str, ...]:
    """The values of build_info's labels after the version, in their order."""
    texts = (fingerprint.get(name) for name in _BUILD_FIELDS)
    return (fingerprint_digest(fingerprint), *("none" if text is None else str(text) for text in texts))


def fallback_labels(plan: Iterable[PlanRow]) -> set[tuple[str, str, str, str]]:
    """Return every (phase, from, to, reason) that a fallback of this plan could be counted under.

    The plan holds all reasons but one: a path may be quarantined later. Other reasons come with another plan. A path
    that cannot compute the shape is the target of none, and one that was taken out is not its own.
    """
    found = set()
    for row in plan:
        known = {code for code, _ in row.rejected.get(row.wanted, ())} | set(row.fallback_reasons)
        reasons = known | {Reject.QUARANTINED.value}
        targets = possible_paths(row) - {row.wanted}
        found |= {(row.phase, row.wanted, path, reason) for path in targets for reason in reasons}
        if row.path is not None:  # the wanted path itself, where it serves without valid evidence
            found |= {(row.phase, row.wanted, row.path, reason) for reason in row.fallback_reasons}
    return found
