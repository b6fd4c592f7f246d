"""Every Prometheus metric of the server: one registry, passed in, written by the engine's messages and by the edge.

Label sets that are known in advance are created at 0: a counter that first appears with the value 1 is invisible to
`increase()`, so the first fallback of a process would never alert.
"""

import time
from collections.abc import Callable

from prometheus_client import CollectorRegistry

from kernels.vocabulary.buckets import buckets_up_to
from server.protocol.messages import (
    AttestationReport,
    EngineProgress,
    EngineReady,
    EngineRefused,
    Heartbeat,
    PlanRow,
    ReplayReport,
    RequestTimes,
    ShadowReport,
    StepRecord,
)
from server.telemetry.engine import EngineMetrics
from server.telemetry.factory import Declaration, Exemplar, MetricFactory
from server.telemetry.latency import LatencyMetrics
from server.telemetry.objectives import DEFAULT_OBJECTIVES, Objectives
from server.telemetry.operators import OperatorMetrics
from server.telemetry.outcomes import Attestation, Outcome
from server.telemetry.slo import SloMetrics
from server.telemetry.traffic import TrafficMetrics
from server.telemetry.vllm_names import PREFIX as VLLM_PREFIX
from server.telemetry.vllm_names import VllmMetrics


class Metrics:
    """Counts what the engine reports, as an EngineListener, and what the edge reports. All methods are cheap."""

    def __init__(
        self,
        model: str,
        registry: CollectorRegistry,
        *,
        version: str,
        objectives: Objectives = DEFAULT_OBJECTIVES,
        has_vllm_names: bool = False,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self.model = model
        self.registry = registry
        make = MetricFactory(registry)
        self.latency = LatencyMetrics(make, model)
        self.slo = SloMetrics(make, model, objectives)
        self.operators = OperatorMetrics(make, model, version)
        self.engine = EngineMetrics(make)
        self.traffic = TrafficMetrics(make, now=now)
        self.declarations: tuple[Declaration, ...] = tuple(make.declarations)
        make_vllm = MetricFactory(registry, VLLM_PREFIX)
        self.vllm = VllmMetrics(make_vllm, model, self.engine) if has_vllm_names else None
        self.vllm_declarations: tuple[Declaration, ...] = tuple(make_vllm.declarations)
        self._is_ready = False

    # --- the engine's messages -------------------------------------------------------------------------------------

    def on_progress(self, progress: EngineProgress) -> None:
        """Ignore the message: it moves no metric."""

    def on_ready(self, ready: EngineReady) -> None:
        self._is_ready = True
        self.engine.ready(ready)
        if self.vllm is not None:
            self.vllm.ready(ready)
        self.operators.ready(ready)
        self.operators.compiled(ready.num_compiles, after_ready=False)
        buckets = buckets_up_to(ready.max_model_len)
        self.latency.create_buckets(buckets)
        self.slo.create_buckets(buckets)

    def on_refused(self, refused: EngineRefused) -> None:
        self.engine.refused()
        self.operators.planned(refused.plan)

    def on_plan(self, plan: list[PlanRow]) -> None:
        self.operators.replanned(plan)

    def on_step(self, record: StepRecord) -> None:
        self.engine.stepped(record)
        self.traffic.add_generated()
        if self.vllm is not None:
            self.vllm.stepped(record)
        self.operators.compiled(record.num_compiles, after_ready=self._is_ready)
        self.operators.served(record.dispatches)
        for it in record.attention_samples:
            self.operators.measured(it.phase, it.bucket, kernel_s=it.kernel_s, flops=it.flops, hbm_bytes=it.hbm_bytes)
        for phase, num_bytes in record.peak_temporary_bytes.items():
            self.operators.peaked(phase, num_bytes)

    def on_heartbeat(self, heartbeat: Heartbeat) -> None:
        self.engine.beat(heartbeat)

    def on_attestation(self, report: AttestationReport) -> None:
        self.operators.attested(Attestation(report.result), report.batches)

    def on_shadow(self, report: ShadowReport) -> None:
        self.operators.shadow_checked(report)

    def on_replay(self, report: ReplayReport) -> None:
        self.operators.replayed(report)

    def on_waiting(self) -> None:
        pass

    def on_death(self, cause: str) -> None:
        self._is_ready = False
        self.engine.died(cause)

    # --- the edge --------------------------------------------------------------------------------------------------

    def first_token(
        self,
        num_prompt_tokens: int,
        ttft_s: float,
        times: RequestTimes | None,
        trace: Exemplar,
        *,
        is_first: bool = True,
    ) -> None:
        """`is_first`: of the answers to its prompt, whose tokens count once."""
        if is_first:
            self.traffic.prompt_computed(num_prompt_tokens)
        self.latency.first_token(num_prompt_tokens, ttft_s, times, trace)
        self.slo.first_token(num_prompt_tokens, ttft_s)
        if self.vllm is not None:
            self.vllm.first_token(ttft_s)

    def sequence_ended(self, num_prompt_tokens: int, num_gaps: int, decode_s: float, trace: Exemplar) -> None:
        """`num_gaps` >= 1 times between tokens took `decode_s` together."""
        self.latency.output_token(num_prompt_tokens, decode_s / num_gaps, trace)
        self.slo.output_token(num_prompt_tokens, decode_s / num_gaps)

    def generation_ended(
        self, unique_id: str, outcome: Outcome, num_prompt_tokens: int | None, trace: Exemplar
    ) -> None:
        """`num_prompt_tokens` of its longest prompt; None when it ended before its prompts were counted."""
        self.traffic.add_generated()
        self.latency.request(outcome, self.traffic.ended(unique_id), trace)
        self.slo.request(num_prompt_tokens, outcome)
