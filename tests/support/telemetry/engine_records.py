"""Messages of an engine with a small plan, and with the largest there can be."""

import itertools
import math
from collections.abc import Sequence
from operator import attrgetter

import msgspec

from kernels.catalog import ALL_PATHS, PATHS
from kernels.collective.paths import COLLECTIVE_PATHS
from kernels.experts.kinds import ExpertFormat
from kernels.experts.paths import EXPERTS_PATHS
from kernels.experts.shape import ExpertForm
from kernels.linear.paths import LINEAR_PATHS
from kernels.linear.shape import PLAIN
from kernels.vocabulary.buckets import Bucket
from kernels.vocabulary.fingerprint import Device, Fingerprint
from kernels.vocabulary.operators import Operator
from kernels.vocabulary.path import AnyPath, Limits, Tier
from kernels.vocabulary.row_buckets import LinearRows, TokenRows
from kernels.vocabulary.shape import PLANNED_PHASES, Mask, Phase
from qualification.attest.explain import TimeClass
from qualification.decision.decision import Book, Pairs, Policy, decide
from qualification.decision.defaults import Choices, limits_of
from qualification.decision.model_shapes import plan_shapes
from qualification.decision.presets import preset_named
from qualification.model.draft_head import DRAFT_HEAD, with_draft_head
from qualification.model.families.reader import read_model
from qualification.model.families.towers import with_known_tower
from qualification.model.gated_delta import with_drafted_tokens
from qualification.model.shard import shard_of
from server.protocol.messages import (
    AttestationReport,
    AttestedBatch,
    DispatchCount,
    DraftsPlan,
    EngineReady,
    ExplainedTime,
    PlanRow,
    StateSlots,
    StepRecord,
)
from server.protocol.plan_rows import TOWER, plan_rows
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
H200 = Fingerprint(Device.CUDA, "NVIDIA H200", 90, "580.159.04", "13.0", "91900", "2.11.0", "3.6.0")


def hybrid_plan() -> list[PlanRow]:
    """Qwen3.5-35B-A3B with its tower and its draft head on two H200s, every wanted path proven."""
    text = dict(preset_named("qwen3.5-35b-a3b").config)
    vision = {"hidden_size": 1152, "num_heads": 16, "spatial_merge_size": 2, "out_hidden_size": text["hidden_size"]}
    config: dict[str, object] = {
        "model_type": "qwen3_5_moe", "architectures": ["Qwen3_5MoeForConditionalGeneration"], "text_config": text,
        "vision_config": vision, "image_token_id": 5, "vision_start_token_id": 6, "vision_end_token_id": 7,
    }  # fmt: skip
    whole = with_draft_head(with_drafted_tokens(with_known_tower(read_model(config), config), 3))
    part = shard_of(whole, 0, 2).local_config
    shapes = plan_shapes(part, limits_of(part, "cuda", Choices(max_drafted_tokens=3)), "cuda", 2)
    none: Pairs = frozenset()
    decisions = [
        decide(it, paths=ALL_PATHS, fingerprint=H200, book=Book(), quarantined=none, policy=Policy.DEGRADE)
        for it in shapes
    ]
    rows = []
    for row in plan_rows(decisions, {}):
        rejected = {path: [it for it in why if it[0] != "unproven"] for path, why in row.rejected.items()}
        rejected.pop(row.wanted, None)
        proven = msgspec.structs.replace(row, path=row.wanted, status="proven", fallback_reasons=[], rejected=rejected)
        rows.append(proven)
    return rows


def largest_plan(*, is_capped: bool = False) -> list[PlanRow]:
    """Every operator on two GPUs: all buckets, all paths that a GPU can run, each first choice wanted somewhere.

    Of attention each bucket has two shapes, of layers with and without a window, both of heads of `HEAD_DIM`, which
    most paths compute. Without the paths of `--reproducible`, whose plan has no others. Where experts have a bounded
    activation, too (Step 3.5), windows are of 512, of which no path for narrow ones takes any.
    """
    rows, windows = [], (False,) if is_capped else (False, True)
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
    forms = (ExpertForm.GATED, ExpertForm.CAPPED) if is_capped else (ExpertForm.GATED,)
    plain = [it for it in EXPERTS_PATHS if ExpertFormat.PLAIN in it.limits.formats]  # likewise
    others: list[tuple[Operator, Sequence[AnyPath]]] = [
        *((Operator.EXPERTS, [it for it in plain if it.limits.form is of]) for of in forms),
        (Operator.COLLECTIVE, COLLECTIVE_PATHS),
    ]
    for operator, paths in others:
        able = [it.name for it in paths if may_serve(it)]
        ours = [it.name for it in paths if it.name in able and it.tier is Tier.FIRST]
        rows += [row_of(operator.value, it.value, ours[n % len(ours)], able) for n, it in enumerate(TokenRows)]
    return rows


def is_of_text(limits: Limits) -> bool:
    """Return whether a path computes text with heads of `HEAD_DIM` and a cache of 16 bits, which has most paths."""
    is_of_cache = limits.kv_dtypes is None and limits.max_values is None
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


def use_everything(metrics: Metrics, *, is_hybrid: bool = False, is_capped: bool = False) -> None:
    """Move every series of a server on two GPUs with the largest plan, or that of a hybrid that sees and drafts.

    is_capped   of the largest plan with a bounded activation of experts
    """
    rows = hybrid_plan() if is_hybrid else largest_plan(is_capped=is_capped)
    phases, ready = [it.value for it in PLANNED_PHASES], msgspec.structs.replace(READY, max_model_len=1_000_000)
    if is_hybrid:
        phases += [Phase.VERIFY.value, TOWER, DRAFT_HEAD]
        ready = msgspec.structs.replace(ready, states=StateSlots(300, 44, 1), drafts=DraftsPlan("mtp", 3, 32))
    metrics.traffic.create_routes(f"/route/{i}" for i in range(18))
    metrics.on_ready(msgspec.structs.replace(ready, plan=rows))
    seconds = {it.value: 1.0 for it in TimeClass}
    explained = ExplainedTime(1.0, seconds, {}, {})
    batches = [AttestedBatch(phase, [], True, {}, "match", None, explained) for phase in phases]
    metrics.on_attestation(AttestationReport("start", "match", 0.0, 0.0, batches, []))
    for row in rows:
        if row.phase not in list(map(attrgetter("value"), Phase)):
            continue
        count = DispatchCount(row.phase, row.context_bucket, "sdpa.math", "proven", row.wanted, ["failed"], 1, 1, 1)
        metrics.on_step(msgspec.structs.replace(RECORD, dispatches=[count]))
        metrics.operators.measured(row.phase, row.context_bucket, kernel_s=1e-3, flops=1e9, hbm_bytes=1e9)
        metrics.operators.peaked(row.phase, 1 << 30)
