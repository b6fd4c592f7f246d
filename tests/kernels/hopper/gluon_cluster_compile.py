"""Compiles the variants of `gluon.decode.hopper` for one sequence for sm_90 without a GPU; prints findings as JSON.

A program of its own: where Triton's interpreter is on, as in the tests of this folder, nothing can be compiled.
"""

import json

import torch
from gluon_compile import Hopper
from gluon_sass import count, disassemble
from triton.runtime import driver

from kernels.batch import AttentionFlags
from kernels.hopper.decode.launch import compiled_cluster
from kernels.hopper.decode.variants import variant_of
from kernels.tma.pointers import pointer_class

# name: (head dim, (query heads, KV heads), queries, page size, flags)
CASES = {
    "d64": (64, (32, 8), 1, 64, {}),
    "d128 of 16 programs, all flags": (128, (16, 4), 2, 64, {"softcap": 30.0, "sinks": torch.zeros(16)}),
    "d128 over pages of 16": (128, (32, 8), 1, 16, {}),
    "d256": (256, (16, 4), 1, 64, {}),
}
# Lengths are read, the launch before is waited for, copies follow, the next launch may start, parts are exchanged.
_IN_PTX = (
    "ld.global", "griddepcontrol.wait", "cp.async.bulk.tensor", "griddepcontrol.launch_dependents",
    "barrier.cluster.arrive", "st.async",
)  # fmt: skip


def main() -> None:
    driver.set_active(Hopper())
    results = {}
    tensor, lengths = (torch.bfloat16, 0), (torch.int32, 0)
    for name, (head_dim, heads, queries, page_size, values) in CASES.items():
        flags = AttentionFlags(0.1, **values)
        variant = variant_of(head_dim, page_size, heads, queries, 1, 2048, flags)
        pointers = (tensor, pointer_class(flags.sinks), lengths, lengths, lengths)
        kernel = compiled_cluster(variant, torch.bfloat16, *pointers, (heads[0] * head_dim, head_dim))
        code = disassemble(kernel.asm["cubin"])
        results[name] = {
            "shared_bytes": kernel.metadata.shared,
            "spills": count(code, "STL"),
            "mma": count(code, "HMMA"),
            "matrix_loads": count(code, "LDSM"),
            "vectors_sent": count(code, "STAS.128"),
            "places": [kernel.asm["ptx"].find(text) for text in _IN_PTX],
        }
    print(json.dumps(results))


if __name__ == "__main__":
    main()
