"""Write docs/metrics.md from the code: every metric, its labels with their values, the objectives. A test compares it.

.venv/bin/python docs/metrics_page.py
"""

from enum import Enum
from pathlib import Path

from prometheus_client import CollectorRegistry

from kernels.linear.library.fallback_reason import MatmulFallback
from kernels.vocabulary.buckets import Bucket
from kernels.vocabulary.operators import Operator
from kernels.vocabulary.path import Reject
from kernels.vocabulary.recurrence_operator import CONVOLUTION, RECURRENCE
from kernels.vocabulary.row_buckets import TokenRows
from kernels.vocabulary.shape import PLANNED_PHASES, Phase
from qualification.attest.explain import TimeClass
from qualification.decision.decision import Status
from server.protocol.liveness import DeathCause
from server.protocol.plan_rows import TOWER
from server.protocol.served_answer import Route
from server.telemetry.factory import MAX_SAMPLES, Declaration
from server.telemetry.latency import DURATION_EDGES, FINE_TTFT_S, TIMED_OUTCOMES, TPOT_EDGES, TTFT_EDGES
from server.telemetry.metrics import Metrics
from server.telemetry.objectives import DEFAULT_OBJECTIVES
from server.telemetry.outcomes import (
    Attestation,
    DisconnectStage,
    DraftPlace,
    OomStage,
    Outcome,
    RejectedFor,
    Restore,
    Shadow,
    Sli,
    SlotContent,
)
from server.telemetry.slo import UNKNOWN_BUCKET
from server.telemetry.vllm_names import MAX_VLLM_SAMPLES

PAGE = Path(__file__).resolve().parent / "metrics.md"

PHASES = Enum("PHASES", {it.name: it.value for it in PLANNED_PHASES})
# Where the values of a label are a closed set; those of two metrics' labels of one name may differ.
CLOSED: dict[str, type[Enum]] = {
    "bucket": Bucket,
    "phase": PHASES,
    "outcome": Outcome,
    "sli": Sli,
    "cause": DeathCause,
    "status": Status,
    "class": TimeClass,
    "content": SlotContent,
    "place": DraftPlace,
}
# Of decisions: attention's, and those of the operators beside it.
_CHECKED = (*PLANNED_PHASES, Phase.VERIFY, Operator.LINEAR, Operator.EXPERTS, RECURRENCE, CONVOLUTION)
SHADOW_PHASES = Enum("SHADOW_PHASES", {it.name: it.value for it in _CHECKED} | {"TOWER": TOWER})
PLAN_PHASES = Enum("PLAN_PHASES", {it.name: it.value for it in (*SHADOW_PHASES, Operator.COLLECTIVE)})
PLAN_BUCKETS = Enum("PLAN_BUCKETS", {it.value: it.value for it in (*Bucket, *TokenRows)})
CLOSED_OF_METRIC: dict[tuple[str, str], type[Enum]] = {
    ("hallmark_attention_dispatch_total", "phase"): PLAN_PHASES,
    ("hallmark_attention_dispatch_total", "bucket"): PLAN_BUCKETS,
    ("hallmark_attention_fallback_total", "phase"): PLAN_PHASES,
    ("hallmark_attention_fallback_total", "reason"): Reject,
    ("hallmark_matmul_fallback_total", "reason"): MatmulFallback,
    ("hallmark_request_duration_seconds", "outcome"): Enum("TIMED", {it.name: it.value for it in TIMED_OUTCOMES}),
    ("hallmark_rejected_total", "reason"): RejectedFor,
    ("hallmark_client_disconnects_total", "stage"): DisconnectStage,
    ("hallmark_gpu_oom_total", "stage"): OomStage,
    ("hallmark_attestation_total", "result"): Attestation,
    ("hallmark_shadow_checks_total", "phase"): SHADOW_PHASES,
    ("hallmark_shadow_checks_total", "result"): Shadow,
    ("hallmark_replays_total", "route"): Route,
    ("hallmark_state_restores_total", "result"): Restore,
}
OPEN = {
    "model": "the name of the one model served",
    "path": "a kernel path of the catalog",
    "from": "the path that was wanted",
    "to": "the path that served",
    "route": "a route of the API, or `other`",
    "key": "the name of an API key, of 20 at most, or `other`",
    "after_ready": "`true` or `false`",
    "result": "`good` or `bad`",
    "digest": "of the matrix, or `none`",
    "verdict": "on the matrix",
    "version": "of Hallmark",
    "fingerprint": "twelve digits that change with any field of the machine or its software",
    **dict.fromkeys(("gpu", "sm", "driver", "cuda", "torch", "triton"), "as the machine reports it, or `none`"),
}


def families() -> tuple[Declaration, ...]:
    """Every metric that the server declares, in the order of the registry."""
    return Metrics("model", CollectorRegistry(), version="0").declarations


def vllm_families() -> tuple[Declaration, ...]:
    """Metrics that `--metrics-compat vllm` adds."""
    return Metrics("model", CollectorRegistry(), version="0", has_vllm_names=True).vllm_declarations


def table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    lines = [head, tuple("---" for _ in head), *rows]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


def metrics_table(declared: tuple[Declaration, ...]) -> str:
    """Name, type, labels and meaning of every metric."""
    rows = []
    for family in declared:
        labels = " ".join(f"`{label}`" for label in family.labels)
        rows.append((f"`{family.name}`", family.kind, labels, family.text))
    return table(("metric", "type", "labels", "meaning"), rows)


def labels_table() -> str:
    """Table of each label, where it is used, and its values."""
    used: dict[tuple[str, str], list[str]] = {}
    for family in families():
        for label in family.labels:
            used.setdefault((label, _values(family.name, label)), []).append(family.name)
    every = {label: sum(len(names) for (other, _), names in used.items() if other == label) for label, _ in used}
    rows = []
    for (label, values), names in sorted(used.items()):
        where = "" if len(names) == every[label] else " ".join(f"`{name}`" for name in names)
        rows.append((f"`{label}`", values, where))
    return table(("label", "values", "of"), rows)


def _values(metric: str, label: str) -> str:
    closed = CLOSED_OF_METRIC.get((metric, label), CLOSED.get(label))
    if closed is None or (label == "result" and (metric, label) not in CLOSED_OF_METRIC):
        return OPEN[label]
    values = [str(member.value) for member in closed]
    if metric == "hallmark_slo_events_total" and label == "bucket":
        values.append(UNKNOWN_BUCKET)
    return " ".join(f"`{value}`" for value in values)


def objectives_table() -> str:
    it = DEFAULT_OBJECTIVES
    rows = [(f"`{b.label}`", f"{it.ttft.seconds[b]:g} s", f"{it.tpot.seconds[b]:g} s") for b in Bucket]
    targets = ("share that must be good", f"{it.ttft.target:.1%}", f"{it.tpot.target:.1%}")
    return table(("bucket", "ttft", "tpot"), [*rows, targets])


def page() -> str:
    return f"""# Metrics

Written by `docs/metrics_page.py` from the code; do not edit. `GET /metrics` has them in Prometheus' text
format, and in OpenMetrics where the scraper asks for it, with exemplars that lead from a bucket to a trace. A
server shows at most {MAX_SAMPLES} samples, sums over the ranks of several GPUs included, besides two for each API
key. Label sets that are known in advance exist at 0 from the start, or from the moment the engine is ready where
they follow from its plan: a counter that first appears with the value 1 is invisible to `increase()`. Gauges of
something measured appear with their first measurement, for 0 would be a measurement.

{metrics_table(families())}

## Histograms

Each edge of a histogram is a sample for each of its label sets, so edges are few. Only the time to the first token is
read to a few percent: its edges go from {1000 * TTFT_EDGES[0]:g} ms to {TTFT_EDGES[-1]:g} s, in steps of x1.1 from
{1000 * FINE_TTFT_S[0]:g} ms to {FINE_TTFT_S[1]:g} s, of x1.4 below, where a quantile
may be off by a fifth, and of x2 above, where it may be off by a factor of 2. The time
per output token has steps of x1.7 from {1000 * TPOT_EDGES[0]:g} to {1000 * TPOT_EDGES[-1]:g} ms. The prefill has
steps of x10 and the queue of x5, enough to see which of them is slow, and the whole request has edges at
{", ".join(f"{edge:g}" for edge in DURATION_EDGES)} s, for it depends most on the length of its answer.

## Left out

The limit of {MAX_SAMPLES} samples holds for a plan with every path of every operator, on several GPUs. For it these
are not there, the least useful ones: `hallmark_attention_sampled_kernel_seconds_total` by bucket (the achieved rates
have the bucket), `hallmark_attention_achieved_tflops` of decode (memory bounds it, and the bytes a second are there),
`hallmark_request_duration_seconds` of requests that were refused (they take no time that anybody asks for, and
`hallmark_requests_total` counts them), the finer edges of prefill and queue, and most contexts of drafted tokens that
are verified and of a tower, which are counted under `le_2k`, `le_32k` and `gt_128k`: one path serves all of them.

## Labels

{labels_table()}

## Objectives

`hallmark_slo_events_total` counts every event exactly, as good or bad. An event of `ttft` is a prompt's first
token; it is bad when it comes late, when we end the request before it, and when the client leaves after having
waited longer than the objective. An event of `tpot` is an answer of two tokens or more, with its mean time
between tokens. An event of `availability` is a request to generate; it is good when it is answered whole, bad
when we answer with 429 or 5xx or break off, and none when the client erred or left. Its bucket is that of the
longest prompt, `{UNKNOWN_BUCKET}` where the request ended before its tokens were counted.

{objectives_table()}

`availability`: {DEFAULT_OBJECTIVES.availability.target:.1%} of requests. `--slo-file` takes a TOML or JSON file
that changes any of these; what it does not name stays:

```toml
[ttft]
target = 0.95
[ttft.seconds]
le_128 = 0.2
le_512 = 0.25
[availability]
target = 0.9995
```

The objectives in force are metrics themselves (`hallmark_slo_objective_seconds`, `hallmark_slo_target_ratio`),
so that no rule repeats them: the burn rate of a bucket's TTFT over an hour is

```promql
sum by (bucket) (rate(hallmark_slo_events_total{{sli="ttft",result="bad"}}[1h]))
  / sum by (bucket) (rate(hallmark_slo_events_total{{sli="ttft"}}[1h]))
  / on () group_left () (1 - max(hallmark_slo_target_ratio{{sli="ttft"}}))
```

## vLLM's names

`--metrics-compat vllm` adds these, of {MAX_VLLM_SAMPLES} samples at most, for [routers](routers.md) and schedulers that
read them. Types, labels and bucket edges are vLLM's, and so is what is counted: a request of `n` answers is `n`
sequences, and every gap between two tokens is measured, not their mean. `model_name` is the name of the model in the
API and `engine` is `0`.

{metrics_table(vllm_families())}
"""


if __name__ == "__main__":
    PAGE.write_text(page())
