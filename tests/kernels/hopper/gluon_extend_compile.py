"""Compiles variants of `gluon.extend.hopper` for sm_90 without a GPU; prints what their machine code shows as JSON.

A program of its own: where Triton's interpreter is on, as in the tests of this folder, nothing can be compiled.
"""

import json
import sys

import torch
from gluon_compile import SINKS, SPANS, Hopper
from gluon_findings import findings
from triton.runtime import driver

from kernels.batch import AttentionFlags
from kernels.hopper.extend import launch as gluon_extend_launch
from kernels.hopper.extend.variants import extend_variant_of, longer, whole
from kernels.tma.pointers import pointer_class

# name: (head dim, page size, query heads a KV head, flags)
_ALL = {"window": 1000, "softcap": 50.0, "sinks": SINKS, "spans": SPANS}
CASES = {
    "d64 page 64": (64, 64, 4, {}),
    "d64 long": (64, 64, 4, {}),
    "d80": (80, 64, 4, {}),
    "d96 whole": (96, 64, 4, {}),
    "d128 page 64": (128, 64, 4, {}),
    "d128 whole": (128, 64, 4, {}),
    "d136 page 64": (136, 64, 4, {"window": 1000, "spans": SPANS}),
    "d192 page 64": (192, 64, 4, {}),
    "d192 page 16 group 7": (192, 16, 7, _ALL),
    "d256 page 128": (256, 128, 4, {"sinks": SINKS}),
    "d96 page 16 group 7": (96, 16, 7, _ALL),
}


def compile_case(name: str, head_dim: int, page_size: int, group: int, flags: AttentionFlags) -> dict[str, object]:
    dtype = torch.bfloat16
    q = torch.empty(256, 8, head_dim, dtype=dtype)
    variant = extend_variant_of(head_dim, page_size, group, flags)
    if "long" in name:
        variant = longer(variant)
    if "whole" in name:
        variant = whole(variant)
    classes = (pointer_class(q), (q.stride(0), q.stride(1)), (torch.int32, 0))
    pointers = (pointer_class(flags.sinks), pointer_class(flags.spans))
    operands = gluon_extend_launch.Operands((dtype, dtype, dtype), *classes, *pointers)
    return findings(gluon_extend_launch.compiled_extend(variant, operands))


def main() -> None:
    driver.set_active(Hopper())
    names = sys.argv[1:] or list(CASES)
    results = {}
    for name in names:
        head_dim, page_size, group, flags = CASES[name]
        results[name] = compile_case(name, head_dim, page_size, group, AttentionFlags(0.1, **flags))
    print(json.dumps(results))


if __name__ == "__main__":
    main()
