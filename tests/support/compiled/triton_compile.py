"""Compiles the Triton kernels of the fused ops for sm_90, as a GPU launches them; prints their spills as JSON.

A program of its own: where Triton's interpreter is on, as in the tests of this folder, nothing can be compiled.
"""

import json
from typing import Any

import torch
from triton.runtime import driver

from kernels.sampling import draw
from kernels.sampling.draw_kernels import (
    best_kernel,
    bracket_kernel,
    count_kernel,
    draw_kernel,
    finish_kernel,
    narrow_kernel,
    refine_kernel,
)
from kernels.sampling.penalties import clear_kernel, mark_kernel, penalise_kernel
from support.compiled.fused_kernels import (
    add_norms_kernel,
    add_shared_kernel,
    asymmetric_kernel,
    gate_heads_kernel,
    gated_kernel,
    head_products_kernel,
    index_kernel,
    latent_kernel,
    norm_and_gate_kernel,
    rms_norm_kernel,
    rope_kernel,
)
from support.compiled.gluon_sass import count, disassemble
from support.compiled.norm_kernels import layer_norm_kernel, mean_squares_kernel, norm_by_kernel
from support.compiled.sm90_driver import Hopper

VOCAB = 128_256
HALF, FLOAT, INT, LONG, BOOL = (
    torch.empty(16, dtype=dtype) for dtype in (torch.bfloat16, torch.float32, torch.int32, torch.int64, torch.bool)
)
PAGES = torch.empty(16, dtype=torch.float8_e4m3fn)
OVERLAP = {"OVERLAPS": True, "launch_pdl": True}
PLACE = (VOCAB, VOCAB, 8192, 4, draw.MAX_SPLITS)
BLOCK = {"BLOCK": draw.BLOCK}
SUB_BINS = {"SUB_BINS": draw.SUB_BINS}
LIMITS = (FLOAT, LONG, FLOAT)  # temperature, top_k, top_p
PARTS = (FLOAT, FLOAT, INT, FLOAT, FLOAT, INT, FLOAT, INT)
DRAW = {"MAX_SPLITS": draw.MAX_SPLITS, "FAST": True}


def compile_all() -> dict[str, Any]:
    grid = {"grid": (1,)}
    norm = {"SIZE": 4096, "BLOCK": 4096, "num_warps": 8, **OVERLAP, **grid}
    rope = {"NUM_HEADS": 32, "NUM_KV_HEADS": 8, "HEAD_DIM": 128, "NUM_Q_BLOCKS": 1, "BLOCK_HEADS": 32, "BLOCK_COLS": 64}
    heads = (HALF, HALF, HALF, FLOAT, INT, HALF, HALF, LONG, HALF, HALF, 6144, 6144, 6144, 1e-6)
    return {
        "norm": rms_norm_kernel.warmup(HALF, HALF, HALF, HALF, 4096, 4096, 1e-5, HAS_RESIDUAL=True, **norm),
        **{
            f"norms around a sum, {norms} of it": add_norms_kernel.warmup(
                *(HALF,) * 6, *(FLOAT,) * 3, HALF, *(FLOAT,) * 3, 1e-6, 1e-6, 1e-6, SIZE=8192, BLOCK=8192,
                NUM_PARTS=parts, HAS_AFTER=parts == 2, HAS_SCALE=parts == 2, NUM_NORMS=norms,
                num_warps=16, **OVERLAP, **grid,
            )
            for parts, norms in ((2, 1), (1, 3))
        },
        "swiglu": gated_kernel.warmup(HALF, HALF, 28672, SIZE=14336, BLOCK=2048, **OVERLAP, **grid),
        "geglu": gated_kernel.warmup(
            HALF, HALF, 28672, SIZE=14336, BLOCK=2048, ACTIVATION="gelu_pytorch_tanh", **OVERLAP, **grid
        ),
        "gelu": gated_kernel.warmup(HALF, HALF, 28672, SIZE=14336, BLOCK=2048, ACTIVATION="gelu", **OVERLAP, **grid),
        "norm and gate of heads": norm_and_gate_kernel.warmup(
            HALF, HALF, FLOAT, HALF, 12288, 1e-6, HEADS=32, SIZE=128, BLOCK_HEADS=16, BLOCK=128, num_warps=8,
            **OVERLAP, **grid,
        ),
        "gate of heads": gate_heads_kernel.warmup(
            HALF, HALF, 64, SIZE=8192, PER_GATE=128, IS_SOFTPLUS=True, BLOCK=2048, **OVERLAP, **grid
        ),
        "sum with what all tokens visit": add_shared_kernel.warmup(
            HALF, HALF, HALF, HALF, 1.0, SIZE=7168, BLOCK=8192, HAS_GATE=True, num_warps=16, **OVERLAP, **grid
        ),
        **{
            f"products of heads, {columns} columns": head_products_kernel.warmup(
                HALF, HALF, HALF, 300, 8192, 256, 1, 8192, *strides, 8192, 512, 1,
                SIZE_IN=192, SIZE_OUT=columns, ROWS=64, COLUMNS=min(128, columns), STEP=64,
                num_warps=4, num_stages=3, **grid,
            )
            for columns, strides in ((512, (512, 1)), (64, (1, 512)))
        },
        "rope, part of a head": rope_kernel.warmup(
            *heads, **rope, HAS_NORM=True, REST=32, **OVERLAP, **grid
        ),
        "rope, pages of 8 bits": rope_kernel.warmup(
            *heads[:5], PAGES, PAGES, *heads[7:], **rope, HAS_NORM=True, REST=32, SCALED_PAGE=16, **OVERLAP, **grid
        ),
        "rope": rope_kernel.warmup(*heads, **rope, HAS_NORM=True, **OVERLAP, **grid),
        "rope, values of fewer numbers": asymmetric_kernel.warmup(
            *heads[:8], 6144, 768, 512, 0.7, NUM_HEADS=32, NUM_KV_HEADS=4, HEAD_DIM=192, VALUE_DIM=128, HALF=32,
            NUM_Q_BLOCKS=2, BLOCK_HEADS=16, BLOCK_HALF=32, REST=128, BLOCK_REST=128, BLOCK_VALUE=128, **OVERLAP, **grid,
        ),
        "latents": latent_kernel.warmup(
            HALF, HALF, HALF, HALF, FLOAT, INT, HALF, LONG, HALF, 9216, 576, 3072, 192, 2112, 576, 1e-6,
            NUM_HEADS=16, LATENT=512, HALF=32, BLOCK_HEADS=16, BLOCK_LATENT=512, BLOCK_HALF=32, **OVERLAP, **grid,
        ),
        **{
            f"keys of an indexer, {pairs}": index_kernel.warmup(
                *(HALF,) * 5, FLOAT, INT, HALF, HALF, LONG, 2112, 704, 704, 1e-6, NUM_HEADS=32, DIM=128, HALF=32,
                NEIGHBOURS=pairs == "neighbours", BLOCK_HEADS=32, BLOCK_DIM=128, BLOCK_HALF=32, **OVERLAP, **grid,
            )
            for pairs in ("neighbours", "halves")
        },
        "clear marks": clear_kernel.warmup(INT, LONG, LONG, 800, VOCAB, 512, **grid),
        "mark": mark_kernel.warmup(INT, LONG, LONG, 800, 500, VOCAB, 1 << 30, 512, **grid),
        "penalise": penalise_kernel.warmup(
            FLOAT, INT, LONG, FLOAT, FLOAT, FLOAT, LONG, LONG, 800, VOCAB, VOCAB, 1 << 30, 512,
            enable_fp_fusion=False, **grid,
        ),
        "best": best_kernel.warmup(FLOAT, FLOAT, INT, *PLACE[:4], **BLOCK, num_warps=8, **grid),
        "count": count_kernel.warmup(
            FLOAT, FLOAT, INT, INT, FLOAT, *LIMITS, *PLACE, **draw.BINS, **BLOCK, num_warps=4, **grid
        ),
        "bracket": bracket_kernel.warmup(INT, FLOAT, INT, LONG, FLOAT, VOCAB, **draw.BINS, num_warps=4, **grid),
        "refine": refine_kernel.warmup(
            FLOAT, FLOAT, INT, INT, INT, FLOAT, *LIMITS, *PLACE, **draw.BINS, **SUB_BINS, **BLOCK, num_warps=4, **grid
        ),
        "narrow": narrow_kernel.warmup(
            INT, INT, FLOAT, INT, FLOAT, LONG, FLOAT, VOCAB, **draw.BINS, **SUB_BINS, num_warps=4, **grid
        ),
        "draw": draw_kernel.warmup(
            *PARTS, *LIMITS, FLOAT, LONG, LONG, *PLACE[:4], **DRAW, **BLOCK, num_warps=8, **grid
        ),
        "finish": finish_kernel.warmup(
            *PARTS, *LIMITS, FLOAT, LONG, LONG, LONG, BOOL, VOCAB, VOCAB, 4,
            **DRAW, **BLOCK, num_warps=8, **grid,
        ),
        "layer norm": layer_norm_kernel.warmup(
            HALF, HALF, HALF, HALF, 12288, 12288, 1e-5, SIZE=12288, BLOCK=16384, HAS_RESIDUAL=True, num_warps=16,
            **OVERLAP, **grid,
        ),
        "mean squares": mean_squares_kernel.warmup(
            HALF, HALF, FLOAT, 8192, 8192, SIZE=6144, OTHER=1024, BLOCK=8192, num_warps=16, **OVERLAP, **grid
        ),
        "norm by squares": norm_by_kernel.warmup(
            HALF, HALF, FLOAT, HALF, 8192, 2, 1e-6, SIZE=6144, BLOCK=8192, num_warps=16, **OVERLAP, **grid
        ),
    }  # fmt: skip


def main() -> None:
    driver.set_active(Hopper())
    print(json.dumps({name: count(disassemble(kernel.asm["cubin"]), "STL") for name, kernel in compile_all().items()}))


if __name__ == "__main__":
    main()
