"""Messages of an engine with a small plan, and with the largest there can be."""

import itertools
import math
from collections.abc import Sequence
from operator import attrgetter

import msgspec

from kernels.catalog import PATHS
from kernels.collective.paths import COLLECTIVE_PATHS
from kernels.experts.kinds import ExpertFormat
from kernels.experts.paths import EXPERTS_PATHS
from kernels.linear.paths import LINEAR_PATHS
from kernels.linear.shape import PLAIN
from kernels.recurrence.paths import RECURRENCE_PATHS
from kernels.vocabulary.buckets import Bucket
from kernels.vocabulary.fingerprint import Device
from kernels.vocabulary.operators import Operator
from kernels.vocabulary.path import AnyPath, Limits, Tier
from kernels.vocabulary.recurrence_operator import RECURRENCE
from kernels.vocabulary.row_buckets import LinearRows, TokenRows
from kernels.vocabulary.shape import PLANNED_PHASES, Mask, Phase
from qualification.attest.explain import TimeClass
from server.protocol.messages import (
    AttestationReport,
    AttestedBatch,
    DispatchCount,
    EngineReady,
    ExplainedTime,
    PlanRow,
    StepRecord,
)
from server.telemetry.metrics import Metrics

ROW = PlanRow(
    shape="prefill d320",
    phase="prefill",
    query_bucket="le_128",
    context_bucket="le_512",
    head_dim=320,
    path="sdpa.math",
    status="provisional",
    wanted="sdpa.cpu",
    fallback_reasons=["head_dim"],
    rejected={"sdpa.cpu": [("head_dim", "")], "sdpa.flash": [("arch", ""), ("dtype", "")], "sdpa.efficient": []},
    matrix_digest="abc",
    evidence=None,
)
READY = EngineReady(
    pid=1,
    model="m",
    max_model_len=300,
    num_pages=100,
    page_size=16,
    fingerprint={"gpu": "H200", "sm": 90, "driver": None, "torch": "2.11"},
    matrix_digest="abc",
    matrix_verdict="valid",
    plan=[ROW],
    attention_layers=4,
)
RECORD = StepRecord(
    step=7,
    started_at=1.0,
    duration_s=0.1,
    dispatches=[DispatchCount("prefill", "le_512", "sdpa.math", "provisional", "sdpa.cpu", ["head_dim"], 2, 300, 4)],
    num_running=3,
    num_waiting=2,
    num_waiting_tokens=50,
    num_pages_used=25,
    num_pages=100,
    num_preemptions=1,
    num_nonfinite=2,
    num_compiles=5,
    num_prefix_queried_tokens=40,
    num_prefix_hit_tokens=32,
)

HEAD_DIM = 128


def largest_plan(*, is_hybrid: bool = False) -> list[PlanRow]:
    """Every operator on two GPUs: all buckets, all paths that a GPU can run, each first choice wanted somewhere.

    Of attention each bucket has two shapes, of layers with and without a window, both of heads of `HEAD_DIM`, which
    most paths compute. Without the paths of `--reproducible`, whose plan has no others. A hybrid has recurrences, and
    no windows.
    """
    rows, windows = [], (False,) if is_hybrid else (False, True)
    for phase, (number, bucket), has_window in itertools.product(PLANNED_PHASES, enumerate(Bucket), windows):
        of_phase = [it for it in PATHS if phase in it.limits.phases and may_serve(it) and is_of_text(it.limits)]
        needs_window = {it.name for it in of_phase if it.limits.max_window is not None}
        able = [it.name for it in of_phase if has_window or it.name not in needs_window]
        ours = [it.name for it in of_phase if it.tier is Tier.FIRST and has_window == (it.name in needs_window)]
        if ours:
            rows.append(row_of(phase.value, bucket.value, ours[number % len(ours)], able))
    linear = [it for it in LINEAR_PATHS if may_serve(it) and PLAIN in it.limits.formats]  # others have fewer
    for few, path in itertools.product(LinearRows, linear):
        if few.lo + 1 >= path.limits.min_rows and (few.hi or math.inf) <= (path.limits.max_rows or math.inf):
            rows.append(row_of("linear", few.value, path.name, [it.name for it in linear]))
    others: list[tuple[Operator, Sequence[AnyPath]]] = [
        (Operator.EXPERTS, [it for it in EXPERTS_PATHS if ExpertFormat.PLAIN in it.limits.formats]),  # likewise
        (Operator.COLLECTIVE, COLLECTIVE_PATHS),
    ]
    for operator, paths in [*others, (RECURRENCE, RECURRENCE_PATHS)] if is_hybrid else others:
        able = [it.name for it in paths if may_serve(it)]
        ours = [it.name for it in paths if it.name in able and it.tier is Tier.FIRST]
        rows += [row_of(operator.value, it.value, ours[n % len(ours)], able) for n, it in enumerate(TokenRows)]
    return rows


def is_of_text(limits: Limits) -> bool:
    """Return whether a path computes text with heads of `HEAD_DIM` and a cache of 16 bits, which has most paths."""
    is_of_cache = limits.kv_dtypes is None
    return (
        is_of_cache
        and Mask.CAUSAL in limits.masks
        and limits.max_head_dim >= HEAD_DIM
        and HEAD_DIM % limits.head_dim_multiple == 0
    )


def may_serve(path: AnyPath) -> bool:
    return Device.CUDA in path.limits.devices and not path.is_for_order


def row_of(phase: str, bucket: str, path: str, able: list[str]) -> PlanRow:
    return msgspec.structs.replace(
        ROW, phase=phase, context_bucket=bucket, path=path, wanted=path, status="proven", fallback_reasons=[],
        rejected={name: [] for name in able if name != path},
    )  # fmt: skip


def use_everything(metrics: Metrics, *, is_hybrid: bool = False) -> None:
    """Move every series of a server on two GPUs with the largest plan."""
    rows = largest_plan(is_hybrid=is_hybrid)
    metrics.traffic.create_routes(f"/route/{i}" for i in range(18))
    metrics.on_ready(msgspec.structs.replace(READY, max_model_len=1_000_000, plan=rows))
    seconds = {it.value: 1.0 for it in TimeClass}
    explained = ExplainedTime(1.0, seconds, {}, {})
    batches = [AttestedBatch(phase.value, [], True, {}, "match", None, explained) for phase in PLANNED_PHASES]
    metrics.on_attestation(AttestationReport("start", "match", 0.0, 0.0, batches, []))
    for row in rows:
        if row.phase not in list(map(attrgetter("value"), Phase)):
            continue
        count = DispatchCount(row.phase, row.context_bucket, "sdpa.math", "proven", row.wanted, ["failed"], 1, 1, 1)
        metrics.on_step(msgspec.structs.replace(RECORD, dispatches=[count]))
        metrics.operators.measured(row.phase, row.context_bucket, kernel_s=1e-3, flops=1e9, hbm_bytes=1e9)
        metrics.operators.peaked(row.phase, 1 << 30)
