"""Operators beside attention in an engine: decided in its plan, counted by path, refused with the reason, replaced."""

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from kernels.catalog import ALL_PATHS, any_path_named
from kernels.experts.shape import ExpertsShape
from kernels.linear.shape import LinearShape
from kernels.recurrence.eager_path import run_recurrence_eager
from kernels.recurrence.shape import RecurrenceShape
from kernels.vocabulary.operators import RowsShape
from kernels.vocabulary.path import Reject
from kernels.vocabulary.recurrence_operator import RECURRENCE
from kernels.vocabulary.row_buckets import LinearRows
from kernels.vocabulary.shape import Phase
from qualification.attest.operator_promises import operator_mismatches
from qualification.attest.promise import promise_of
from qualification.decision.decision import Policy, Status
from qualification.decision.reviewed import reviewed_gpus, unproven_operators
from qualification.measure.faults.experts_faults import ExpertsFault, wrong_experts
from qualification.measure.faults.linear_faults import LinearFault, wrong_linear
from qualification.measure.qualify import Bench, Pair
from server.engine.operators.rows_table import StepSizes, phase_of_step
from server.engine.startup.builder import BuiltEngine
from server.engine.startup.plan import Unservable
from server.protocol.messages import PlanRow
from support.engine.one_operator import HYBRID, MIXTURE, PRODUCTS, measuring, proving, serve, small_engine
from support.qualification_fakes import checks, evidence

PRODUCT_KINDS = ("in24 out48 bias", "in24 out24", "in24 out40 swiglu", "in40 out24", "in24 out97")
RECURRENT = "fp32/state-fp32 h1:2 d8:16 conv4"


@dataclass(frozen=True)
class Kind:
    """An operator of a small model: the path that serves it on a CPU, its shapes and its launches in a step."""

    config: Mapping[str, object]
    path: str
    shapes: tuple[str, ...]
    num_launches: int
    of: type[RowsShape]
    measure: Callable[..., None]


KINDS = {
    "linear": Kind(
        PRODUCTS,
        "torch.linear",
        tuple(f"linear fp32 plain {kind} r-{rows}" for kind in PRODUCT_KINDS for rows in ("le_1", "le_8", "le_16")),
        2 * 4 + 1,  # qkv, output, gate_up and down of two layers, and once the head
        LinearShape,
        measuring(LinearShape),
    ),
    "experts": Kind(
        MIXTURE,
        "torch.experts.cpu",
        tuple(f"experts fp32 plain e5:2 h24 w20 silu r-{rows}" for rows in ("le_16", "le_128")),
        2,  # of 3 layers
        ExpertsShape,
        measuring(ExpertsShape),
    ),
    "recurrence": Kind(
        HYBRID,
        "torch.recurrence.cpu",
        tuple(
            f"recurrence {phase} {RECURRENT} r-{rows}"
            for phase, rows in (("extend", "le_16"), ("extend", "le_128"), ("decode", "le_16"))
        ),
        2,  # of 3 layers
        RecurrenceShape,
        proving,
    ),
}


def build(
    name: str, folder: Path, policy: Policy = Policy.QUALIFY, measure: Callable[..., None] | None = None
) -> BuiltEngine:
    kind = KINDS[name]
    most = 16 if name == "linear" else 64
    return small_engine(folder, kind.config, measure or kind.measure, policy=policy, max_num_batched_tokens=most)


def rows_of(name: str, plan: list[PlanRow]) -> list[PlanRow]:
    return [row for row in plan if row.phase == name]


@pytest.mark.parametrize("name", KINDS)
def test_an_operator_is_proven_at_the_start_and_counted(name: str, tmp_path: Path) -> None:
    kind, built = KINDS[name], build(name, tmp_path)
    rows = rows_of(name, built.ready.plan)
    assert [(row.shape, row.path, row.status) for row in rows] == [
        (shape, kind.path, "provisional") for shape in kind.shapes
    ]
    assert all(row.evidence is not None and row.evidence["is_proven"] for row in rows)
    prompt = 11 if name == "linear" else 20
    outputs = serve(built, prompt)
    counted = [it for output in outputs for it in output.record.dispatches if it.phase == name]
    buckets = ["le_16"] * 3 if name == "linear" else ["le_128", "le_16", "le_16"]
    assert [(it.bucket, it.path, it.num_tokens, it.num_launches, it.fallback_reasons) for it in counted] == [
        (bucket, kind.path, num_tokens, kind.num_launches, [])
        for bucket, num_tokens in zip(buckets, (prompt, 1, 1), strict=True)
    ]
    uses = Counter(use.phase for output in outputs for delta in output.deltas for use in delta.path_uses or ())
    assert (uses[name] > 0) == (name != "linear")
    of_decode = {"linear": (), "experts": kind.shapes[:1], "recurrence": kind.shapes[2:]}[name]
    assert tuple(shape for path, shape in built.runner.suspects() if path == kind.path) == of_decode
    # A CUDA graph holds PyTorch's products, but nothing else of it.
    assert all(table.is_capturable for table in built.runner.dispatcher.tables) == (name == "linear")
    again = build(name, tmp_path, measure=lambda pairs, *_, **__: pytest.fail(f"measured {pairs}") if pairs else None)
    assert [row.status for row in rows_of(name, again.ready.plan)] == ["provisional"] * len(kind.shapes)


def wrong_path(shape: RowsShape, path: Any) -> Any:
    """Spoil products of some numbers of rows, and all experts."""
    if isinstance(shape, LinearShape) and shape.rows is LinearRows.LE_8:
        return replace(path, run=wrong_linear(LinearFault.WRONG_ALGORITHM, shape))
    is_spoilt = isinstance(shape, ExpertsShape) and path.name == "torch.experts.cpu"
    return replace(path, run=wrong_experts(ExpertsFault.WEIGHT_LEFT_OUT)) if is_spoilt else path


@pytest.mark.parametrize(("name", "where"), [("linear", r"linear fp32 .* r-le_8 "), ("experts", "experts fp32 ")])
def test_wrong_numbers_are_refused_at_the_start_by_their_check(name: str, where: str, tmp_path: Path) -> None:
    def measure_wrong(pairs: list[Pair], bench: Bench, **named: Any) -> None:
        KINDS[name].measure([(shape, wrong_path(shape, path)) for shape, path in pairs], bench, **named)  # type: ignore[arg-type]

    with pytest.raises(Unservable, match=f"serve {where}.*it computes wrong numbers here: every_row"):
        build(name, tmp_path, measure=measure_wrong)


def test_unproven_experts_refuse_the_start_with_the_reason(tmp_path: Path) -> None:
    with pytest.raises(Unservable, match="under on-unproven=refuse no path may serve") as caught:
        build("experts", tmp_path, Policy.REFUSE)
    row = rows_of("experts", caught.value.plan)[0]
    assert (row.path, row.fallback_reasons) == (None, ["unproven"])
    assert row.rejected["triton.experts"][0][0] == "arch"


def test_recurrences_whose_checks_fail_refuse_the_start(tmp_path: Path) -> None:
    def measure(pairs: list[Pair], bench: Bench, **named: Any) -> None:
        proving([it for it in pairs if not isinstance(it[0], RecurrenceShape)], bench, **named)
        for shape, path in pairs:
            if isinstance(shape, RecurrenceShape):
                named["on_evidence"](evidence(shape, path, fingerprint=bench.fingerprint, checks=checks(2.0)))

    said = f"no path may serve recurrence extend {RECURRENT} r-le_16 and 2 more"
    with pytest.raises(Unservable, match=said) as caught:
        build("recurrence", tmp_path, measure=measure)
    row = rows_of("recurrence", caught.value.plan)[0]
    assert (row.path, row.rejected["triton.recurrence"][0][0]) == (None, "arch")


def test_unproven_experts_under_degrade_are_fallbacks(tmp_path: Path) -> None:
    built = build("experts", tmp_path, Policy.DEGRADE)
    path = KINDS["experts"].path
    assert [(row.path, row.status) for row in rows_of("experts", built.ready.plan)] == [(path, "unproven")] * 2
    counted = [it for output in serve(built, 3) for it in output.record.dispatches if it.phase == "experts"]
    assert {(it.wanted, *it.fallback_reasons) for it in counted} == {(path, "unproven")}
    experts = built.runner.dispatcher.experts
    assert experts is not None
    assert {it.status for it in experts.plan.values()} == {Status.UNPROVEN}


def test_a_recurrence_that_fails_to_launch_is_taken_out_of_service(tmp_path: Path) -> None:
    built = build("recurrence", tmp_path)
    dispatcher, name = built.runner.dispatcher, KINDS["recurrence"].path
    path = any_path_named(name)

    def failing(*_: object) -> None:
        raise RuntimeError("too many resources requested for launch")

    assert dispatcher.recurrence is not None
    dispatcher.recurrence.substitute(replace(path, run=failing))  # type: ignore[type-var]
    ended = [delta for output in serve(built, 20) for delta in output.deltas if delta.finish_reason is not None]
    assert [it.error_code for it in ended] == ["internal_error"]
    gone = [it for it in dispatcher.all_decisions if it.path is None]
    assert [(str(it.shape), it.fallback_reasons) for it in gone] == [
        (f"recurrence extend {RECURRENT} r-le_128", (Reject.QUARANTINED,))
    ]
    dispatcher.recurrence.substitute(replace(path, run=run_recurrence_eager))  # type: ignore[type-var]
    assert len(serve(built, 7)) == 3  # steps of other sizes are served
    assert dispatcher.quarantine(name, RECURRENCE)
    assert {it.path for it in dispatcher.recurrence.plan.values()} == {None}


def test_a_step_with_a_prompt_is_one_phase_to_recurrences() -> None:
    assert phase_of_step([Phase.PREFILL, Phase.DECODE]) is phase_of_step([Phase.EXTEND]) is Phase.EXTEND
    assert [phase_of_step([it]) for it in (Phase.DECODE, Phase.VERIFY)] == [Phase.DECODE, Phase.VERIFY]
    assert StepSizes(3).phase is Phase.EXTEND


def test_kernels_of_a_recurrence_that_nobody_promised_are_blamed() -> None:
    path, known = any_path_named("triton.recurrence"), any_path_named("torch.recurrence.cpu")
    assert operator_mismatches([(path, promise_of(path, None))], ["hallmark_recurrence_chunks"]) == []
    [mismatch] = operator_mismatches([(known, promise_of(known, None))], ["hallmark_recurrence_chunks"])
    assert mismatch.operator is RECURRENCE


def test_reviewed_matrices_say_that_no_gpu_has_a_recurrence() -> None:
    for gpu in reviewed_gpus():
        assert unproven_operators(HYBRID, gpu, ALL_PATHS)[-1] is RECURRENCE
