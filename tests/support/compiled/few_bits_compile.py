"""Compiles the Triton products of weights of 8 and 4 bits for sm_90; prints facts of their code as JSON.

A program of its own: where Triton's interpreter is on, as in the tests of this folder, nothing can be compiled.
"""

import json
import re
from typing import Any

import torch
from triton.runtime import driver

from kernels.experts.few_bits.launch import down_launches, gate_up_launches
from kernels.experts.few_bits.weights import CLASSES, FewBitExperts
from kernels.experts.formats import FewBitFormat
from kernels.experts.fp8.launch import compiled_slots, compiled_tiles
from kernels.experts.fp8.tilings import slot_tiling, tile_tiling
from kernels.experts.int4.launch import compiled as compiled_int4
from kernels.experts.mxfp4.tilings import CodesTiles
from kernels.fused.activation_kind import Activation
from kernels.fused.backend import Aligned
from kernels.linear.epilogue import Epilogue
from kernels.linear.formats.int4_formats import INT4_32, INT4_128, INT4_FORMATS
from kernels.linear.hopper.few_bits_tilings import int4_skinny_tiling
from kernels.linear.hopper.fp8_norm import hallmark_fp8_norm, options_of
from kernels.linear.hopper.fp8_wide import compiled_fp8_wide
from kernels.linear.hopper.fp8_wide_tilings import WideScales, fp8_wide_tilings
from kernels.linear.hopper.int4_one_row import compiled_int4_one_row, num_chunks
from kernels.linear.hopper.int4_one_row_tilings import Int4OneRowTiling, one_row_tiling
from kernels.linear.hopper.int4_swapped import compiled_int4_swapped
from kernels.linear.hopper.int4_swapped_tilings import Int4SwappedTiling, int4_swapped_tiling
from kernels.linear.portable.fp8_path import fp8_launches
from kernels.linear.portable.int4_path import int4_launch
from kernels.linear.portable.tiles import MOST_FEW, fp8_tile, int4_tile
from kernels.linear.rounded_input import TakesRounded
from kernels.linear.shape import FP8_BLOCKS, FP8_ROWS, FP8_STATIC, WeightFormat
from kernels.linear.weights import class_of
from support.compiled.fused_kernels import rms_norm_kernel
from support.compiled.gluon_sass import count, disassemble, hazards
from support.compiled.sm90_driver import Hopper

CPU, BF16 = torch.device("cpu"), torch.bfloat16
SIZE_OUT, SIZE_IN = 4096, 1024
# rows, format, epilogue, products in fp16
CASES = {
    "1 row": (1, FP8_ROWS, Epilogue.NONE, True),
    "64 rows, blocks, swiglu": (64, FP8_BLOCKS, Epilogue.SWIGLU, True),
    "many rows": (65, FP8_ROWS, Epilogue.NONE, False),
    "many rows, static": (65, FP8_STATIC, Epilogue.FP32, False),
    "many rows, blocks": (65, FP8_BLOCKS, Epilogue.NONE, False),
    "many rows, blocks, swiglu": (65, FP8_BLOCKS, Epilogue.SWIGLU, False),
    "many rows, blocks, fp16": (65, FP8_BLOCKS, Epilogue.SWIGLU, True),
    "1 row, 4 bits": (1, INT4_128, Epilogue.NONE, False),
    "64 rows, 4 bits, swiglu": (64, INT4_32, Epilogue.SWIGLU, False),
    "many rows, 4 bits": (65, INT4_32, Epilogue.NONE, False),
    "many rows, 4 bits, swiglu": (65, INT4_128, Epilogue.SWIGLU, False),
}

# rows of a tile, format
EXPERTS = {
    "few rows": (16, FewBitFormat.FP8_BLOCKS),
    "some rows": (64, FewBitFormat.FP8_BLOCKS),
    "many rows": (128, FewBitFormat.FP8_ROWS),
    "many rows, blocks": (128, FewBitFormat.FP8_BLOCKS),
    "few rows, 4 bits": (16, FewBitFormat.INT4_128),
    "many rows, 4 bits": (128, FewBitFormat.INT4_32),
}


def facts(num_rows: int, weight_format: WeightFormat, epilogue: Epilogue, as_half: bool) -> dict[str, int]:
    weight = class_of(weight_format).empty(epilogue.parts * SIZE_OUT, SIZE_IN, BF16, CPU)
    x = torch.empty(num_rows, SIZE_IN, dtype=BF16)
    out = torch.empty(num_rows, SIZE_OUT, dtype=torch.float32 if epilogue is Epilogue.FP32 else BF16)
    given = x, weight, None, epilogue, out
    if weight_format in INT4_FORMATS:
        tile = int4_tile(num_rows, SIZE_OUT, parts=epilogue.parts, group=weight.group, bytes_of_x=2)
        launches = (int4_launch(*given, tile),)
    else:
        launches = fp8_launches(*given, fp8_tile(num_rows, SIZE_OUT, parts=epilogue.parts), as_half=as_half)
    kernels = [it.kernel.warmup(*it.arguments, grid=it.grid, **it.options) for it in launches]
    code = disassemble(kernels[-1].asm["cubin"])
    return {
        "spills": sum(count(disassemble(kernel.asm["cubin"]), "STL") for kernel in kernels),
        "shared_bytes": max(kernel.metadata.shared for kernel in kernels),
        "of_8_bits": count(code, "QGMMA"),
        "of_16_bits": count(code, "HGMMA") + count(code, "HMMA"),
        "sums": count(code, "FADD") + count(code, "FFMA"),
        "is_many": num_rows > MOST_FEW,
    }


def facts_of_experts(block_m: int, kind: FewBitFormat) -> dict[str, int]:
    """Facts of both products of experts, of tiles of so many rows."""
    hidden, width, slots, of_kind = 512, 256, 128, CLASSES[kind]
    sizes = (4 * 2 * width, hidden), (4 * hidden, width)
    experts = FewBitExperts(*(of_kind.empty(*size, BF16, CPU) for size in sizes))
    order, tiles = torch.empty(slots, dtype=torch.int32), torch.empty(12, 3, dtype=torch.int32)
    x, inner, results = (torch.empty(slots, size, dtype=BF16) for size in (hidden, width, hidden))
    given = order, tiles, block_m
    launches = gate_up_launches(x, experts, Activation.SILU, inner, *given, 1) + down_launches(
        inner, experts, results, *given
    )
    kernels = [it.kernel.warmup(*it.arguments, grid=it.grid, **it.options) for it in launches]
    codes = [disassemble(kernel.asm["cubin"]) for kernel in kernels]
    return {
        "spills": sum(count(code, "STL") for code in codes),
        "shared_bytes": max(kernel.metadata.shared for kernel in kernels),
        "of_8_bits": sum(count(code, "QGMMA") for code in codes),
    }


def facts_of_gluon() -> dict[str, dict[str, int]]:
    """Facts of the products of experts in Gluon: of one slot, of few slots, and of many."""
    kernels = {
        "slots, gate up": compiled_slots(slot_tiling(8, 1536, 2048, 132, 2, True, "silu"), BF16),
        "few, gate up": compiled_tiles(tile_tiling(16, 2, True, "silu"), BF16),
        "many, gate up": compiled_tiles(tile_tiling(128, 2, True, "silu"), BF16),
        "many, down": compiled_tiles(tile_tiling(128, 1, True, ""), BF16),
    }
    of_codes = CodesTiles(16, 2, programs=2), CodesTiles(128, 2)
    for tiles in of_codes:
        tiling = tiles.gate_up(has_bias=False, activation="silu", has_large_scales=False)
        kernels[f"4 bits, {tiles.tokens} slots, gate up"] = compiled_int4(tiling)
    codes = {name: disassemble(kernel.asm["cubin"]) for name, kernel in kernels.items()}
    return {
        name: {
            "spills": count(code, "STL"),
            "shared_bytes": kernels[name].metadata.shared,
            "tma_loads": count(code, "UTMALDG"),
            "of_8_bits": count(code, "QGMMA"),
            "of_16_bits": count(code, "HGMMA"),
        }
        for name, code in codes.items()
    }


def facts_of_wide(scales: WideScales, parts: int) -> dict[str, dict[str, int]]:
    """Facts of each tiling of the products of many rows in 8 bits, by its sizes."""
    found = {}
    for tiling in fp8_wide_tilings(parts=parts, has_bias=False, scales=scales):
        kernel = compiled_fp8_wide(tiling, BF16)
        code = disassemble(kernel.asm["cubin"])
        found[f"{scales.value} x {parts}, {tiling.rows} by {tiling.columns}"] = {
            "spills": count(code, "STL"),
            "shared_bytes": kernel.metadata.shared,
            "of_8_bits": count(code, "QGMMA"),
            "waits": count(code, "ACQBULK"),
            "roles": tiling.consumers + 1,
            "sums": count(code, "FADD") + count(code, "FFMA"),
            "numbers": tiling.rows * tiling.columns // 128,  # of a thread of each consumer, all consumers together
        }
    return found


def facts_of_swapped() -> dict[str, dict[str, int]]:
    """Facts of products of up to 256 rows in groups of 128 codes, by what their tilings have, and of one row."""
    kernels: dict[Int4SwappedTiling | Int4OneRowTiling, Any] = {}
    for size_out, parts in ((SIZE_OUT, 1), (14336, 2)):
        for num_rows in (8, 16, 32, 64, 128, 256):
            tiling = int4_swapped_tiling(num_rows, size_out, SIZE_OUT, 132, parts=parts, has_bias=False, group=128)
            assert tiling is not None
            kernels[tiling] = compiled_int4_swapped(tiling, BF16, BF16)
        few = int4_skinny_tiling(1, size_out, SIZE_OUT, 132, parts, False, 128)
        assert few is not None
        of_one = one_row_tiling(few, size_out, SIZE_OUT, 132)
        kernels[of_one] = compiled_int4_one_row(of_one, num_chunks(of_one, SIZE_OUT), BF16, BF16)
    codes = {tiling: disassemble(kernel.asm["cubin"]) for tiling, kernel in kernels.items()}
    return {
        str(tiling): {
            "spills": count(code, "STL"),
            "shared_bytes": tiling.programs * kernels[tiling].metadata.shared,
            "of_16_bits": count(code, "HGMMA") + count(code, "HMMA"),
            "hazards": len(list(hazards(code))),
            "waits": count(code, "ACQBULK"),
        }
        for tiling, code in codes.items()
    }


def facts_of_norms() -> dict[str, dict[str, object]]:
    """Facts of the norms that round, by columns and scales, and the layouts that they and the plain norm sum in."""
    found: dict[str, dict[str, object]] = {}
    bf16, overlap = Aligned(BF16), {"OVERLAPS": True, "launch_pdl": True, "grid": (1,)}
    for size in (192, 2112, 4096, 8192, TakesRounded.most_columns):
        options = options_of(size, "rows", True)
        same = {key: options[key] for key in ("SIZE", "BLOCK", "HAS_RESIDUAL", "num_warps")}
        plain = rms_norm_kernel.warmup(*[bf16] * 4, size, size, 0.0, **same, **overlap)
        for by in ("rows", "runs", "given"):
            tensors = bf16, bf16, bf16, Aligned(torch.float8_e4m3fn), Aligned(torch.float32)
            kernel = hallmark_fp8_norm.warmup(*tensors, 3, 0.0, **options_of(size, by, True), **overlap)
            found[f"{size} {by}"] = {
                "spills": count(disassemble(kernel.asm["cubin"]), "STL"),
                "summed_in": layout_of_first_sum(kernel.asm["ttgir"]),
                "norm_summed_in": layout_of_first_sum(plain.asm["ttgir"]),
            }
    return found


def layout_of_first_sum(ir: str) -> str:
    """Return the layout of what a kernel's first reduction sums."""
    [name] = re.findall(r"\(tensor<\w+, (#\w+)>\) ->", ir[ir.index('"tt.reduce"') :])[:1]
    [layout] = re.findall(rf"^{name} = (.*)$", ir, re.MULTILINE)
    return str(layout)


def main() -> None:
    driver.set_active(Hopper())
    found = {name: facts(*case) for name, case in CASES.items()}
    experts = {name: facts_of_experts(*case) for name, case in EXPERTS.items()}
    wide = facts_of_wide(WideScales.ROWS, 1) | facts_of_wide(WideScales.BLOCKS, 2)
    parts = {"products": found, "experts": experts, "gluon": facts_of_gluon(), "wide": wide, "norms": facts_of_norms()}
    print(json.dumps(parts | {"swapped": facts_of_swapped()}))


if __name__ == "__main__":
    main()
