"""Compiles variants of the matmuls for sm_90 without a GPU; prints what their machine code shows as JSON.

A program of its own: where Triton's interpreter is on, as in the tests of this folder, nothing can be compiled.
"""

import json

import torch
from triton.runtime import driver

from kernels.linear.skinny import compiled_skinny
from kernels.linear.tilings import SkinnyTiling, tiling_for
from kernels.linear.wide import compiled_wide
from support.compiled.gluon_sass import barrier_offsets, count, disassemble
from support.compiled.sm90_driver import Hopper

# name: (rows of x, N, K, parts, bias, dtype, dtype of the result)
_BF16, _FP16, _FP32 = torch.bfloat16, torch.float16, torch.float32
CASES = {
    "64 rows": (1, 6144, 4096, 1, False, _BF16, _BF16),
    "2 folds": (8, 4096, 14336, 1, False, _BF16, _BF16),
    "4 folds": (1, 1024, 2048, 1, False, _BF16, _BF16),
    "32 rows of x, 4 folds": (32, 1024, 2048, 1, False, _BF16, _BF16),
    "head": (16, 128256, 4096, 1, False, _BF16, _FP32),
    "swiglu": (1, 14336, 4096, 2, False, _BF16, _BF16),
    "swiglu, 32 rows of x": (32, 14336, 4096, 2, False, _FP16, _FP16),
    "bias": (9, 4096, 4096, 1, True, _FP16, _FP16),
    "wide, 2 splits": (64, 4096, 14336, 1, True, _FP16, _FP16),
    "wide, 128 rows of x, 2 splits": (128, 4096, 4096, 1, False, _BF16, _BF16),
    "wide, swiglu": (64, 14336, 4096, 2, False, _BF16, _BF16),
}


def compile_case(case: tuple[int, int, int, int, bool, torch.dtype, torch.dtype]) -> dict[str, object]:
    num_rows, size_out, size_in, parts, has_bias, dtype, dtype_out = case
    tiling = tiling_for(num_rows, size_out, size_in, 132, parts=parts, has_bias=has_bias)
    assert tiling is not None
    if isinstance(tiling, SkinnyTiling):
        kernel, of_cluster = compiled_skinny(tiling, dtype, dtype_out), {"splits": 1}
    else:
        kernel = compiled_wide(tiling, dtype, dtype_out)
        of_cluster = {"splits": tiling.splits, "ring_bytes": tiling.ring_bytes}
    code = disassemble(kernel.asm["cubin"])
    # In program order: further down the compiler duplicates the wait into branches.
    before, after = kernel.asm["ttgir"].split("griddepcontrol.wait")
    return {
        "shared_bytes": kernel.metadata.shared,
        "spills": count(code, "STL"),
        "wgmma": count(code, "HGMMA"),
        "tma_loads": count(code, "UTMALDG"),
        "loads_before_wait": before.count("async_tma_copy_global_to_local"),
        "weight_loads_of_ring": tiling.stages * tiling.boxes,
        "barrier_offsets": barrier_offsets(code),
        "sends_to_cluster": count(code, "STAS.128"),
        "stores_before_wait": before.count("tt.store"),
        "stores_after_wait": after.count("tt.store"),
        **of_cluster,
    }


def main() -> None:
    driver.set_active(Hopper())
    print(json.dumps({name: compile_case(case) for name, case in CASES.items()}))


if __name__ == "__main__":
    main()
