"""Compiles `gluon.prefill.window.hopper` for sm_90 without a GPU; prints what its machine code shows as JSON.

A program of its own: where Triton's interpreter is on, as in the tests of this folder, nothing can be compiled.
"""

import json

import torch
from gluon_compile import Hopper
from gluon_findings import findings
from gluon_sass import barrier_offsets, disassemble
from triton.runtime import driver

from kernels.batch import AttentionFlags
from kernels.hopper.variants import ROWS, Variant
from kernels.hopper.window.launch import compiled_window_prefill
from kernels.hopper.window.variants import MAX_WINDOW, tokens_of, window_variant

SINKS = torch.zeros(16)
# name: (head dim, dtype, flags)
CASES = {
    "d64 sinks": (64, torch.bfloat16, AttentionFlags(1.0, window=MAX_WINDOW, sinks=SINKS)),
    "d64 fp16": (64, torch.float16, AttentionFlags(1.0, window=MAX_WINDOW)),
    "d64 narrow": (64, torch.bfloat16, AttentionFlags(1.0, window=100, sinks=SINKS)),
    "d128 sinks": (128, torch.bfloat16, AttentionFlags(1.0, window=MAX_WINDOW, sinks=SINKS)),
}


def copied_bytes(variant: Variant) -> int:
    """Shared memory that TMA writes: queries, keys and values of 16 bits, which Triton places first."""
    tiling = variant.tiling
    rows = tiling.q_buffers * ROWS + 2 * tiling.stages * (MAX_WINDOW + tokens_of(variant))
    return 2 * rows * tiling.block_d


def main() -> None:
    driver.set_active(Hopper())
    results = {}
    for name, (head_dim, dtype, flags) in CASES.items():
        variant = window_variant(head_dim, 8, flags)
        kernel = compiled_window_prefill(
            variant, (dtype, dtype, dtype), (16 * head_dim, head_dim), flags.window == MAX_WINDOW, (dtype, 0),
            None if flags.sinks is None else (torch.float32, 0),
        )  # fmt: skip
        barriers = barrier_offsets(disassemble(kernel.asm["cubin"]))
        results[name] = findings(kernel) | {"barriers": barriers, "copied_bytes": copied_bytes(variant)}
    print(json.dumps(results))


if __name__ == "__main__":
    main()
