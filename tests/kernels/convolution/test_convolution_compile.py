"""The machine code of the Triton kernels of the convolution, compiled for sm_90 without a GPU."""

import pytest

from support.compiled.compile_outside import run_outside

pytestmark = pytest.mark.sm90


def test_kernels_neither_spill_nor_fuse_nor_sum_by_atomics() -> None:
    found: dict[str, dict[str, int]] = run_outside("convolution_compile.py")
    assert len(found) == 5
    assert found == {name: {"spills": 0, "fused": 0, "global_atomics": 0} for name in found}
