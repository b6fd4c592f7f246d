"""Recurrences in an engine: decided in its plan by phase and tokens, counted by path, refused, taken out of service."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kernels.catalog import ALL_PATHS, any_path_named
from kernels.recurrence.eager_path import run_recurrence_eager
from kernels.recurrence.shape import RecurrenceShape
from kernels.vocabulary.path import Reject
from kernels.vocabulary.recurrence_operator import RECURRENCE
from kernels.vocabulary.shape import Phase
from qualification.attest.operator_promises import operator_mismatches
from qualification.attest.promise import promise_of
from qualification.decision.decision import Policy
from qualification.decision.reviewed import reviewed_gpus, unproven_operators
from qualification.measure.qualify import Bench, Pair
from server.engine.operators.rows_table import StepSizes, phase_of_step
from server.engine.startup.builder import BuiltEngine
from server.engine.startup.plan import Unservable
from server.protocol.messages import PlanRow
from support.engine.one_operator import HYBRID, proving, serve, small_engine
from support.qualification_fakes import checks, evidence

NUM_RECURRENT = 2  # of 3 layers
PATH = "torch.recurrence.cpu"
KIND = "fp32/state-fp32 h1:2 d8:16 conv4"


def build(folder: Path, policy: Policy, run_qualification: Callable[..., None] = proving) -> BuiltEngine:
    return small_engine(folder, HYBRID, run_qualification, policy=policy, max_num_batched_tokens=64)


def recurrence_rows(built: BuiltEngine) -> list[PlanRow]:
    return [row for row in built.ready.plan if row.phase == "recurrence"]


def test_recurrences_are_planned_by_phase_and_counted(tmp_path: Path) -> None:
    built = build(tmp_path, Policy.QUALIFY)
    wanted = [f"recurrence {it} r-{rows}" for it, rows in (
        (f"extend {KIND}", "le_16"), (f"extend {KIND}", "le_128"), (f"decode {KIND}", "le_16"),
    )]  # fmt: skip
    assert [(it.shape, it.path, it.status) for it in recurrence_rows(built)] == [
        (shape, PATH, "provisional") for shape in wanted
    ]
    outputs = serve(built, 20)
    counted = [it for output in outputs for it in output.record.dispatches if it.phase == "recurrence"]
    assert [(it.bucket, it.path, it.num_tokens, it.num_launches) for it in counted] == [
        ("le_128", PATH, 20, NUM_RECURRENT),
        *[("le_16", PATH, 1, NUM_RECURRENT)] * 2,
    ]
    uses = {use.phase for output in outputs for delta in output.deltas for use in delta.path_uses or ()}
    assert "recurrence" in uses
    assert (PATH, wanted[2]) in built.runner.suspects()
    assert (PATH, wanted[0]) not in built.runner.suspects()
    assert not built.runner.dispatcher.is_capturable  # no CUDA graph holds PyTorch's


def test_unproven_recurrences_refuse_the_start(tmp_path: Path) -> None:
    def measure(pairs: list[Pair], bench: Bench, **named: Any) -> None:
        proving([it for it in pairs if not isinstance(it[0], RecurrenceShape)], bench, **named)
        for shape, path in pairs:
            if isinstance(shape, RecurrenceShape):
                named["on_evidence"](evidence(shape, path, fingerprint=bench.fingerprint, checks=checks(2.0)))

    with pytest.raises(Unservable, match=f"no path may serve recurrence extend {KIND} r-le_16 and 2 more") as caught:
        build(tmp_path, Policy.QUALIFY, measure)
    [row, *_] = [row for row in caught.value.plan if row.phase == "recurrence"]
    assert row.path is None
    assert row.rejected["triton.recurrence"][0][0] == "arch"


def test_a_recurrence_that_fails_to_launch_is_taken_out_of_service(tmp_path: Path) -> None:
    built = build(tmp_path, Policy.QUALIFY)
    dispatcher = built.runner.dispatcher
    [path] = [it for it in ALL_PATHS if it.name == PATH]

    def failing(*_: object) -> None:
        raise RuntimeError("too many resources requested for launch")

    assert dispatcher.recurrence is not None
    dispatcher.recurrence.substitute(replace(path, run=failing))
    ended = [delta for output in serve(built, 20) for delta in output.deltas if delta.finish_reason is not None]
    assert [it.error_code for it in ended] == ["internal_error"]
    gone = [it.shape for it in built.runner.dispatcher.all_decisions if it.path is None]
    assert [str(it) for it in gone] == [f"recurrence extend {KIND} r-le_128"]
    assert [it.fallback_reasons for it in dispatcher.all_decisions if it.path is None] == [(Reject.QUARANTINED,)]
    dispatcher.recurrence.substitute(replace(path, run=run_recurrence_eager))
    assert len(serve(built, 7)) == 3  # steps of other sizes are served
    assert dispatcher.quarantine(PATH, RECURRENCE)
    assert {it.path for it in dispatcher.recurrence.plan.values()} == {None}


def test_a_step_with_a_prompt_is_one_phase_to_recurrences() -> None:
    assert phase_of_step([Phase.PREFILL, Phase.DECODE]) is phase_of_step([Phase.EXTEND]) is Phase.EXTEND
    assert [phase_of_step([it]) for it in (Phase.DECODE, Phase.VERIFY)] == [Phase.DECODE, Phase.VERIFY]
    assert StepSizes(3).phase is Phase.EXTEND


def test_kernels_of_a_recurrence_that_nobody_promised_are_blamed() -> None:
    path = any_path_named("triton.recurrence")
    found = operator_mismatches([(path, promise_of(path, None))], ["hallmark_recurrence_chunks"])
    assert found == []
    known = any_path_named(PATH)
    [mismatch] = operator_mismatches([(known, promise_of(known, None))], ["hallmark_recurrence_chunks"])
    assert mismatch.operator is RECURRENCE


def test_reviewed_matrices_say_that_no_gpu_has_a_recurrence() -> None:
    for gpu in reviewed_gpus():
        assert unproven_operators(HYBRID, gpu, ALL_PATHS)[-1] is RECURRENCE
