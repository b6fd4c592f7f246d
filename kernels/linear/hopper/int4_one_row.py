"""The sm_90 kernel of `int4_skinny_path.py` for one row of x, which every program keeps: its ring holds weights alone.

Else as `int4_skinny.py`, whose x has 8 rows and more, zeros but for one: as many bytes of shared memory as the weights.

Written in Gluon for Triton 3.6.0.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
# mypy: disable-error-code="assignment, misc, var-annotated"
# The signatures of jitted functions are Triton's: only their constexpr parameters are annotated; their tuples grow.

from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from triton.experimental.gluon import jit
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, mma_v2

from kernels.calls.launch import Loaded
from kernels.calls.processors import num_processors
from kernels.linear.hopper.int4_one_row_tilings import Int4OneRowTiling
from kernels.linear.hopper.int4_skinny import (
    BOX,
    WORDS,
    any_map,
    by_groups,
    columns_layout,
    four_of,
    fours_layout,
    load_weights,
    numbers_of,
    stage_scales,
    store_tile,
)
from kernels.linear.hopper.skinny import launch_next_grid, wait_for_previous_grid
from kernels.tma.pointers import AnyTensor

_WORDS = 32  # of a box, 128 bytes


@jit
def keep_row(x_ptr, x_smem, size_in, CHUNKS: gl.constexpr, TILING: gl.constexpr):
    """Copy x into x_smem [chunks, groups, folds, group], zeros behind it."""
    FOLDS: gl.constexpr = TILING.folds
    GROUP: gl.constexpr = TILING.group
    GROUPS: gl.constexpr = x_smem.shape[1]
    # 8 columns of a group to a thread, and as many folds and groups to a warp as it has threads for.
    ACROSS: gl.constexpr = FOLDS if FOLDS * GROUP <= 256 else 256 // GROUP
    LAYOUT: gl.constexpr = gl.BlockedLayout(
        [1, 1, 8], [256 // (GROUP * ACROSS), ACROSS, GROUP // 8], [TILING.box_rows // 16, 1, 1], [2, 1, 0]
    )
    group = gl.arange(0, GROUPS, gl.SliceLayout(1, gl.SliceLayout(2, LAYOUT)))[:, None, None]
    fold = gl.arange(0, FOLDS, gl.SliceLayout(0, gl.SliceLayout(2, LAYOUT)))[None, :, None]
    place = gl.arange(0, GROUP, gl.SliceLayout(0, gl.SliceLayout(1, LAYOUT)))[None, None, :]
    segment = size_in // FOLDS
    for c in gl.static_range(CHUNKS):
        column = (c * GROUPS + group) * GROUP + place
        x = gl.load(x_ptr + fold * segment + column, mask=column < segment, other=0.0)
        x_smem.index(c).store(x)


@jit
def row_of(x, SECOND: gl.constexpr, PAD: gl.constexpr):
    """x [f, k] of a group, in the layout of `columns_layout`, as an operand [f, k, m] all of whose columns are x."""
    F: gl.constexpr = x.shape[0]
    K: gl.constexpr = x.shape[1]
    x = x.reshape([F, K // 32, 4, 2, 2, 2]).permute([0, 1, 4, 5, 2, 3]).reshape([F, K])
    x = gl.convert_layout(x, gl.SliceLayout(2, SECOND), assert_trivial=True)
    return x[:, :, None].broadcast_to([F, K, PAD])


@jit(do_not_specialize=["size_out", "size_in"])
def hallmark_int4_one_row_matmul(
    w_desc, x_ptr, y_ptr, bias_ptr, scales_ptr, zeros_ptr, size_out, size_in, CHUNKS: gl.constexpr,
    TILING: gl.constexpr,
):  # fmt: skip
    """One program of a persistent grid. w_desc is [folds, parts, N, K / 8 / folds], x [K].

    Weights, of the first rounds, are read before the wait for the kernel before this one; x is read, and y written,
    after it.
    """
    dtype: gl.constexpr = x_ptr.dtype.element_ty
    STAGES: gl.constexpr = TILING.stages
    BOXES: gl.constexpr = TILING.boxes
    ROWS: gl.constexpr = TILING.box_rows
    GROUP: gl.constexpr = TILING.group
    GROUPS: gl.constexpr = BOX // GROUP  # of a box
    KEPT: gl.constexpr = TILING.groups_of_chunk
    FOLDS: gl.constexpr = TILING.folds
    PAD: gl.constexpr = TILING.pad
    PER_FOLD: gl.constexpr = TILING.parts * TILING.rows
    ACC: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [FOLDS, PER_FOLD // 16, 1], [1, 16, 8])
    FIRST: gl.constexpr = gl.DotOperandLayout(0, ACC, 2)
    SECOND: gl.constexpr = gl.DotOperandLayout(1, ACC, 2)
    OF_ROWS: gl.constexpr = gl.SliceLayout(2, ACC)
    OF_FOURS: gl.constexpr = fours_layout(gl.to_linear_layout(OF_ROWS, [FOLDS, PER_FOLD]))
    OF_WORDS: gl.constexpr = gl.DotOperandLayout(0, ACC, 1)
    OF_INPUTS: gl.constexpr = columns_layout(gl.to_linear_layout(SECOND, [FOLDS, GROUP, PAD]))
    BYTES: gl.constexpr = ROWS // 2 * BOXES * BOX
    w_smem = gl.allocate_shared_memory(gl.int32, [STAGES * BOXES, ROWS, WORDS], gl.NVMMASharedLayout(128, 32, rank=2))
    x_smem = gl.allocate_shared_memory(dtype, [CHUNKS, KEPT, FOLDS, GROUP], gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0]))
    x_of_groups = x_smem._reinterpret(dtype, [CHUNKS * KEPT, FOLDS, GROUP], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for s in gl.static_range(STAGES):
        mbarrier.init(full.index(s), count=1)
    launch_next_grid()

    first, num_programs = gl.program_id(0), gl.num_programs(0)
    groups = gl.cdiv(size_in, GROUP)
    num_steps = gl.cdiv(size_in // FOLDS, BOXES * BOX)  # of a tile
    total = gl.cdiv(gl.cdiv(size_out, TILING.rows) - first, num_programs) * num_steps
    for s in gl.static_range(STAGES):
        if s < total:
            mbarrier.expect(full.index(s), BYTES)
            tile = first + s // num_steps * num_programs
            load_weights(w_desc, w_smem, full.index(s), s, tile, s % num_steps, TILING)
    # Two stages ahead: scales come from memory too, and arrive no sooner than the weights.
    scales, zeros = stage_scales(
        scales_ptr, zeros_ptr, 0, first, num_programs, num_steps, size_out, groups, OF_FOURS, TILING
    )
    next_scales, next_zeros = stage_scales(
        scales_ptr, zeros_ptr, 1, first, num_programs, num_steps, size_out, groups, OF_FOURS, TILING
    )
    wait_for_previous_grid()
    keep_row(x_ptr, x_smem, size_in, CHUNKS, TILING)

    load_tile = first + STAGES // num_steps * num_programs
    load_step = STAGES % num_steps
    tile = first
    step = 0
    acc = gl.zeros([FOLDS, PER_FOLD, PAD], gl.float32, ACC)
    for i in range(total):
        slot = i % STAGES
        last_scales, last_zeros = stage_scales(
            scales_ptr, zeros_ptr, i + 2, first, num_programs, num_steps, size_out, groups, OF_FOURS, TILING
        )
        mbarrier.wait(full.index(slot), (i // STAGES) & 1)
        words = ()
        for c in gl.static_range(BOXES):
            words += (w_smem.index(slot * BOXES + c).reshape([FOLDS, PER_FOLD, WORDS]).load(OF_WORDS),)
        if i + STAGES < total:
            gl.thread_barrier()  # every warp has read the slot
            mbarrier.expect(full.index(slot), BYTES)
            load_weights(w_desc, w_smem, full.index(slot), slot, load_tile, load_step, TILING)
            load_step += 1
            if load_step == num_steps:
                load_step = 0
                load_tile += num_programs
        of_groups = ()
        for c in gl.static_range(BOXES):
            of_groups += by_groups(words[c], GROUP)
        for four in gl.static_range(BOXES * GROUPS // 4):
            scales_of_four, zeros_of_four = four_of(scales[four], OF_ROWS), four_of(zeros[four], OF_ROWS)
            for g in gl.static_range(4):
                w = numbers_of(of_groups[four * 4 + g], zeros_of_four[g], dtype, FIRST)
                kept = x_of_groups.index(step * BOXES * GROUPS + four * 4 + g).load(gl.SliceLayout(1, OF_INPUTS))
                x = row_of(kept, SECOND, PAD)
                found = mma_v2(w, x, gl.zeros([FOLDS, PER_FOLD, PAD], gl.float32, ACC))
                acc += found * scales_of_four[g][:, :, None]
        scales, zeros = next_scales, next_zeros
        next_scales, next_zeros = last_scales, last_zeros
        step += 1
        if step == num_steps:
            store_tile(acc, y_ptr, bias_ptr, tile, 1, size_out, TILING)
            acc = gl.zeros([FOLDS, PER_FOLD, PAD], gl.float32, ACC)
            step = 0
            tile += num_programs


def launch_int4_one_row(
    x: Tensor, weight: Tensor, scales: Tensor, zeros: Tensor, bias: Tensor | None, y: Tensor, tiling: Int4OneRowTiling
) -> None:
    """Fill y [1, N] with x [1, K] @ weight^T + bias, or with SwiGLU of both halves of that where tiling.parts is 2.

    x       of 16 bits, 16-byte aligned
    weight  [parts * N, K / 2] uint8, rows contiguous, 16-byte aligned; y contiguous
    scales, zeros   [parts * N, K / group] fp32 and uint8
    """
    size_in = x.shape[1]
    size_out, segment = y.shape[1], size_in // tiling.folds
    if (scales.data_ptr() | zeros.data_ptr()) % 16:  # rows of a larger weight may begin anywhere
        tiling = replace(tiling, has_fours=False)
    kernel = launcher(tiling, num_chunks(tiling, size_in), x.dtype, y.dtype, x.device)
    words = size_in // 8
    w_map = (tiling.folds, tiling.parts, size_out, segment // 8), (segment // 8, size_out * words, words, 1)
    num_programs = min(tiling.programs * num_processors(x.device), -(-size_out // tiling.rows))
    arguments = (
        kernel.encode(weight.data_ptr(), *kernel.boxes[0], *w_map, 0), *w_map[0], *w_map[1],
        x.data_ptr(), y.data_ptr(), None if bias is None else bias.data_ptr(), scales.data_ptr(), zeros.data_ptr(),
        size_out, size_in,
    )  # fmt: skip
    kernel((num_programs, 1, 1), arguments)


def num_chunks(tiling: Int4OneRowTiling, size_in: int) -> int:
    """Chunks of the groups that a tile's steps read."""
    of_step = tiling.boxes * 8 * _WORDS
    num_groups = -(-size_in // tiling.folds // of_step) * of_step // tiling.group
    return -(-num_groups // tiling.groups_of_chunk)


# A pure function of what is compiled in: the cache holds no state.
@lru_cache(maxsize=256)
def launcher(
    tiling: Int4OneRowTiling, chunks: int, dtype: torch.dtype, dtype_out: torch.dtype, device: torch.device
) -> Loaded:
    """`compiled_int4_one_row`, ready to launch past Triton's binder, which takes longer than a small matmul."""
    return Loaded(compiled_int4_one_row(tiling, chunks, dtype, dtype_out), device)


def compiled_int4_one_row(tiling: Int4OneRowTiling, chunks: int, dtype: torch.dtype, dtype_out: torch.dtype) -> Any:
    """`hallmark_int4_one_row_matmul` of these dtypes for sm_90; no GPU is needed."""
    weights = [tiling.folds, tiling.parts, tiling.rows, _WORDS]
    return hallmark_int4_one_row_matmul.warmup(
        any_map(torch.int32, weights), AnyTensor(dtype, 0), AnyTensor(dtype_out, 0), AnyTensor(dtype, 0),
        AnyTensor(torch.float32, 0 if tiling.has_fours else 4), AnyTensor(torch.uint8, 0 if tiling.has_fours else 1),
        1, 1, chunks, tiling, grid=(1,), num_warps=tiling.box_rows // 16, launch_pdl=True,
    )  # fmt: skip
