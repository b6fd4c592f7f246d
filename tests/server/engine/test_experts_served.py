"""Experts in an engine: decided in its plan, counted by path, refused with the reason, blamed when a device is lost."""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kernels.catalog import any_path_named
from kernels.experts.shape import ExpertsShape
from qualification.decision.decision import Policy, Status
from qualification.measure.faults.experts_faults import ExpertsFault, wrong_experts
from qualification.measure.qualify import Bench, Pair
from server.engine.startup.builder import BuiltEngine
from server.engine.startup.plan import Unservable
from server.protocol.messages import PlanRow
from support.engine.one_operator import MIXTURE, measuring, serve, small_engine

NUM_MIXTURES = 2  # of 3 layers
PATH = "torch.experts.cpu"


measure = measuring(ExpertsShape)


def build(folder: Path, policy: Policy, run_qualification: Callable[..., None] = measure) -> BuiltEngine:
    return small_engine(folder, MIXTURE, run_qualification, policy=policy, max_num_batched_tokens=64)


def experts_rows(built: BuiltEngine) -> list[PlanRow]:
    return [row for row in built.ready.plan if row.phase == "experts"]


def test_experts_are_proven_at_the_start_and_counted(tmp_path: Path) -> None:
    built = build(tmp_path, Policy.QUALIFY)
    rows = experts_rows(built)
    shapes = [f"experts fp32 plain e5:2 h24 w20 silu r-{rows}" for rows in ("le_16", "le_128")]
    assert [(row.shape, row.path, row.status, row.head_dim) for row in rows] == [
        (shape, PATH, "provisional", None) for shape in shapes
    ]
    assert all(row.evidence is not None and row.evidence["is_proven"] for row in rows)
    outputs = serve(built, 20)
    counted = [it for output in outputs for it in output.record.dispatches if it.phase == "experts"]
    assert [(it.bucket, it.path, it.num_tokens, it.num_launches) for it in counted] == [
        ("le_128", PATH, 20, NUM_MIXTURES),
        *[("le_16", PATH, 1, NUM_MIXTURES)] * 2,
    ]
    uses = Counter(use.phase for output in outputs for delta in output.deltas for use in delta.path_uses or ())
    assert uses["experts"] >= 1
    assert (PATH, shapes[0]) in built.runner.suspects()
    again = build(tmp_path, Policy.QUALIFY, lambda pairs, *_, **__: pytest.fail(f"measured {pairs}") if pairs else None)
    assert [row.status for row in experts_rows(again)] == ["provisional"] * 2


def test_unproven_experts_refuse_the_start_with_the_reason(tmp_path: Path) -> None:
    with pytest.raises(Unservable, match="under on-unproven=refuse no path may serve") as caught:
        build(tmp_path, Policy.REFUSE)
    [row, *_] = [row for row in caught.value.plan if row.phase == "experts"]
    assert (row.path, row.fallback_reasons) == (None, ["unproven"])
    assert row.rejected["triton.experts"][0][0] == "arch"


def test_wrong_experts_are_refused_at_the_start_by_their_check(tmp_path: Path) -> None:
    wrong = replace(any_path_named(PATH), run=wrong_experts(ExpertsFault.WEIGHT_LEFT_OUT))

    def measure_wrong(pairs: list[Pair], bench: Bench, **named: Any) -> None:
        measure([(shape, wrong if path.name == PATH else path) for shape, path in pairs], bench, **named)

    with pytest.raises(Unservable, match=r"serve experts fp32 .*it computes wrong numbers here: every_row"):
        build(tmp_path, Policy.QUALIFY, measure_wrong)


def test_unproven_experts_under_degrade_are_fallbacks(tmp_path: Path) -> None:
    built = build(tmp_path, Policy.DEGRADE)
    assert [(row.path, row.status) for row in experts_rows(built)] == [(PATH, "unproven")] * 2
    counted = [it for output in serve(built, 3) for it in output.record.dispatches if it.phase == "experts"]
    assert {(it.wanted, *it.fallback_reasons) for it in counted} == {(PATH, "unproven")}
    experts = built.runner.dispatcher.experts
    assert experts is not None
    assert not experts.is_capturable
    assert {it.status for it in experts.plan.values()} == {Status.UNPROVEN}
