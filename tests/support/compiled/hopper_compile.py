"""Compiles variants of the attention kernels for Hopper without a GPU; prints what their machine code shows as JSON.

A program of its own: where Triton's interpreter is on, as in the tests of this folder, nothing can be compiled. Takes
what to compile: prefill, prefill without a mask or under a short window, extend, attention of a fixed order, decode,
decode of one sequence in clusters, or attention or decode of heads of 512.
"""

import json
import sys
from typing import Any

import torch
from triton.runtime import driver

from kernels.calls.batch import AttentionBatch, AttentionFlags
from kernels.hopper.decode.launch import compiled_cluster, compiled_decode
from kernels.hopper.decode.variants import DecodeVariant
from kernels.hopper.decode.variants import variant_of as decode_variant_of
from kernels.hopper.extend.launch import Operands, compiled_extend
from kernels.hopper.extend.variants import extend_variant_of, longer, whole
from kernels.hopper.full.launch import compiled_full
from kernels.hopper.full.launch import variant_of as full_variant_of
from kernels.hopper.ordered.launch import compiled_ordered
from kernels.hopper.ordered.variants import ordered_variant_of
from kernels.hopper.prefill.launch import compiled_prefill
from kernels.hopper.variants import LONG, ROWS, Variant, variant_of
from kernels.hopper.wide.decode import compiled_wide_decode
from kernels.hopper.wide.extend import compiled_wide_extend
from kernels.hopper.wide.prefill import compiled_wide_prefill
from kernels.hopper.wide.variants import wide_decode_variant, wide_extend_variant, wide_prefill_variant
from kernels.hopper.window.launch import compiled_window_prefill
from kernels.hopper.window.variants import MAX_WINDOW, tokens_of, window_variant
from kernels.tma.pointers import pointer_class
from support.compiled.gluon_ptx import arrivals_in_flight, early_arrivals, num_arrivals
from support.compiled.gluon_ring import strays
from support.compiled.gluon_sass import (
    barrier_offsets,
    count,
    disassemble,
    hazards,
    instructions,
    labelled_code,
    overlapped_exponentials,
)
from support.compiled.sm90_driver import Hopper

BF16, FP16 = torch.bfloat16, torch.float16
SINKS, SPANS = torch.zeros(8), torch.zeros(256, 2, dtype=torch.int32)
ALL = {"window": 1000, "softcap": 50.0, "sinks": SINKS, "spans": SPANS}
CASES: dict[str, dict[str, tuple[Any, ...]]] = {
    "prefill": {  # head dim, dtype, whether queries follow a context, flags
        "d64": (64, BF16, False, {}),
        "d64 long": (64, BF16, False, {}),
        "d64 long offset": (64, BF16, True, {}),
        "d64 long window": (64, BF16, False, {"window": 1024}),
        "d64 long softcap": (64, BF16, False, {"softcap": 30.0}),
        "d80": (80, BF16, False, {}),
        "d192": (192, BF16, False, {}),
        "d192 offset window spans": (192, BF16, True, {"window": 1000, "spans": SPANS}),
        "d128": (128, BF16, False, {}),
        "d256": (256, BF16, False, {}),
        "d96 fp16": (96, FP16, False, {}),
        "d128 window": (128, BF16, False, {"window": 1000}),
        "d128 offset": (128, BF16, True, {}),
        "d64 softcap sinks": (64, BF16, False, {"softcap": 30.0, "sinks": SINKS}),
        "d128 spans": (128, BF16, False, {"spans": SPANS}),
        "d256 window softcap": (256, BF16, False, {"window": 1000, "softcap": 50.0}),
        "d256 window spans": (256, BF16, False, {"window": 1000, "spans": SPANS}),
    },
    "full": {  # head dim, dtype; no flags
        "d64": (64, BF16, {}),
        "d72": (72, BF16, {}),
        "d80": (80, BF16, {}),
        "d128": (128, FP16, {}),
    },
    "window": {  # head dim, dtype, flags
        "d64 sinks": (64, BF16, {"window": MAX_WINDOW, "sinks": SINKS}),
        "d64 fp16": (64, FP16, {"window": MAX_WINDOW}),
        "d64 narrow": (64, BF16, {"window": 100, "sinks": SINKS}),
        "d128 sinks": (128, BF16, {"window": MAX_WINDOW, "sinks": SINKS}),
    },
    "extend": {  # head dim, page size, query heads a KV head, flags
        "d64 page 64": (64, 64, 4, {}),
        "d64 long": (64, 64, 4, {}),
        "d80": (80, 64, 4, {}),
        "d96 whole": (96, 64, 4, {}),
        "d128 page 64": (128, 64, 4, {}),
        "d128 whole": (128, 64, 4, {}),
        "d136 page 64": (136, 64, 4, {"window": 1000, "spans": SPANS}),
        "d192 page 64": (192, 64, 4, {}),
        "d192 page 16 group 7": (192, 16, 7, ALL),
        "d256 page 128": (256, 128, 4, {"sinks": SINKS}),
        "d96 page 16 group 7": (96, 16, 7, ALL),
    },
    "wide": {  # page size or 0 of prompts, query heads a KV head, whether queries follow a context or keys may be split
        "prompts": (0, 8, False, {}),
        "prompts offset": (0, 8, True, {}),
        "page 64 whole": (64, 8, False, {}),
        "page 16 group 6": (16, 6, True, {}),
    },
    "wide decode": {  # (query heads, KV heads), queries a sequence, whether of few sequences, flags
        "two heads": ((16, 2), 1, False, {}),
        "one head": ((8, 1), 1, False, {}),
        "few": ((16, 2), 1, True, {}),
        "8 queries": ((16, 2), 8, False, {}),
    },
    "ordered": {  # head dim, page size or 0 of prompts, query heads a KV head, whether for a few queries, flags
        "d64 few": (64, 64, 8, True, {"sinks": SINKS, "window": 1000}),
        "d128 prompts": (128, 0, 4, False, {}),
        "d128 page 64": (128, 64, 4, False, {}),
        "d128 few group 7": (128, 64, 7, True, {}),
    },
    "decode": {  # head dim, (query heads, KV heads), queries a sequence, flags
        "d64 all flags": (64, (32, 8), 1, {"window": 1000, "softcap": 30.0, "sinks": torch.zeros(32)}),
        "d128": (128, (32, 8), 1, {}),
        "d128 few queries": (128, (32, 8), 4, {}),
        "d128 8 queries": (128, (32, 8), 8, {}),
        "d192": (192, (16, 4), 1, {}),
        "d256": (256, (16, 4), 1, {}),
        "d256 8 queries": (256, (16, 4), 8, {}),
    },
    "clusters": {  # head dim, (query heads, KV heads), queries, page size, flags
        "d64": (64, (32, 8), 1, 64, {}),
        "d128 of 16 programs, all flags": (128, (16, 4), 2, 64, {"softcap": 30.0, "sinks": torch.zeros(16)}),
        "d128 over pages of 16": (128, (32, 8), 1, 16, {}),
        "d256": (256, (16, 4), 1, 64, {}),
    },
}
# What begins a launch: lengths are read, the launch before is waited for, copies or partial results follow.
_IN_PTX = ("ld.global", "griddepcontrol.wait", "cp.async.bulk.tensor", "griddepcontrol.launch_dependents")
_OF_CLUSTERS = (*_IN_PTX, "barrier.cluster.arrive", "st.async")  # and parts are exchanged


def of_roles(kernel: Any) -> dict[str, object]:
    """Return the facts of a kernel of specialised warps."""
    labelled, ptx = labelled_code(kernel.asm["cubin"]), kernel.asm["ptx"]
    code = instructions(labelled)
    return {
        "shared_bytes": kernel.metadata.shared,
        "spills": count(code, "STL"),
        "wgmma": count(code, "HGMMA"),
        "wgmma_fences": count(code, "WARPGROUP.ARRIVE"),
        "tma_loads": count(code, "UTMALDG"),
        "overlapped": overlapped_exponentials(code),
        "hazards": list(hazards(code)),
        "arrivals": num_arrivals(ptx),
        "arrivals_in_flight": list(arrivals_in_flight(ptx)),
        "early_arrivals": list(early_arrivals(ptx)),
        "strays": list(strays(ptx, labelled)),
    }


def of_tokens(kernel: Any) -> dict[str, object]:
    """Return the facts of the first kernel of decode."""
    code = disassemble(kernel.asm["cubin"])
    opcodes = {"spills": "STL", "mma": "HMMA", "matrix_loads": "LDSM", "tma_loads": "UTMALDG", "sent": "STAS.128"}
    return {"shared_bytes": kernel.metadata.shared} | {name: count(code, it) for name, it in opcodes.items()}


def prefill(
    name: str, head_dim: int, dtype: torch.dtype, has_context: bool, flags: AttentionFlags
) -> dict[str, object]:
    length = LONG if "long" in name else 256
    q = torch.empty(length, 8, head_dim, dtype=dtype)
    cu_seqlens = torch.tensor([0, length], dtype=torch.int32)
    batch = AttentionBatch(cu_seqlens, length, length, cu_seqlens_k=cu_seqlens.clone() if has_context else cu_seqlens)
    variant = variant_of(head_dim, batch, flags)
    classes = (pointer_class(q), (q.stride(0), q.stride(1)), pointer_class(flags.sinks), pointer_class(flags.spans))
    kernel = compiled_prefill(variant, (dtype, dtype, dtype), *classes)
    barriers = barrier_offsets(disassemble(kernel.asm["cubin"]))
    return of_roles(kernel) | {"barriers": barriers, "copied_bytes": copied_bytes(variant)}


def copied_bytes(variant: Variant) -> int:
    """Shared memory that TMA writes: queries, keys and values of 16 bits, which Triton places first."""
    tiling = variant.tiling
    queries = tiling.q_buffers * tiling.block_m * tiling.block_d
    return 2 * (queries + 2 * tiling.stages * tiling.block_n * tiling.block_d)


def window(_name: str, head_dim: int, dtype: torch.dtype, flags: AttentionFlags) -> dict[str, object]:
    variant = window_variant(head_dim, 8, flags)
    out_strides, is_whole = (16 * head_dim, head_dim), flags.window == MAX_WINDOW
    kernel = compiled_window_prefill(
        variant, (dtype, dtype, dtype), out_strides, is_whole, (dtype, 0), pointer_class(flags.sinks)
    )
    rows = variant.tiling.q_buffers * ROWS + 2 * variant.tiling.stages * (MAX_WINDOW + tokens_of(variant))
    barriers = barrier_offsets(disassemble(kernel.asm["cubin"]))
    return of_roles(kernel) | {"barriers": barriers, "copied_bytes": 2 * rows * head_dim}


def full(_name: str, head_dim: int, dtype: torch.dtype, _flags: AttentionFlags) -> dict[str, object]:
    return of_roles(
        compiled_full(full_variant_of(head_dim), (dtype, dtype, dtype), (dtype, 0), (8 * head_dim, head_dim))
    )


def extend(name: str, head_dim: int, page_size: int, group: int, flags: AttentionFlags) -> dict[str, object]:
    q = torch.empty(256, 8, head_dim, dtype=BF16)
    variant = extend_variant_of(head_dim, page_size, group, flags)
    variant = longer(variant) if "long" in name else whole(variant) if "whole" in name else variant
    classes = (pointer_class(q), (q.stride(0), q.stride(1)), (torch.int32, 0))
    pointers = (pointer_class(flags.sinks), pointer_class(flags.spans))
    return of_roles(compiled_extend(variant, Operands((BF16, BF16, BF16), *classes, *pointers)))


def ordered(
    _name: str, head_dim: int, page_size: int, group: int, is_few: bool, flags: AttentionFlags
) -> dict[str, object]:
    variant = ordered_variant_of(head_dim, page_size, group, is_few, flags)
    table = (torch.int32, 0) if page_size else None
    pointers = (table, pointer_class(flags.sinks), pointer_class(flags.spans))
    strides = (8 * group * head_dim, head_dim)
    return of_roles(compiled_ordered(variant, Operands((BF16, BF16, BF16), (BF16, 0), strides, *pointers)))


def wide(_name: str, page_size: int, group: int, is_other: bool, flags: AttentionFlags) -> dict[str, object]:
    strides = (16 * 512, 512)
    if page_size == 0:
        kernel = compiled_wide_prefill(wide_prefill_variant(is_other), (BF16, BF16, BF16), (BF16, 0), strides)
    else:
        operands = Operands((BF16, BF16, BF16), (BF16, 0), strides, (torch.int32, 0), None, None)
        kernel = compiled_wide_extend(wide_extend_variant(page_size, group, is_other), operands)
    assert flags.window is None, "no model asks for one"
    return of_roles(kernel)


def wide_decode(
    _name: str, heads: tuple[int, int], max_queries: int, of_few: bool, flags: AttentionFlags
) -> dict[str, object]:
    variant = wide_decode_variant(64, heads, max_queries, of_few=of_few)
    return of_decode(variant, compiled_wide_decode(variant, BF16, *pointers_of(flags), (heads[0] * 512, 512)))


def pointers_of(flags: AttentionFlags) -> tuple[Any, ...]:
    lengths = (torch.int32, 0)
    return ((BF16, 0), pointer_class(flags.sinks), lengths, lengths, lengths)


def decode(
    _name: str, head_dim: int, heads: tuple[int, int], max_queries: int, flags: AttentionFlags
) -> dict[str, object]:
    variant = decode_variant_of(head_dim, 64, heads, max_queries, 8, 4096, flags)
    return of_decode(variant, compiled_decode(variant, BF16, *pointers_of(flags), (heads[0] * head_dim, head_dim)))


def of_decode(variant: DecodeVariant, kernels: tuple[Any, Any]) -> dict[str, object]:
    """Return the facts of both kernels of decode."""
    split, combine = kernels
    return of_tokens(split) | {
        "spills": sum(count(disassemble(kernel.asm["cubin"]), "STL") for kernel in kernels),
        "per_processor": variant.per_processor,
        "places": [[kernel.asm["ptx"].find(text) for text in _IN_PTX] for kernel in kernels],
        "heads": variant.heads,
        "combine_shared_bytes": combine.metadata.shared,
    }


def clusters(
    _name: str, head_dim: int, heads: tuple[int, int], queries: int, page_size: int, flags: AttentionFlags
) -> dict[str, object]:
    variant = decode_variant_of(head_dim, page_size, heads, queries, 1, 2048, flags)
    kernel = compiled_cluster(variant, BF16, *pointers_of(flags), (heads[0] * head_dim, head_dim))
    return of_tokens(kernel) | {"places": [kernel.asm["ptx"].find(text) for text in _OF_CLUSTERS]}


COMPILE = {
    "prefill": prefill,
    "full": full,
    "window": window,
    "extend": extend,
    "wide": wide,
    "wide decode": wide_decode,
    "ordered": ordered,
    "decode": decode,
    "clusters": clusters,
}


def main() -> None:
    driver.set_active(Hopper())
    kind = sys.argv[1]
    found = {
        name: COMPILE[kind](name, *case, AttentionFlags(0.1, **flags))  # type: ignore[operator]
        for name, (*case, flags) in CASES[kind].items()
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
