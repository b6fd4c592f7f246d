"""The machine code of the Triton kernels of the recurrence, compiled for sm_90 without a GPU."""

import pytest

from support.compiled.compile_outside import run_outside

pytestmark = pytest.mark.sm90

SHARED_BYTES = 232_448  # that one program may have on an H100 or H200
# Stores of the kernels in 16 bits; fp32 is multiplied without matrix units.
_MOST_SPILLS = {"chunks": 130, "scan": 240, "rows": 8, "factors": 24, "wide": 4, "token": 16}
_OF_FEW_TOKENS = {"decode behind drafts": 60, "verify": 90, "verify five": 170}  # of that kernel


@pytest.fixture(scope="module")
def compiled() -> dict[str, dict[str, int]]:
    """Facts of the compiled kernels, by shape and name."""
    found: dict[str, dict[str, int]] = run_outside("recurrence_compile.py")
    return found


def test_kernels_fit_a_multiprocessor_and_hardly_spill(compiled: dict[str, dict[str, int]]) -> None:
    assert all(kernel["shared_bytes"] <= SHARED_BYTES for kernel in compiled.values())
    halves = {name: kernel for name, kernel in compiled.items() if "fp32" not in name}
    most = {name: _MOST_SPILLS.get(name.rsplit("_", 1)[1], 0) for name in halves}
    most |= {f"{shape}: hallmark_recurrence_token": spills for shape, spills in _OF_FEW_TOKENS.items()}
    assert {name: kernel["spills"] for name, kernel in halves.items() if kernel["spills"] > most[name]} == {}
    assert all(halves[f"prompt: hallmark_recurrence_{name}"]["mma"] for name in ("blocks", "rows", "chunks"))
    for name in ("prompt: hallmark_recurrence_scan_wide", "prompt, other sizes: hallmark_recurrence_scan"):
        assert halves[name]["wgmma"]
    assert halves["decode: hallmark_recurrence_token"]["mma"]
    # By wgmma it once read outside of shared memory, behind some thousand tokens.
    assert halves["space, prompt: hallmark_recurrence_space_scan"]["mma"]
    assert not halves["space, prompt: hallmark_recurrence_space_scan"]["wgmma"]
    assert halves["channels, prompt: hallmark_recurrence_channels_scan"]["mma"]
    assert not halves["channels, prompt: hallmark_recurrence_channels_scan"]["wgmma"]


def test_no_sum_of_a_recurrence_is_decided_by_an_atomic(compiled: dict[str, dict[str, int]]) -> None:
    assert {name: kernel["global_atomics"] for name, kernel in compiled.items()} == dict.fromkeys(compiled, 0)
