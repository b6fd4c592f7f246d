"""The machine code of the Triton kernels of the recurrence, compiled for sm_90 without a GPU."""

import pytest

from support.compiled.compile_outside import run_outside

pytestmark = pytest.mark.sm90

SHARED_BYTES = 232_448  # that one program may have on an H100 or H200
_MOST_SPILLS = 80  # stores of the chunks' kernel in 16 bits; fp32 is multiplied without matrix units


@pytest.fixture(scope="module")
def compiled() -> dict[str, dict[str, int]]:
    """Facts of the compiled kernels, by shape and name."""
    found: dict[str, dict[str, int]] = run_outside("recurrence_compile.py")
    return found


def test_kernels_fit_a_multiprocessor_and_hardly_spill(compiled: dict[str, dict[str, int]]) -> None:
    chunks = {name for name in compiled if name.endswith("chunks")}
    assert all(kernel["shared_bytes"] <= SHARED_BYTES for kernel in compiled.values())
    assert {name: compiled[name]["spills"] for name in compiled.keys() - chunks} == dict.fromkeys(
        compiled.keys() - chunks, 0
    )
    halves = {name for name in chunks if "fp32" not in name}
    assert all(compiled[name]["spills"] <= _MOST_SPILLS and compiled[name]["mma"] for name in halves)


def test_no_sum_of_a_recurrence_is_decided_by_an_atomic(compiled: dict[str, dict[str, int]]) -> None:
    assert {name: kernel["global_atomics"] for name, kernel in compiled.items()} == dict.fromkeys(compiled, 0)
