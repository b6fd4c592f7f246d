"""The machine code of the exchange kernels, compiled for sm_90 without a GPU."""

import pytest

from support.compiled.compile_outside import run_outside

pytestmark = pytest.mark.sm90


def test_exchange_kernels_compile_without_spills_and_fences() -> None:
    counts = run_outside("collective_compile.py")
    assert {found["spills"] for found in counts.values()} == {0}
    assert {found["fences"] for found in counts.values()} == {0}  # each would wait for the other GPUs' memory
    # 512 units of 16 bytes: one a thread for 16 warps, two for 8, each loaded by itself from each of the other ranks.
    awaited = {
        name: counts[name]["awaited units"] for name in ("sum 4096 2 norm", "sum 4096 4 norm", "sum 4096 8 norm")
    }
    assert list(awaited.values()) == [1, 3, 14]
