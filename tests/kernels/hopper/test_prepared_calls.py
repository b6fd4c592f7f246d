"""Calls of the library that are repeated: they hand over what `run` would, on any stream, and keep no tensor."""

from pathlib import Path
from typing import Any

import pytest
from compile_outside import run_outside

pytestmark = pytest.mark.sm90

HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def seen() -> dict[str, Any]:
    return dict(run_outside(HERE / "prepared_calls.py"))


def test_prepared_calls_launch_what_run_does(seen: dict[str, Any]) -> None:
    """Other tensors, lengths, bounds and streams of a form."""
    assert {name: case["wrong"] for name, case in seen["cases"].items() if case["wrong"]} == {}


def test_every_number_of_launches_is_among_the_cases(seen: dict[str, Any]) -> None:
    """A cluster; a plan or shares; two of plan, split and combine; and all three."""
    assert {case["launches"] for case in seen["cases"].values()} == {1, 2, 3, 4}


def test_no_tensor_of_a_repeated_call_stays_alive(seen: dict[str, Any]) -> None:
    assert seen["kept_alive"] == 0


def test_a_bound_past_the_page_table_is_refused_after_repeats(seen: dict[str, Any]) -> None:
    assert seen["refused"]
