"""The metrics: names, labels that exist from the start, and what is counted."""

import itertools

import msgspec
import pytest
from msgspec.structs import replace as changed
from prometheus_client import CollectorRegistry

from kernels.linear.library.fallback_reason import MatmulFallback
from kernels.vocabulary.operators import Operator
from kernels.vocabulary.path import Reject
from kernels.vocabulary.shape import PLANNED_PHASES
from qualification.attest.explain import TimeClass
from server.protocol.liveness import DeathCause
from server.protocol.messages import (
    AttestationReport,
    AttestedBatch,
    EngineReady,
    ExplainedTime,
    Heartbeat,
    LayersReport,
    LayersStatus,
    ReplayReport,
    ShadowReport,
    StepRecord,
    TowerTime,
)
from server.telemetry.factory import MAX_SAMPLES, ladder
from server.telemetry.metrics import Metrics
from server.telemetry.operators import fingerprint_digest
from server.telemetry.outcomes import Attestation, DisconnectStage, OomStage, Outcome, RejectedFor, Shadow, Sli
from support.scraped import scraped, scraped_value
from support.telemetry.engine_records import READY, RECORD, use_everything


class Clock:
    def __init__(self) -> None:
        self.seconds = 100.0

    def __call__(self) -> float:
        return self.seconds


def make(clock: Clock | None = None) -> Metrics:
    return Metrics("m", CollectorRegistry(), version="1.0", now=clock or Clock())


def value(metrics: Metrics, name: str, **labels: str) -> float | None:
    return scraped_value(metrics.registry, f"hallmark_{name}", labels)


def num_fallbacks(metrics: Metrics, to: str = "sdpa.math", reason: str = "head_dim") -> float | None:
    labels = {"model": "m", "phase": "prefill", "from": "sdpa.cpu", "to": to, "reason": reason}
    return value(metrics, "attention_fallback_total", **labels)


def num_samples(metrics: Metrics) -> int:
    return sum(len(family.samples) for family in scraped(metrics.registry))


def test_every_possible_fallback_is_at_zero_from_the_start() -> None:
    metrics = make()
    metrics.on_ready(READY)
    reasons = (Reject.HEAD_DIM, Reject.QUARANTINED)  # the plan's own reason, and the one that may come in service
    for path, reason in itertools.product(("sdpa.math", "sdpa.cpu", "sdpa.efficient", "sdpa.flash"), reasons):
        can_serve = path in ("sdpa.math", "sdpa.efficient")  # the others cannot compute the shape
        assert num_fallbacks(metrics, to=path, reason=reason.value) == (0 if can_serve else None)
    assert num_fallbacks(metrics, reason="sinks") is None  # a limit that the path does not have
    assert num_fallbacks(metrics, to="sdpa.flash", reason="arch") is None  # this machine cannot run it
    metrics.on_death("killed")
    row = msgspec.structs.replace(READY.plan[0], fallback_reasons=["stale"])
    metrics.on_ready(msgspec.structs.replace(READY, plan=[row]))
    assert num_fallbacks(metrics, reason="stale") == 0  # of the plan after a restart


def test_a_step_is_counted_under_the_decisions_it_used() -> None:
    metrics = make()
    metrics.on_ready(READY)
    dispatch = {"model": "m", "phase": "prefill", "bucket": "le_512", "path": "sdpa.math", "status": "provisional"}
    assert value(metrics, "attention_dispatch_total", **dispatch) == 0
    assert value(metrics, "attention_launches_total", path="sdpa.math") == 0
    metrics.on_step(RECORD)
    metrics.on_step(RECORD)
    assert value(metrics, "attention_dispatch_total", **dispatch) == 2
    assert num_fallbacks(metrics) == 2
    assert value(metrics, "qualification_shapes", status="provisional") == 1
    assert value(metrics, "qualification_shapes", status="proven") == 0
    assert value(metrics, "attention_launches_total", path="sdpa.math") == 8
    assert value(metrics, "engine_steps_total") == 2
    assert value(metrics, "requests_running") == 3
    assert value(metrics, "requests_waiting") == 2
    assert value(metrics, "kv_cache_usage_ratio") == 0.25
    assert value(metrics, "preemptions_total") == 2
    assert value(metrics, "prefix_cache_queried_tokens_total") == 80
    assert value(metrics, "prefix_cache_hit_tokens_total") == 64
    assert value(metrics, "nonfinite_logits_total") == 4
    metrics.on_death("killed")
    for name in ("requests_running", "requests_waiting", "kv_cache_usage_ratio"):
        assert value(metrics, name) == 0


LAYERS = {status: changed(READY, layers=LayersReport(status, "")) for status in LayersStatus}
REPLAY = ReplayReport("match", 0.0, "hit", None, None, 5, 0.1, None, 0.25)
SHADOW = ShadowReport("mismatch", 1.0, "decode", "p", 0, 0, 0, 1, 2.0, "", 0.25, [])
LOST_MEMORY = changed(READY, matmul_fallbacks={MatmulFallback.OUT_OF_MEMORY: 1})


@pytest.mark.parametrize(
    ("events", "counts"),
    [
        # Kernels that are compiled before the engine is ready are no alarm.
        ([RECORD], {"kernel_compiles_total{after_ready=false}": 5, "kernel_compiles_total{after_ready=true}": 0}),
        ([RECORD, changed(READY, num_compiles=30), RECORD],
            {"kernel_compiles_total{after_ready=false}": 35, "kernel_compiles_total{after_ready=true}": 5}),
        ([READY], {f"matmul_fallback_total{{reason={reason.value}}}": 0 for reason in MatmulFallback}),
        ([LOST_MEMORY, "exited", LOST_MEMORY, "exited", READY,
            changed(RECORD, matmul_fallbacks={MatmulFallback.ROWS_REFUSED: 3})],
            {"matmul_fallback_total{reason=out_of_memory}": 2, "matmul_fallback_total{reason=rows_refused}": 3,
             "matmul_fallback_total{reason=library_missing}": 0}),
        ([READY], {"peer_memory_refused_total": 0}),
        ([READY, changed(READY, has_peer_memory=False)], {"peer_memory_refused_total": 1}),
        ([RECORD, Heartbeat(8, 1.0, 0, 0)], {"requests_running": 0, "requests_waiting": 0}),
        ([], {"engine_up": 0, "images_total": 0}),
        ([READY], {"engine_up": 1, **{f"engine_restarts_total{{cause={cause.value}}}": 0 for cause in DeathCause}}),
        ([READY, "killed"], {"engine_up": 0, "engine_restarts_total{cause=killed}": 1}),
        ([changed(RECORD, tower_times=[TowerTime(1, 66, 0.25), TowerTime(3, 30, 0.5)])],
            {"images_total": 4, "image_tokens_total": 96, "tower_seconds_total": 0.75}),
        *(([*LAYERS.values(), LAYERS[status]],
            {f"layers_status{{status={it.value}}}": it is status for it in LayersStatus}) for status in LayersStatus),
        ([changed(RECORD, oom_stage="decode"), RECORD], {"gpu_oom_total{stage=decode}": 1}),
        ([REPLAY, changed(REPLAY, cause="cache"), changed(REPLAY, result="skipped", num_tokens=0),
            changed(RECORD, num_page_mismatches=2)],
            {"replays_total{route=hit}": 2, "replay_mismatches_total": 1, "kv_page_mismatches_total": 2,
             "shadow_seconds_total": 0.75}),
        ([], {f"shadow_checks_total{{phase={phase.value},result={result.value}}}": 0
            for phase in (*PLANNED_PHASES, Operator.LINEAR) for result in Shadow}),
        ([SHADOW, changed(SHADOW, spent_s=0.5)],
            {"shadow_checks_total{phase=decode,result=mismatch}": 2, "shadow_seconds_total": 0.75}),
    ],
)  # fmt: skip
def test_what_the_engine_tells_is_counted(events: list[object], counts: dict[str, float]) -> None:
    metrics = make()
    take = {
        StepRecord: metrics.on_step, EngineReady: metrics.on_ready, Heartbeat: metrics.on_heartbeat,
        ReplayReport: metrics.on_replay, ShadowReport: metrics.on_shadow, str: metrics.on_death,
    }  # fmt: skip
    for event in events:
        take[type(event)](event)
    for sample, count in counts.items():
        name, _, labels = sample.rstrip("}").partition("{")
        assert value(metrics, name, **dict(label.split("=") for label in labels.split(",") if label)) == count, sample


def test_a_restarted_engine_replaces_the_machine_it_reports() -> None:
    metrics = make()
    metrics.on_ready(READY)
    newer = msgspec.structs.replace(READY, fingerprint=READY.fingerprint | {"driver": "580.1"})
    metrics.on_ready(newer)
    samples = [s for family in scraped(metrics.registry) for s in family.samples if s.name == "hallmark_build_info"]
    assert len(samples) == 1
    assert samples[0].labels == {
        "version": "1.0",
        "fingerprint": fingerprint_digest(newer.fingerprint),
        "gpu": "H200",
        "sm": "90",
        "driver": "580.1",
        "cuda": "none",
        "torch": "2.11",
        "triton": "none",
    }
    assert fingerprint_digest(newer.fingerprint) != fingerprint_digest(READY.fingerprint)


def test_the_oldest_request_without_an_end_is_shown() -> None:
    clock = Clock()
    metrics = make(clock)
    assert value(metrics, "oldest_inflight_seconds") == 0
    metrics.traffic.began("a", 100.0)
    metrics.traffic.began("b", 103.0)
    clock.seconds = 105.0
    assert value(metrics, "oldest_inflight_seconds") == 5
    metrics.generation_ended("a", Outcome.OK, 10, None)
    assert value(metrics, "oldest_inflight_seconds") == 2
    metrics.generation_ended("b", Outcome.REJECTED, None, None)
    assert value(metrics, "request_duration_seconds_count", model="m", outcome="rejected") is None
    assert value(metrics, "request_duration_seconds_sum", model="m", outcome="ok") == 5


@pytest.mark.parametrize("factor", [1.1, 1.7, 3])
def test_a_ladder_covers_its_range_in_steps_of_its_factor(factor: float) -> None:
    edges = ladder(0.002, 60, factor)
    assert edges[0] == 0.002
    assert edges[-2] < 60 <= edges[-1]
    assert all(b / a == pytest.approx(factor, rel=0.02) for a, b in itertools.pairwise(edges))


def test_the_largest_plan_stays_below_1000_samples() -> None:
    for is_hybrid, is_capped in ((False, False), (False, True), (True, False)):
        metrics = make()
        use_everything(metrics, is_hybrid=is_hybrid, is_capped=is_capped)
        assert 800 < num_samples(metrics) <= MAX_SAMPLES


def test_counters_of_closed_labels_start_at_zero() -> None:
    metrics = make()
    for stage in OomStage:
        assert value(metrics, "gpu_oom_total", stage=stage.value) == 0
    for result in Attestation:
        assert value(metrics, "attestation_total", result=result.value) == 0
    for reason in RejectedFor:
        assert value(metrics, "rejected_total", reason=reason.value) == 0
    for left in DisconnectStage:
        assert value(metrics, "client_disconnects_total", stage=left.value) == 0
    for after_ready in ("false", "true"):
        assert value(metrics, "kernel_compiles_total", after_ready=after_ready) == 0


def test_every_objective_of_every_bucket_has_its_events_at_zero() -> None:
    metrics = make()
    metrics.on_ready(READY)
    for bucket, sli, result in itertools.product(("le_128", "le_512"), Sli, ("good", "bad")):
        labels = {"model": "m", "bucket": bucket, "sli": sli.value, "result": result}
        assert value(metrics, "slo_events_total", **labels) == 0


def test_an_attestation_is_counted() -> None:
    metrics = make()
    metrics.operators.attested(Attestation.MISMATCH)
    assert value(metrics, "attestation_total", result="mismatch") == 1


def test_the_time_of_a_phase_is_that_of_its_batches_by_class() -> None:
    def batch(evidence: float, unexplained: float) -> AttestedBatch:
        seconds = {"evidence": evidence, "named": 0.0, "unproven": 0.0, "unexplained": unexplained}
        return AttestedBatch("decode", [], True, {}, "match", None, ExplainedTime(1.0, seconds, {}, {}))

    metrics = make()
    assert value(metrics, "forward_time_ratio", phase="decode", **{"class": "unexplained"}) is None
    without = AttestedBatch("prefill", [], True, {}, "match", None)
    metrics.on_attestation(AttestationReport("start", "match", 0.0, 0.0, [batch(2, 0), batch(1, 1), without], []))
    shares = [value(metrics, "forward_time_ratio", phase="decode", **{"class": it.value}) for it in TimeClass]
    assert shares == [0.75, 0.0, 0.0, 0.25]
    assert value(metrics, "forward_time_ratio", phase="prefill", **{"class": "evidence"}) is None


def test_a_sampled_step_says_how_fast_attention_was() -> None:
    metrics = make()
    assert value(metrics, "attention_achieved_tflops", phase="prefill", bucket="le_512") is None  # not 0: not measured
    metrics.operators.measured("prefill", "le_512", kernel_s=0.002, flops=1e12, hbm_bytes=4e9)
    metrics.operators.measured("prefill", "le_512", kernel_s=0.001, flops=0.5e12, hbm_bytes=3e9)
    labels = {"phase": "prefill", "bucket": "le_512"}
    assert value(metrics, "attention_achieved_tflops", **labels) == pytest.approx(500)
    assert value(metrics, "attention_achieved_bytes_per_second", **labels) == pytest.approx(3e12)
    assert value(metrics, "attention_sampled_kernel_seconds_total", phase="prefill") == pytest.approx(0.003)
    assert value(metrics, "attention_sampled_hbm_bytes_total", phase="prefill") == pytest.approx(7e9)
    metrics.operators.measured("decode", "le_512", kernel_s=0.001, flops=1e9, hbm_bytes=1e9)
    labels["phase"] = "decode"
    assert value(metrics, "attention_achieved_bytes_per_second", **labels) == pytest.approx(1e12)
    assert value(metrics, "attention_achieved_tflops", **labels) is None  # memory bounds it


def test_the_peak_of_temporary_memory_stays() -> None:
    metrics = make()
    metrics.operators.peaked("prefill", 100)
    metrics.operators.peaked("prefill", 50)
    assert value(metrics, "peak_temporary_bytes", phase="prefill") == 100


def test_the_labels_of_a_changed_plan_start_at_zero() -> None:
    metrics = make()
    metrics.on_ready(READY)
    row = msgspec.structs.replace(
        READY.plan[0], path="sdpa.math", wanted="sdpa.cpu", fallback_reasons=["operator_override"], status="stale"
    )
    metrics.on_plan([row])
    assert value(metrics, "fallback_shapes") == 1
    assert num_fallbacks(metrics, reason="operator_override") == 0
    assert value(metrics, "qualification_shapes", status="stale") == 1
