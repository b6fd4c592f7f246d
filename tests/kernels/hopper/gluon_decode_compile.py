"""Compiles variants of `gluon.decode.hopper` for sm_90 without a GPU; prints what their machine code shows as JSON.

Of many sequences by split and combine, of one by clusters of programs.

A program of its own: where Triton's interpreter is on, as in the tests of this folder, nothing can be compiled.
"""

import json

import torch
from gluon_compile import Hopper
from gluon_sass import count, disassemble
from triton.runtime import driver

from kernels.batch import AttentionFlags
from kernels.hopper.decode.launch import compiled_cluster, compiled_decode
from kernels.hopper.decode.variants import variant_of
from kernels.tma.pointers import pointer_class

# name: (head dim, (query heads, KV heads), queries a sequence, longest context, flags)
CASES = {
    "d64 all flags": (64, (32, 8), 1, 4096, {"window": 1000, "softcap": 30.0, "sinks": torch.zeros(32)}),
    "d128": (128, (32, 8), 1, 4096, {}),
    "d128 few queries": (128, (32, 8), 4, 4096, {}),
    "d128 8 queries": (128, (32, 8), 8, 4096, {}),
    "d192": (192, (16, 4), 1, 4096, {}),
    "d256": (256, (16, 4), 1, 4096, {}),
    "d256 8 queries": (256, (16, 4), 8, 4096, {}),
}
# name: (head dim, (query heads, KV heads), queries, page size, flags)
CLUSTERS = {
    "d64": (64, (32, 8), 1, 64, {}),
    "d128 of 16 programs, all flags": (128, (16, 4), 2, 64, {"softcap": 30.0, "sinks": torch.zeros(16)}),
    "d128 over pages of 16": (128, (32, 8), 1, 16, {}),
    "d256": (256, (16, 4), 1, 64, {}),
}
TENSOR, LENGTHS = (torch.bfloat16, 0), (torch.int32, 0)


# What begins a launch: lengths are read, the launch before is waited for, copies or partial results follow.
_IN_PTX = ("ld.global", "griddepcontrol.wait", "cp.async.bulk.tensor", "griddepcontrol.launch_dependents")
# Behind them in a cluster: parts are exchanged.
_EXCHANGE = ("barrier.cluster.arrive", "st.async")


def clusters() -> dict[str, dict[str, object]]:
    results: dict[str, dict[str, object]] = {}
    for name, (head_dim, heads, queries, page_size, values) in CLUSTERS.items():
        flags = AttentionFlags(0.1, **values)
        variant = variant_of(head_dim, page_size, heads, queries, 1, 2048, flags)
        pointers = (TENSOR, pointer_class(flags.sinks), LENGTHS, LENGTHS, LENGTHS)
        kernel = compiled_cluster(variant, torch.bfloat16, *pointers, (heads[0] * head_dim, head_dim))
        code = disassemble(kernel.asm["cubin"])
        results[name] = {
            "shared_bytes": kernel.metadata.shared,
            "spills": count(code, "STL"),
            "mma": count(code, "HMMA"),
            "matrix_loads": count(code, "LDSM"),
            "vectors_sent": count(code, "STAS.128"),
            "places": [kernel.asm["ptx"].find(text) for text in (*_IN_PTX, *_EXCHANGE)],
        }
    return results


def main() -> None:
    driver.set_active(Hopper())
    results: dict[str, object] = {}
    for name, (head_dim, heads, max_queries, max_context, values) in CASES.items():
        flags = AttentionFlags(0.1, **values)
        variant = variant_of(head_dim, 64, heads, max_queries, 8, max_context, flags)
        pointers = (TENSOR, pointer_class(flags.sinks), LENGTHS, LENGTHS, LENGTHS)
        strides = (heads[0] * head_dim, head_dim)
        split, combine = compiled_decode(variant, torch.bfloat16, *pointers, strides)
        code = disassemble(split.asm["cubin"])
        results[name] = {
            "shared_bytes": split.metadata.shared,
            "per_processor": variant.per_processor,
            "spills": [count(disassemble(kernel.asm["cubin"]), "STL") for kernel in (split, combine)],
            "mma": count(code, "HMMA"),
            "matrix_loads": count(code, "LDSM"),
            "tma_loads": count(code, "UTMALDG"),
            "places": [[kernel.asm["ptx"].find(text) for text in _IN_PTX] for kernel in (split, combine)],
            "heads": variant.heads,
            "combine_shared_bytes": combine.metadata.shared,
        }
    print(json.dumps({"split": results, "cluster": clusters()}))


if __name__ == "__main__":
    main()
