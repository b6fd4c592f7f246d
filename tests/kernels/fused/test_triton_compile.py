"""The machine code of the Triton kernels of the fused ops, compiled for sm_90 without a GPU."""

import pytest

from support.compiled.compile_outside import run_outside

pytestmark = pytest.mark.sm90


def test_no_kernel_spills_registers() -> None:
    spills = run_outside("triton_compile.py")
    assert spills == dict.fromkeys(spills, 0)
    assert {
        "norm",
        "norms around a sum, 1 of it",
        "sum with what all tokens visit",
        "gate of heads",
        "norm and gate of heads",
        "swiglu",
        "rope",
        "draw",
        "finish",
    } <= spills.keys()
    assert {"latents", "keys of an indexer, neighbours", "rope, values of fewer numbers"} <= spills.keys()
