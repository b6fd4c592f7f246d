"""What the host does for a call of `gluon.prefill.hopper`: which kernels it finds, and what it hands to them."""

from pathlib import Path
from typing import Any

import pytest
from compile_outside import run_outside

pytestmark = pytest.mark.sm90

HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def seen() -> dict[str, Any]:
    return dict(run_outside(HERE / "gluon_launch.py"))


def test_a_call_compiles_two_kernels_and_the_next_one_none(seen: dict[str, Any]) -> None:
    first, _, after_another_call = seen["compiled"]
    assert (first, after_another_call) == (2, 2)


def test_tritons_binder_finds_the_same_plan_kernel(seen: dict[str, Any]) -> None:
    first, after_the_binder, _ = seen["compiled"]
    assert after_the_binder == first


def test_a_launch_passes_as_many_arguments_as_its_kernel_has(seen: dict[str, Any]) -> None:
    for name in ("plan", "prefill"):
        taken, given = seen[name]
        assert given == taken, name


def test_arguments_stand_where_the_kernels_look_for_them(seen: dict[str, Any]) -> None:
    assert seen["plan_tensors"]
    assert seen["maps"] == [True, True, True]
    assert seen["out"]
    assert seen["strides"] == [8 * 128, 128]
    assert seen["heads"] == [8, 4, 8], "query heads, those of a KV head, those of an L2 group"


def test_layers_share_a_plan_for_each_window(seen: dict[str, Any]) -> None:
    plans, outputs = 2, 2
    assert seen["by_layers"] == {"launches": 12 + plans, "wrong": [], "kept": plans + plans * outputs}
