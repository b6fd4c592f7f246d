"""Compiles variants of the matmuls for sm_90 without a GPU; prints what their machine code shows as JSON.

A program of its own: where Triton's interpreter is on, as in the tests of this folder, nothing can be compiled.
"""

import json
from typing import Any

import torch
from triton.runtime import driver

from kernels.linear.hopper.few_bits_tilings import Fp8Scales
from kernels.linear.hopper.fp8_swapped import compiled_fp8_swapped
from kernels.linear.hopper.fp8_swapped_tilings import fp8_swapped_tiling
from kernels.linear.hopper.skinny import compiled_skinny
from kernels.linear.hopper.tilings import SkinnyTiling, tiling_for
from kernels.linear.hopper.wide import compiled_wide
from kernels.linear.ordered.matmul import compiled_ordered
from kernels.linear.ordered.tilings import ordered_tiling
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

# The same, and segments of the inner dim, of the matmul whose sums have one order.
ORDERED = {
    "ordered, 32 rows of a tile": (1, 4096, 14336, 1, False, _BF16, _BF16, 1),
    "ordered, head": (16, 128256, 4096, 1, False, _BF16, _FP32, 1),
    "ordered, odd": (16, 49159, 4096, 1, False, _BF16, _FP32, 1),
    "ordered, bias": (64, 4096, 4096, 1, True, _FP16, _FP16, 1),
    "ordered, swiglu": (128, 14336, 4096, 2, False, _BF16, _BF16, 1),
    "ordered, 256 rows of x": (8192, 6144, 4096, 1, False, _BF16, _BF16, 1),
    "ordered, 4 segments": (8192, 2048, 4096, 1, False, _BF16, _BF16, 4),
}

# Weights of 8 bits: (rows of x, N, K, parts, bias, dtype of the result, scales)
SWAPPED = {
    "8 bits, 2 splits": (8, 4096, 4096, 1, False, _BF16, Fp8Scales.ROWS),
    "8 bits, 64 rows of x, 4 splits, bias": (64, 1024, 4096, 1, True, _FP32, Fp8Scales.STATIC),
    "8 bits, 128 rows of x, 2 splits": (128, 4096, 14336, 1, False, _BF16, Fp8Scales.ROWS),
    "8 bits, 128 rows of x, blocks": (128, 6144, 4096, 1, False, _BF16, Fp8Scales.BLOCKS),
    "8 bits, blocks": (32, 6144, 4096, 1, False, _BF16, Fp8Scales.BLOCKS),
    "8 bits, swiglu": (64, 14336, 4096, 2, False, _BF16, Fp8Scales.ROWS),
    "8 bits, blocks, swiglu": (64, 14336, 4096, 2, False, _FP16, Fp8Scales.BLOCKS),
}


def compile_swapped(case: tuple[int, int, int, int, bool, torch.dtype, Fp8Scales]) -> dict[str, object]:
    *sizes, parts, has_bias, dtype_out, scales = case
    tiling = fp8_swapped_tiling(*sizes, 132, parts=parts, has_bias=has_bias, scales=scales)
    assert tiling is not None
    of_cluster: dict[str, object] = {"splits": tiling.splits, "ring_bytes": tiling.ring_bytes}
    return facts_of(compiled_fp8_swapped(tiling, dtype_out, _BF16), tiling.stages * tiling.boxes, of_cluster)


def compile_ordered(case: tuple[int, int, int, int, bool, torch.dtype, torch.dtype, int]) -> dict[str, object]:
    num_rows, size_out, size_in, parts, has_bias, dtype, dtype_out, segments = case
    sizes = {"parts": parts, "segments": segments, "bytes_out": dtype_out.itemsize}
    tiling = ordered_tiling(num_rows, size_out, size_in, 132, has_bias=has_bias, **sizes)
    return facts_of(compiled_ordered(tiling, dtype, dtype_out), tiling.stages * tiling.boxes, {"splits": 1})


def compile_case(case: tuple[int, int, int, int, bool, torch.dtype, torch.dtype]) -> dict[str, object]:
    num_rows, size_out, size_in, parts, has_bias, dtype, dtype_out = case
    tiling = tiling_for(num_rows, size_out, size_in, 132, parts=parts, has_bias=has_bias)
    assert tiling is not None
    of_cluster: dict[str, object]
    if isinstance(tiling, SkinnyTiling):
        kernel, of_cluster = compiled_skinny(tiling, dtype, dtype_out), {"splits": 1}
    else:
        kernel = compiled_wide(tiling, dtype, dtype_out)
        of_cluster = {"splits": tiling.splits, "ring_bytes": tiling.ring_bytes}
    return facts_of(kernel, tiling.stages * tiling.boxes, of_cluster)


def facts_of(kernel: Any, weight_loads: int, of_cluster: dict[str, object]) -> dict[str, object]:
    """weight_loads: of weights, that fill the ring."""
    code = disassemble(kernel.asm["cubin"])
    # In program order: further down the compiler duplicates the wait into branches.
    before, after = kernel.asm["ttgir"].split("griddepcontrol.wait")
    return {
        "shared_bytes": kernel.metadata.shared,
        "spills": count(code, "STL"),
        "wgmma": count(code, "HGMMA") + count(code, "QGMMA"),
        "tma_loads": count(code, "UTMALDG"),
        "loads_before_wait": before.count("async_tma_copy_global_to_local"),
        "weight_loads_of_ring": weight_loads,
        "barrier_offsets": barrier_offsets(code),
        "sends_to_cluster": count(code, "STAS.128"),
        "stores_before_wait": before.count("tt.store"),
        "stores_after_wait": after.count("tt.store"),
        **of_cluster,
    }


def main() -> None:
    driver.set_active(Hopper())
    found = {name: compile_case(case) for name, case in CASES.items()}
    found |= {name: compile_swapped(case) for name, case in SWAPPED.items()}
    print(json.dumps(found | {name: compile_ordered(case) for name, case in ORDERED.items()}))


if __name__ == "__main__":
    main()
