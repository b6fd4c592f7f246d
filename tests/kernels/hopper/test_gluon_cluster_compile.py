"""`gluon.decode.hopper` for one sequence without a GPU: the machine code for sm_90."""

from pathlib import Path
from typing import Any

import pytest
from compile_outside import run_outside

pytestmark = pytest.mark.sm90

MOST_SHARED_BYTES = 232_448  # of one program


@pytest.fixture(scope="module")
def code() -> dict[str, dict[str, Any]]:
    program = Path(__file__).parent / "gluon_cluster_compile.py"
    return dict(run_outside(program))


def test_registers_and_shared_memory_suffice(code: dict[str, dict[str, Any]]) -> None:
    for name, case in code.items():
        assert case["spills"] == 0, name
        assert case["shared_bytes"] <= MOST_SHARED_BYTES, name


def test_keys_reach_the_tensor_cores_as_matrices(code: dict[str, dict[str, Any]]) -> None:
    for name, case in code.items():
        assert case["mma"] > 0, name
        assert case["matrix_loads"] >= case["mma"] / 2, f"{name}: shared memory is read word by word"


def test_sums_are_sent_by_four(code: dict[str, dict[str, Any]]) -> None:
    assert all(case["vectors_sent"] > 0 for case in code.values())


def test_lengths_are_read_first_and_parts_exchanged_last(code: dict[str, dict[str, Any]]) -> None:
    for name, case in code.items():
        assert case["places"][0] > 0, name
        assert case["places"] == sorted(case["places"]), name
