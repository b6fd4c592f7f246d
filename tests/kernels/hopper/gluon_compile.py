"""Compiles variants of `gluon.prefill.hopper` for sm_90 without a GPU; prints what their machine code shows as JSON.

A program of its own: where Triton's interpreter is on, as in the tests of this folder, nothing can be compiled.
"""

import json
import sys

import torch
from gluon_findings import findings
from gluon_sass import barrier_offsets, disassemble
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from kernels.batch import AttentionBatch, AttentionFlags
from kernels.hopper.prefill.launch import compiled_prefill
from kernels.hopper.variants import LONG, Variant, variant_of
from kernels.tma.pointers import pointer_class


class Hopper:
    """As much of a driver as a compilation asks for."""

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, _device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)


# name: (head dim, dtype, whether queries follow a context, flags)
SINKS, SPANS = torch.zeros(8), torch.zeros(256, 2, dtype=torch.int32)
CASES = {
    "d64": (64, torch.bfloat16, False, {}),
    "d64 long": (64, torch.bfloat16, False, {}),
    "d64 long offset": (64, torch.bfloat16, True, {}),
    "d64 long window": (64, torch.bfloat16, False, {"window": 1024}),
    "d64 long softcap": (64, torch.bfloat16, False, {"softcap": 30.0}),
    "d80": (80, torch.bfloat16, False, {}),
    "d192": (192, torch.bfloat16, False, {}),
    "d192 offset window spans": (192, torch.bfloat16, True, {"window": 1000, "spans": SPANS}),
    "d128": (128, torch.bfloat16, False, {}),
    "d256": (256, torch.bfloat16, False, {}),
    "d96 fp16": (96, torch.float16, False, {}),
    "d128 window": (128, torch.bfloat16, False, {"window": 1000}),
    "d128 offset": (128, torch.bfloat16, True, {}),
    "d64 softcap sinks": (64, torch.bfloat16, False, {"softcap": 30.0, "sinks": SINKS}),
    "d128 spans": (128, torch.bfloat16, False, {"spans": SPANS}),
    "d256 window softcap": (256, torch.bfloat16, False, {"window": 1000, "softcap": 50.0}),
    "d256 window spans": (256, torch.bfloat16, False, {"window": 1000, "spans": SPANS}),
}


def compile_case(
    length: int, head_dim: int, dtype: torch.dtype, has_context: bool, flags: AttentionFlags
) -> dict[str, object]:
    q = torch.empty(length, 8, head_dim, dtype=dtype)
    cu_seqlens = torch.tensor([0, length], dtype=torch.int32)
    batch = AttentionBatch(cu_seqlens, length, length, cu_seqlens_k=cu_seqlens.clone() if has_context else cu_seqlens)
    variant = variant_of(head_dim, batch, flags)
    classes = (pointer_class(q), (q.stride(0), q.stride(1)), pointer_class(flags.sinks), pointer_class(flags.spans))
    kernel = compiled_prefill(variant, (dtype, dtype, dtype), *classes)
    barriers = barrier_offsets(disassemble(kernel.asm["cubin"]))
    return findings(kernel) | {"barriers": barriers, "copied_bytes": copied_bytes(variant)}


def copied_bytes(variant: Variant) -> int:
    """Shared memory that TMA writes: queries, keys and values of 16 bits, which Triton places first."""
    tiling = variant.tiling
    queries = tiling.q_buffers * tiling.block_m * tiling.block_d
    return 2 * (queries + 2 * tiling.stages * tiling.block_n * tiling.block_d)


def main() -> None:
    driver.set_active(Hopper())
    names = sys.argv[1:] or list(CASES)
    results = {}
    for name in names:
        head_dim, dtype, has_context, flags = CASES[name]
        results[name] = compile_case(
            LONG if "long" in name else 256, head_dim, dtype, has_context, AttentionFlags(0.1, **flags)
        )
    print(json.dumps(results))


if __name__ == "__main__":
    main()
