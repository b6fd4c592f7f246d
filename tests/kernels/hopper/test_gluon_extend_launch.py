"""What the host does for a call of `gluon.extend.hopper`: which kernels it finds, and what it hands to them."""

from pathlib import Path
from typing import Any

import pytest
from compile_outside import run_outside

pytestmark = pytest.mark.sm90

HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def seen() -> dict[str, Any]:
    return dict(run_outside(HERE / "gluon_extend_launch.py"))


def test_the_first_call_compiles_all_that_a_batch_may_need(seen: dict[str, Any]) -> None:
    first, _, after_another_call = seen["compiled"]
    assert first == after_another_call
    assert first == 2 * (1 + 3 + 1 + 1)  # of two and of three consumers; the splitting program in three sizes


def test_tritons_binder_finds_the_same_small_kernels(seen: dict[str, Any]) -> None:
    first, after_the_binder, _ = seen["compiled"]
    assert after_the_binder == first


def test_a_launch_passes_as_many_arguments_as_its_kernel_has(seen: dict[str, Any]) -> None:
    assert all(given == taken for taken, given in seen["arguments"])


def test_few_sequences_are_planned_and_split_by_one_launch(seen: dict[str, Any]) -> None:
    assert seen["launches"] == [3, 4]


def test_a_short_context_is_planned_and_attended_only(seen: dict[str, Any]) -> None:
    assert seen["of_a_short_context"] == 2


def test_arguments_stand_where_the_kernel_looks_for_them(seen: dict[str, Any]) -> None:
    assert seen["maps"] == [True, True, True]
    assert seen["table"]
    assert seen["rows_of_a_page"] == [128, 128], "keys lie beside values: a page is two pages from the next"
    assert seen["heads"] == [2, 1, 2], "heads of tiles, those of a KV head, those of an L2 group"


def test_layers_with_plans_repeat_launches_over_their_pages(
    seen: dict[str, Any],
) -> None:
    plans, outputs = 1, 2
    assert seen["by_layers"] == {"launches": 6 * 2 + plans, "wrong": [], "kept": plans + outputs}
