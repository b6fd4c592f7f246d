"""What an engine says: of a small plan, and of the largest there can be."""

import itertools
import math

import msgspec

from kernels.buckets import Bucket
from kernels.catalog import PATHS
from kernels.fingerprint import Device
from kernels.linear.paths import LINEAR_PATHS
from kernels.path import Tier
from kernels.row_buckets import ExpertRows, LinearRows
from kernels.shape import Phase
from server.protocol.messages import DispatchCount, EngineReady, PlanRow, StepRecord
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


def use_everything(metrics: Metrics) -> None:
    """Every path of the catalog that a GPU can run, each of ours wanted somewhere, every bucket, every series used."""
    rows = []
    for phase, (number, bucket) in itertools.product(Phase, enumerate(Bucket)):
        of_phase = [it for it in PATHS if phase in it.limits.phases and Device.CUDA in it.limits.devices]
        able = [it for it in of_phase if it.limits.max_window is None]  # ROW has no window
        ours = [it.name for it in able if it.tier is Tier.FIRST]
        path = ours[number % len(ours)]
        rejected: dict[str, list[tuple[str, str]]] = {it.name: [] for it in able if it.name != path}
        changes = {"phase": phase.value, "context_bucket": bucket.value, "path": path, "wanted": path}
        rows.append(msgspec.structs.replace(ROW, **changes, fallback_reasons=[], status="proven", rejected=rejected))
    for tokens in ExpertRows:  # of a mixture of experts
        changes = {"phase": "experts", "context_bucket": tokens.value, "path": "triton.experts", "fallback_reasons": []}
        others: dict[str, list[tuple[str, str]]] = {"torch.experts": [], "gluon.experts.hopper": []}
        row = msgspec.structs.replace(ROW, **changes, wanted="triton.experts", status="proven", head_dim=None)
        rows.append(msgspec.structs.replace(row, rejected=others))
    for few, path in itertools.product(LinearRows, LINEAR_PATHS):
        if few.lo + 1 < path.limits.min_rows or (few.hi or math.inf) > (path.limits.max_rows or math.inf):
            continue
        changes = {"phase": "linear", "context_bucket": few.value, "path": path.name, "wanted": path.name}
        others = {it.name: [] for it in LINEAR_PATHS if it is not path}
        row = msgspec.structs.replace(ROW, **changes, fallback_reasons=[], status="proven", head_dim=None)
        rows.append(msgspec.structs.replace(row, rejected=others))
    metrics.traffic.create_routes(f"/route/{i}" for i in range(18))
    metrics.on_ready(msgspec.structs.replace(READY, max_model_len=1_000_000, plan=rows))
    for row in rows:
        if row.head_dim is None:
            continue
        count = DispatchCount(row.phase, row.context_bucket, "sdpa.math", "proven", row.wanted, ["failed"], 1, 1, 1)
        metrics.on_step(msgspec.structs.replace(RECORD, dispatches=[count]))
        metrics.attention.measured(row.phase, row.context_bucket, kernel_s=1e-3, flops=1e9, hbm_bytes=1e9)
        metrics.attention.peaked(row.phase, 1 << 30)
