"""Compiles the exchange kernels for sm_90, as a GPU launches them; prints counts of their instructions as JSON.

A program of its own: where Triton's interpreter is on, as in the tests of this folder, nothing can be compiled.
"""

import json
from typing import Any

import torch
from triton.runtime import driver

from kernels.collective.exchange import hallmark_exchange_sum
from kernels.collective.push import hallmark_push_columns, hallmark_push_sum, hallmark_push_values
from kernels.collective.push_path import num_warps
from support.compiled.gluon_sass import count, disassemble
from support.compiled.sm90_driver import Hopper

HALF, FLOAT, INT, LONG = (
    torch.empty(16, dtype=dtype) for dtype in (torch.bfloat16, torch.float32, torch.int32, torch.int64)
)
OVERLAP = {"OVERLAPS": True, "launch_pdl": True, "grid": (1,)}


def compile_all() -> dict[str, Any]:
    found = {}
    for columns, block in ((4096, 512), (5120, 1024), (8192, 1024)):
        for world in (2, 4, 8):
            for has_norm in (False, True):
                found[f"sum {columns} {world}{' norm' * has_norm}"] = hallmark_push_sum.warmup(
                    HALF, HALF, HALF, HALF, LONG, INT, 3, 1e-5,
                    COLUMNS=columns, BLOCK=block, RANK=1, WORLD=world, CAPACITY=256, PROGRAMS=128, HAS_NORM=has_norm,
                    num_warps=num_warps(block, world), **OVERLAP,
                )  # fmt: skip
    for has_norm in (False, True):
        found[f"exchange 8192{' norm' * has_norm}"] = hallmark_exchange_sum.warmup(
            HALF,
            HALF,
            INT,
            2,
            2,
            2,
            HALF,
            HALF,
            HALF,
            1e-5,
            SIZE=8192,
            BLOCK=8192,
            HAS_NORM=has_norm,
            WORD=32,
            num_warps=16,
            grid=(1,),
        )
    places = {"BLOCK": 512, "RANK": 1, "CAPACITY": 512, "PROGRAMS": 128, "num_warps": 16, **OVERLAP}
    for world in (2, 8):
        found[f"columns {world}"] = hallmark_push_columns.warmup(
            INT, INT, INT, LONG, INT, 3, UNITS=16032, WORLD=world, **places
        )
        found[f"values {world}"] = hallmark_push_values.warmup(LONG, LONG, INT, 3, WORLD=world, **places)
    return found


def main() -> None:
    driver.set_active(Hopper())
    counts = {}
    for name, kernel in compile_all().items():
        code = disassemble(kernel.asm["cubin"])
        counts[name] = {
            "spills": count(code, "STL"),
            "loads of other sizes": num_others(code, "LDG"),
            "stores of other sizes": num_others(code, "STG"),
            "awaited units": count(code, "LDG.E.128.STRONG.SYS"),
            "fences": count(code, "MEMBAR"),
        }
    print(json.dumps(counts))


def num_others(code: list[str], opcode: str) -> int:
    """Loads or stores of global memory that are not of 16 bytes."""
    return count(code, opcode) - count(code, f"{opcode}.E.128")


if __name__ == "__main__":
    main()
