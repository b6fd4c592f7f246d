"""Compiles the Triton kernels of the experts for sm_90, as a GPU launches them; prints their machine code's findings.

A program of its own: where Triton's interpreter is on, as in the tests of this folder, nothing can be compiled.
"""

import json
import re
from typing import Any

import torch
from triton.runtime import driver

from kernels.experts.hopper.launch import compiled_few, compiled_many
from kernels.experts.hopper.ordered import compiled_slots
from kernels.experts.hopper.slots_tilings import slots_tiling
from kernels.experts.hopper.tilings import ManyTiling, few_tiling
from kernels.experts.kinds import RoutingConfig, Scores
from kernels.experts.mxfp4.launch import compiled
from kernels.experts.mxfp4.order import hallmark_experts_gather
from kernels.experts.mxfp4.tilings import ALL_TILES
from kernels.experts.portable.dequantize import hallmark_experts_dequantize
from kernels.experts.portable.few_mxfp4 import hallmark_experts_few_down, hallmark_experts_few_gate_up
from kernels.experts.portable.products import hallmark_experts_combine, hallmark_experts_down, hallmark_experts_gate_up
from kernels.experts.routing.route_triton import hallmark_experts_route
from kernels.experts.routing.sorting import (
    hallmark_experts_count,
    hallmark_experts_place,
    hallmark_experts_prefix,
    hallmark_experts_sort,
)
from kernels.experts.tiles import READ_TOGETHER, ProductTiles, expert_tiles, few_tiles, padded
from kernels.experts.ungated.products import hallmark_experts_up
from support.compiled.gluon_sass import count, disassemble, hazards
from support.compiled.matmul_compile import Hopper

SHARED_BYTES = 232_448
QWEN3 = (128, 8, 2048, 768)  # experts, active, hidden size and width of Qwen3-30B-A3B
GPT_OSS = (32, 4, 2880, 2880)
NEMOTRON = (128, 6, 2688, 1856)  # Nemotron-3-Nano-30B-A3B
HALF, FLOAT, INT, BYTE = (
    torch.empty(16, dtype=dtype) for dtype in (torch.bfloat16, torch.float32, torch.int32, torch.uint8)
)
GRID = {"grid": (1,)}


def products(num_tokens: int, model: tuple[int, int, int, int], *, is_mxfp4: bool) -> dict[str, Any]:
    """Both products of a model's mixture at so many tokens."""
    num_experts, num_active, hidden, width = model
    tiles = expert_tiles(num_tokens * num_active, num_experts, 2, SHARED_BYTES, is_mxfp4=is_mxfp4)
    weight, scales, bias = (INT, BYTE, HALF) if is_mxfp4 else (HALF, None, None)
    kind = {"HAS_BIAS": is_mxfp4, "IS_MXFP4": is_mxfp4}
    gate_up = hallmark_experts_gate_up.warmup(
        HALF, weight, scales, bias, HALF, INT, INT, num_active, 1, hidden, hidden, width, 7.0, 1.702,
        ACTIVATION="clamped" if is_mxfp4 else "silu", **kind, **sizes(tiles.gate_up, hidden), **GRID,
    )  # fmt: skip
    down = hallmark_experts_down.warmup(
        HALF, weight, scales, bias, HALF, INT, INT, 1, hidden, width, **kind, **sizes(tiles.down, width), **GRID
    )
    return {"gate up": gate_up, "down": down}


def ungated(num_tokens: int, model: tuple[int, int, int, int]) -> dict[str, Any]:
    """Both products of a mixture without gates, which share their tiles."""
    num_experts, num_active, hidden, width = model
    tiles = expert_tiles(num_tokens * num_active, num_experts, 2, SHARED_BYTES).down
    up = hallmark_experts_up.warmup(
        HALF, HALF, HALF, INT, INT, num_active, 1, hidden, hidden, width, **sizes(tiles, hidden), **GRID
    )
    down = hallmark_experts_down.warmup(
        HALF, HALF, None, None, HALF, INT, INT, 1, hidden, width,
        HAS_BIAS=False, IS_MXFP4=False, **sizes(tiles, width), **GRID,
    )  # fmt: skip
    return {"up without a gate": up, "down without a gate": down}


def sizes(tiles: ProductTiles, size_in: int) -> dict[str, Any]:
    blocks = {"BLOCK_M": tiles.block_m, "BLOCK_N": tiles.block_n, "BLOCK_K": tiles.block_k}
    options = {"num_warps": tiles.num_warps, "num_stages": tiles.num_stages}
    return {"EVEN_K": size_in % tiles.block_k == 0, **blocks, **options}


def route(config: RoutingConfig, has_bias: bool, has_gate: bool = False) -> Any:
    return hallmark_experts_route.warmup(
        HALF, FLOAT if has_bias else None, FLOAT, FLOAT, INT, config.num_experts, config.scale,
        NUM_EXPERTS=config.num_experts, BLOCK_E=padded(config.num_experts), NUM_ACTIVE=config.num_active,
        NUM_GROUPS=config.num_groups, NUM_ACTIVE_GROUPS=config.num_active_groups,
        IS_SOFTMAX=config.scores is Scores.SOFTMAX, RENORMALIZES=config.renormalizes, HAS_BIAS=has_bias,
        HAS_GATE=has_gate, num_warps=1, IS_DEPENDENT=True, launch_pdl=True, **GRID,
    )  # fmt: skip


def compile_all() -> dict[str, Any]:
    ahead = {"IS_DEPENDENT": True, "launch_pdl": True, **GRID}
    sort = {"BLOCK_P": 64, "BLOCK_E": padded(128), "num_warps": 8, **ahead}
    found = {
        "route": route(RoutingConfig(128, 8, renormalizes=True), has_bias=False),
        "route, groups": route(RoutingConfig(256, 8, Scores.SIGMOID, True, 8, 4, 2.5), has_bias=True),
        "route, a gate": route(RoutingConfig(256, 8, renormalizes=True), has_bias=False, has_gate=True),
        "sort": hallmark_experts_sort.warmup(INT, INT, INT, 8, 8, 128, BLOCK_S=128, BLOCK_T=64, **sort),
        "count": hallmark_experts_count.warmup(INT, INT, 8, 8, NUM_EXPERTS=128, **sort),
        "prefix": hallmark_experts_prefix.warmup(INT, INT, 8, BLOCK=1024, num_warps=8, **ahead),
        "place": hallmark_experts_place.warmup(
            INT, INT, INT, INT, INT, 8, 8, 8, 128, NUM_EXPERTS=128, BLOCK_T=64, **sort
        ),
        "combine": hallmark_experts_combine.warmup(HALF, FLOAT, HALF, 8, 2048, 2048, NUM_ACTIVE=8, BLOCK=1024, **ahead),
    }
    for num_tokens in (1, 8192):
        for name, kernel in products(num_tokens, QWEN3, is_mxfp4=False).items():
            found[f"{name}, {num_tokens} tokens"] = kernel
        for name, kernel in ungated(num_tokens, NEMOTRON).items():
            found[f"{name}, {num_tokens} tokens"] = kernel
    for num_tokens in (128, 8192):
        for name, kernel in products(num_tokens, GPT_OSS, is_mxfp4=True).items():
            found[f"{name}, mxfp4, {num_tokens} tokens"] = kernel
    found |= few_products(GPT_OSS) | codes_products()
    found["gather"] = hallmark_experts_gather.warmup(
        HALF, INT, HALF, HALF, 2880, 2880, 2944, 2944, SIZE=128, COLUMNS=1024, HAS_TAIL=True, NUM_ACTIVE=4, **ahead
    )
    found["dequantize"] = hallmark_experts_dequantize.warmup(INT, BYTE, HALF, 8, BLOCKS=256, num_warps=8, **GRID)
    return found | gluon_products(QWEN3, has_bias=False) | gluon_products(GPT_OSS, has_bias=True)


def few_products(model: tuple[int, int, int, int]) -> dict[str, Any]:
    """Both products of few tokens, with mxfp4 weights."""
    _, num_active, hidden, width = model
    gate_up, down = few_tiles(SHARED_BYTES)
    ahead = {"IS_DEPENDENT": True, "launch_pdl": True, **GRID}
    up_kernel = hallmark_experts_few_gate_up.warmup(
        HALF, INT, BYTE, HALF, HALF, INT, num_active, hidden, width, 7.0, 1.702, HIDDEN=hidden, ACTIVATION="clamped",
        HAS_BIAS=True, BLOCK_N=gate_up.block_n, BLOCK_K=gate_up.block_k, num_warps=gate_up.num_warps, **ahead,
    )  # fmt: skip
    down_kernel = hallmark_experts_few_down.warmup(
        HALF, INT, BYTE, HALF, HALF, INT, FLOAT, num_active, hidden, hidden, WIDTH=width, NUM_ACTIVE=num_active,
        BLOCK_A=READ_TOGETHER, HAS_BIAS=True, BLOCK_N=down.block_n, BLOCK_K=down.block_k, num_warps=down.num_warps,
        **ahead,
    )  # fmt: skip
    return {"gate up, mxfp4, few tokens": up_kernel, "down, mxfp4, few tokens": down_kernel}


def gluon_products(model: tuple[int, int, int, int], *, has_bias: bool) -> dict[str, Any]:
    """Both Gluon products of a model's mixture, of every number of rows a tile."""
    _, num_active, hidden, width = model
    activation, bias = ("clamped", (torch.bfloat16, 0)) if has_bias else ("silu", None)
    found = {
        "gluon gate up, 128 rows": compiled_many(ManyTiling(True, 2, has_bias, activation), torch.bfloat16, bias),
        "gluon down, 128 rows": compiled_many(ManyTiling(False, 1, has_bias, ""), torch.bfloat16, bias),
    }
    of_slots = (
        slots_tiling(num_active, 2 * width, hidden, 132, 2, has_bias, activation),
        slots_tiling(num_active, hidden, width, 132, 1, has_bias, ""),
    )
    for tiling in of_slots:
        found[f"gluon slots, {tiling.parts} parts"] = compiled_slots(tiling, torch.bfloat16, bias)
    for rows in (1, 16, 32, 64):
        gate_up = few_tiling(rows, 2, hidden, has_bias, activation)
        found[f"gluon gate up, {rows} rows"] = compiled_few(gate_up, torch.bfloat16, bias)
        found[f"gluon down, {rows} rows"] = compiled_few(few_tiling(rows, 1, width, has_bias, ""), torch.bfloat16, bias)
    return {f"{name}, bias" if has_bias else name: kernel for name, kernel in found.items()}


def codes_products() -> dict[str, Any]:
    """Both Gluon products of mxfp4 weights, of every number of slots a tile."""
    bias, found = (torch.bfloat16, 0), {}
    for tiles in ALL_TILES:
        for large, name in ((False, ""), (True, ", large scales")):
            gate_up = tiles.gate_up(has_bias=True, activation="clamped", has_large_scales=large)
            found[f"codes gate up, {tiles.tokens} rows{name}"] = compiled(gate_up, bias)
            down = tiles.down(has_bias=True, has_large_scales=large)
            found[f"codes down, {tiles.tokens} rows{name}"] = compiled(down, bias)
    return found


def findings(kernel: Any) -> dict[str, int]:
    code = disassemble(kernel.asm["cubin"])
    registers = [int(number) for line in code for number in re.findall(r"\bR(\d+)\b", line)]
    return {
        "spills": count(code, "STL"),
        "registers": max(registers) + 1,
        "shared_bytes": kernel.metadata.shared,
        "wgmma": count(code, "HGMMA"),
        "wgmma_waits": count(code, "WARPGROUP.DEPBAR"),
        "wgmma_hazards": len(list(hazards(code))),
        "mma": count(code, "HMMA"),
        "wide_copies": sum("LDGSTS" in line and ".128" in line for line in code),
        "wide_loads": sum("LDG" in line and ".128" in line for line in code),
        "tma_loads": count(code, "UTMALDG"),
        "global_atomics": count(code, "ATOMG") + count(code, "RED.E"),
    }


def main() -> None:
    driver.set_active(Hopper())
    print(json.dumps({name: findings(kernel) for name, kernel in compile_all().items()}))


if __name__ == "__main__":
    main()
