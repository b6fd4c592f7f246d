"""Kernels that the profiler saw against those that the evidence promises."""

from collections import Counter
from dataclasses import replace

import pytest

from kernels.catalog import PATHS
from qualification.attest.promise import Promise, attention_markers, call_mismatch, promise_of, replay_mismatch
from support.qualification_fakes import SHAPE, evidence, path

PATH = replace(path("triton.x"), kernel_names=("hallmark_x",))
PROMISE = Promise("triton.x", ("hallmark_x", "hallmark_combine"), ("hallmark_plan",))
MARKERS = frozenset({"hallmark_x", "hallmark_y"})


def test_a_call_that_launches_what_was_promised_matches() -> None:
    assert call_mismatch(PROMISE, Counter(hallmark_x=1, hallmark_combine=1)) is None
    assert call_mismatch(PROMISE, Counter(hallmark_x=2, hallmark_combine=1, hallmark_plan=1)) is None


@pytest.mark.parametrize(
    ("seen", "detail"),
    [
        ({}, "triton.x launched no kernel that the profiler saw"),
        ({"hallmark_x": 1}, "triton.x did not launch hallmark_combine"),
        (
            {"hallmark_x": 1, "hallmark_combine": 1, "other": 1},
            "triton.x launched other, which its evidence does not know",
        ),
        (
            {"other": 1},
            "triton.x did not launch hallmark_combine, hallmark_x and launched other, which its evidence does not know",
        ),
    ],
)
def test_a_call_that_launches_anything_else_is_a_mismatch(seen: dict[str, int], detail: str) -> None:
    assert call_mismatch(PROMISE, seen) == detail


def test_without_evidence_kernels_hold_catalog_markers() -> None:
    promise = promise_of(PATH, None)
    assert call_mismatch(promise, {"hallmark_x_variant": 3}) is None
    assert call_mismatch(promise, {"hallmark_x": 1, "other": 1}) is not None


def test_evidence_without_kernels_promises_catalog_markers() -> None:
    assert promise_of(PATH, evidence(SHAPE, PATH, kernels=None)) == promise_of(PATH, None)
    assert promise_of(PATH, evidence(SHAPE, PATH, kernels=("a",))) == Promise("triton.x", ("a",))


OTHER = Promise("triton.y", ("hallmark_y", "hallmark_combine"))
UNMEASURED = Promise("triton.x", (), (), ("hallmark_x",))
PLANNED = Promise("gluon.x", (), (), ("hallmark_x", "hallmark_x_plan"))
EITHER = (("hallmark_x", "hallmark_combine"), ("hallmark_alone",))
TWICE = [(UNMEASURED, 3), (UNMEASURED, 1)]  # layers with a window and without
RAN = "in a replay of triton.x: "


@pytest.mark.parametrize(
    ("promised", "seen", "detail"),
    [
        ([(PROMISE, 4)], {"hallmark_x": 4, "hallmark_combine": 4, "hallmark_plan": 1, "gemm": 9}, None),
        *[
            ([(PROMISE, 4)], {"hallmark_x": n, "hallmark_combine": 4}, f"{RAN}hallmark_x ran {n} times, 4 were counted")
            for n in (0, 3, 5)
        ],
        (
            [(PROMISE, 4)],
            {"hallmark_x": 4, "hallmark_combine": 4, "hallmark_y": 4},
            f"{RAN}hallmark_y ran, which no path of the step promised",
        ),
        ([(PROMISE, 2), (OTHER, 3)], {"hallmark_x": 2, "hallmark_y": 3, "hallmark_combine": 5}, None),
        # A kernel of a plan is no launch; a library's in place of ours carries no marker, so nothing foreign is seen.
        ([(PLANNED, 4)], {"hallmark_x": 3, "hallmark_x_plan": 1, "fmha_cutlass": 1}, "hallmark_x"),
        (TWICE, {"hallmark_x": 4, "hallmark_x_combine": 4, "gemm": 9}, None),
        (TWICE, {"hallmark_x": 3, "fmha_cutlass": 1, "gemm": 9}, f"{RAN}hallmark_x ran 3 times, 4 were counted"),
        ([(UNMEASURED, 4), (PROMISE, 0)], {"fmha_cutlass": 4}, "hallmark_x"),
        (
            [(Promise("triton.x", (), either=EITHER), 2)],
            {"hallmark_alone": 1},
            f"{RAN}of hallmark_x with hallmark_combine or hallmark_alone ran hallmark_x 0, hallmark_combine 0, "
            "hallmark_alone 1 times, 2 launches were counted",
        ),
    ],
)
def test_a_replay_runs_each_promised_kernel_as_often_as_counted(
    promised: list[tuple[Promise, int]], seen: dict[str, int], detail: str | None
) -> None:
    found = replay_mismatch(promised, seen, MARKERS)
    assert found == detail if detail is None or detail.startswith(RAN) else detail in str(found)


@pytest.mark.parametrize("plan", ["hallmark_gluon_plan", "hallmark_gluon_extend_plan", "hallmark_gluon_extend_split"])
@pytest.mark.parametrize("num_plans", [1, 2, 4])
def test_layers_of_a_replay_share_one_plan_kernel(num_plans: int, plan: str) -> None:
    promise = Promise("gluon.x", ("hallmark_x", plan))
    layers = [(promise, 3), (promise, 0), (promise, 1)]  # of three windows
    detail = replay_mismatch(layers, {"hallmark_x": 4, plan: num_plans}, MARKERS)
    wrong = f"in a replay of gluon.x: {plan} ran {num_plans} times, 2 were counted"
    assert detail == (None if num_plans == 2 else wrong)


OF_TWO = replace(PATH, alternatives=EITHER)


@pytest.mark.parametrize("seen", [("hallmark_combine", "hallmark_x"), ("hallmark_alone",)])
def test_evidence_of_one_alternative_is_evidence_of_all(seen: tuple[str, ...]) -> None:
    promise = promise_of(OF_TWO, evidence(SHAPE, OF_TWO, kernels=seen))
    assert call_mismatch(promise, {"hallmark_x": 1, "hallmark_combine": 1}) is None
    assert call_mismatch(promise, {"hallmark_alone": 1}) is None
    assert call_mismatch(promise, {"hallmark_x": 1, "hallmark_alone": 1}) == (
        "triton.x launched hallmark_alone, hallmark_x, not hallmark_x with hallmark_combine or hallmark_alone"
    )
    assert call_mismatch(promise, {"hallmark_x": 1}) is not None
    assert call_mismatch(promise, {"hallmark_alone": 1, "fmha_cutlass": 1}) is not None


def test_evidence_of_other_kernels_replaces_alternatives() -> None:
    promise = promise_of(OF_TWO, evidence(SHAPE, OF_TWO, kernels=("hallmark_x", "hallmark_other")))
    assert promise == Promise("triton.x", ("hallmark_x", "hallmark_other"))


@pytest.mark.parametrize(
    ("seen", "matches"),
    [
        ({"hallmark_alone": 32, "gemm": 7}, True),
        ({"hallmark_x": 32, "hallmark_combine": 32}, True),
        ({"hallmark_x": 12, "hallmark_combine": 12, "hallmark_alone": 20}, True),
        ({"hallmark_alone": 31}, False),
        ({"hallmark_alone": 33}, False),
        ({"hallmark_x": 32, "hallmark_combine": 31}, False),
        ({"hallmark_x": 32, "hallmark_alone": 32}, False),
        ({"fmha_cutlass": 32}, False),
        ({"hallmark_alone": 32, "hallmark_y": 1}, False),
    ],
)
def test_each_launch_of_a_replay_is_one_of_the_alternatives(seen: dict[str, int], matches: bool) -> None:
    promise = promise_of(OF_TWO, evidence(SHAPE, OF_TWO, kernels=("hallmark_combine", "hallmark_x")))
    detail = replay_mismatch([(promise, 20), (promise, 12)], seen, MARKERS)  # layers with a window and without
    assert (detail is None) is matches


def test_unpromised_alternative_is_foreign() -> None:
    markers = attention_markers([OF_TWO])
    assert "hallmark_alone" in markers
    assert replay_mismatch([(PROMISE, 1)], {"hallmark_x": 1, "hallmark_combine": 1, "hallmark_alone": 1}, markers) == (
        "in a replay of triton.x: hallmark_alone ran, which no path of the step promised"
    )


def test_our_own_kernels_mark_attention_and_no_fused_neighbour() -> None:
    markers = attention_markers(PATHS)
    assert {"hallmark_prefill", "hallmark_extend", "hallmark_decode"} <= markers
    assert not any("rope" in marker or "::" in marker for marker in markers)
