"""The sm_90 kernel of `int4_swapped_path.py`: up to 256 rows times a weight of 4 bits.

As `fp8_swapped.py`: weights are the M of wgmma and up to 128 rows of x its N, which read them once, and where there are
fewer tiles than multiprocessors, the programs of a cluster share one, each with its part of the inner dim. Codes
become numbers of 16 bits in registers, from which wgmma takes them, as in `int4_wide.py`; a group's sums are multiplied
by its scale and added up in fp32. Several programs share a multiprocessor, so that one widens codes while another's
are multiplied.

Written in Gluon for Triton 3.6.0.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
# mypy: disable-error-code="assignment, misc, var-annotated"
# The signatures of jitted functions are Triton's: only their constexpr parameters are annotated; their tuples grow.

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from triton.experimental.gluon import jit
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma, warpgroup_mma_wait

from kernels.calls.launch import Loaded
from kernels.calls.processors import num_processors
from kernels.linear.hopper.int4_swapped_tilings import COLUMNS as _COLUMNS
from kernels.linear.hopper.int4_swapped_tilings import Int4SwappedTiling
from kernels.linear.hopper.int4_wide import any_map, numbers_of
from kernels.linear.hopper.skinny import launch_next_grid, wait_for_previous_grid
from kernels.linear.hopper.wide import store_tile
from kernels.tma.cluster import cluster_rank, summed_over_cluster
from kernels.tma.pointers import AnyTensor

COLUMNS = gl.constexpr(_COLUMNS)


@jit
def load_weights(w_desc, w_smem, bar, slot, tile, column, TILING: gl.constexpr):
    GROUP: gl.constexpr = TILING.group
    GROUPS: gl.constexpr = TILING.groups
    ROWS: gl.constexpr = TILING.rows
    for g in gl.static_range(GROUPS):
        box = w_smem.index(slot * GROUPS + g)
        at = (column + g * GROUP) // 2
        if TILING.parts == 2:
            to = box.reshape([ROWS // 16, 2, 8, GROUP // 2])
            tma.async_copy_global_to_shared(w_desc, [tile * (ROWS // 16), 0, 0, at], bar, to)
        else:
            tma.async_copy_global_to_shared(w_desc, [tile * ROWS, at], bar, box)


@jit
def load_inputs(x_desc, x_smem, bar, slot, row, column, TILING: gl.constexpr):
    """Rows of x from `row` on: as many as half a box has, and the tile's last ones."""
    GROUPS: gl.constexpr = TILING.groups
    for g in gl.static_range(GROUPS):
        box = x_smem.index(slot * GROUPS + g).reshape([TILING.halves, TILING.half, TILING.group])
        tma.async_copy_global_to_shared(x_desc, [0, row, column + g * TILING.group], bar, box)


@jit
def row_groups(tile, size_out, groups, ACC: gl.constexpr, TILING: gl.constexpr):
    """(Where scales of a tile's rows begin [rows], whether there are such rows): 8 of the gate, 8 of the other, ..."""
    place = gl.arange(0, TILING.rows, gl.SliceLayout(1, ACC))
    if TILING.parts == 2:
        row = tile * (TILING.rows // 2) + place // 16 * 8 + place % 8
        first = (place // 8 % 2 * size_out + row) * groups
    else:
        row = tile * TILING.rows + place
        first = row * groups
    return first, row < size_out


@jit
def stage_scales(scales_ptr, zeros_ptr, first, is_row, step, groups, TILING: gl.constexpr):
    """Scales and zero points of each group of a stage [rows]; 0 where there are none."""
    GROUPS: gl.constexpr = TILING.groups
    scales, zeros = (), ()
    for g in gl.static_range(GROUPS):
        group = step * GROUPS + g
        scales += (gl.load(scales_ptr + first + group, mask=is_row & (group < groups), other=0.0),)
        zeros += (gl.load(zeros_ptr + first + group, mask=is_row & (group < groups), other=0),)
    return scales, zeros


@jit
def first_row(tile, down, height, num_rows):
    """The first row of x of a tile: each has `height` of them, so that the last may begin within the one before."""
    return gl.minimum(tile % down * height, num_rows - height)


@jit
def store_halves(acc, y_ptr, bias_ptr, n, row, height, num_rows, size_out, TILING: gl.constexpr):
    """y of a tile's columns: of the rows of a box's first half, and of the last ones, of which some may be the same."""
    HALF: gl.constexpr = TILING.half
    if TILING.halves == 1:
        store_tile(acc, y_ptr, bias_ptr, n, row, num_rows, size_out, TILING)
    else:
        first, last = gl.split(acc.reshape([TILING.rows, 2, HALF]).permute([0, 2, 1]))
        store_tile(first, y_ptr, bias_ptr, n, row, num_rows, size_out, TILING)
        store_tile(last, y_ptr, bias_ptr, n, row + height - HALF, num_rows, size_out, TILING)


@jit(do_not_specialize=["num_rows", "height", "size_out_8", "size_in"])
def hallmark_int4_swapped_matmul(
    w_desc, x_desc, y_ptr, bias_ptr, scales_ptr, zeros_ptr, num_rows, height, size_out_8, size_in,
    TILING: gl.constexpr,
):  # fmt: skip
    """One program of a persistent grid, or of a cluster. w_desc is [N, K / 2] or [N / 8, 2, 8, K / 2].

    x_desc is [halves, rows, K]: the second half begins with the row of x with which the last half of a tile's `height`
    rows does, so that no box has rows that x lacks: TMA would take longer for them. What a descriptor has no columns
    for arrives as zeros. Weights, of the first rounds, are read before the wait for the kernel before this one; x is
    read, and y written, after it. N is 8 * size_out_8.
    """
    dtype: gl.constexpr = x_desc.dtype
    STAGES: gl.constexpr = TILING.stages
    GROUP: gl.constexpr = TILING.group
    GROUPS: gl.constexpr = TILING.groups
    ROWS: gl.constexpr = TILING.rows
    PAD: gl.constexpr = TILING.pad
    AT_ONCE: gl.constexpr = TILING.groups_at_once
    SPLITS: gl.constexpr = TILING.splits
    REDUCERS: gl.constexpr = TILING.reducers
    STEP: gl.constexpr = TILING.boxes * COLUMNS
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [ROWS // 16, 1], [16, PAD, 16])
    FIRST: gl.constexpr = gl.DotOperandLayout(0, ACC, 2)
    OF_CODES: gl.constexpr = gl.DotOperandLayout(0, ACC, 1)
    BYTES: gl.constexpr = (ROWS // 2 + PAD * 2) * STEP
    w_smem = gl.allocate_shared_memory(
        gl.uint8, [STAGES * GROUPS, ROWS, GROUP // 2],
        gl.NVMMASharedLayout(GROUP // 2 if GROUP > 32 else 0, 8, rank=2),
    )  # fmt: skip
    x_smem = gl.allocate_shared_memory(
        dtype, [STAGES * GROUPS, PAD, GROUP], gl.NVMMASharedLayout(64 if GROUP == 32 else 128, 16, rank=2)
    )
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for s in gl.static_range(STAGES):
        mbarrier.init(full.index(s), count=1)
    launch_next_grid()

    size_out = size_out_8 * 8
    groups = gl.cdiv(size_in, GROUP)
    num_steps = gl.cdiv(size_in, STEP)
    down = gl.cdiv(num_rows, height)  # tiles of rows of x, which vary fastest, so that weights stay in L2
    num_tiles = gl.cdiv(size_out * TILING.parts, ROWS) * down
    if SPLITS == 1:
        rank, first, stride = 0, gl.program_id(0), gl.num_programs(0)
        begin, count = 0, num_steps  # of a tile
        total = gl.cdiv(num_tiles - first, stride) * num_steps
    else:
        rank, first, stride = cluster_rank(), gl.program_id(0) // SPLITS, num_tiles
        begin = rank * num_steps // SPLITS
        count = (rank + 1) * num_steps // SPLITS - begin
        total = count
    for s in gl.static_range(STAGES):
        if s < total:
            tile = first + s // count * stride
            mbarrier.expect(full.index(s), BYTES)
            load_weights(w_desc, w_smem, full.index(s), s, tile // down, (begin + s % count) * STEP, TILING)
    wait_for_previous_grid()
    for s in gl.static_range(STAGES):
        if s < total:
            row = first_row(first + s // count * stride, down, height, num_rows)
            load_inputs(x_desc, x_smem, full.index(s), s, row, (begin + s % count) * STEP, TILING)

    load_tile = first + STAGES // count * stride
    load_step = STAGES % count
    i = 0
    for tile in range(first, num_tiles, stride):
        acc = gl.zeros([ROWS, PAD], gl.float32, ACC)
        of_row, is_row = row_groups(tile // down, size_out, groups, ACC, TILING)
        scales, zeros = stage_scales(scales_ptr, zeros_ptr, of_row, is_row, begin, groups, TILING)
        for step in range(count):
            slot = i % STAGES
            next_scales, next_zeros = stage_scales(
                scales_ptr, zeros_ptr, of_row, is_row, begin + step + 1, groups, TILING
            )
            mbarrier.wait(full.index(slot), (i // STAGES) & 1)
            for g in gl.static_range(0, GROUPS, AT_ONCE):
                parts = ()
                for each in gl.static_range(g, g + AT_ONCE):
                    part = gl.zeros([ROWS, PAD], gl.float32, ACC)
                    w = numbers_of(w_smem.index(slot * GROUPS + each).load(OF_CODES), zeros[each], dtype, FIRST)
                    x = x_smem.index(slot * GROUPS + each).permute((1, 0))
                    part = warpgroup_mma(w, x, part, use_acc=False, is_async=True)
                    parts += (part,)
                if AT_ONCE == 1:
                    parts = (warpgroup_mma_wait(0, deps=[parts[0]]),)
                else:
                    parts = warpgroup_mma_wait(0, deps=parts)
                for each in gl.static_range(AT_ONCE):
                    acc += parts[each] * scales[g + each][:, None]
            if i + STAGES < total:
                gl.thread_barrier()  # every warp has read the slot
                row = first_row(load_tile, down, height, num_rows)
                mbarrier.expect(full.index(slot), BYTES)
                column = (begin + load_step) * STEP
                load_weights(w_desc, w_smem, full.index(slot), slot, load_tile // down, column, TILING)
                load_inputs(x_desc, x_smem, full.index(slot), slot, row, column, TILING)
                load_step += 1
                if load_step == count:
                    load_step = 0
                    load_tile += stride
            scales, zeros = next_scales, next_zeros
            i += 1
        row = first_row(tile, down, height, num_rows)
        if SPLITS == 1:
            store_halves(acc, y_ptr, bias_ptr, tile // down, row, height, num_rows, size_out, TILING)
        else:
            sums = summed_over_cluster(acc, rank, SPLITS, REDUCERS, TILING.ring_bytes)
            if rank < REDUCERS:
                place = rank * (PAD // REDUCERS)  # of one half, as of more than one there are as many programs
                at = row + gl.where(place < TILING.half, place, place - PAD + height)
                store_tile(sums, y_ptr, bias_ptr, tile // down, at, num_rows, size_out, TILING)


def launch_int4_swapped(
    x: Tensor, weight: Tensor, scales: Tensor, zeros: Tensor, bias: Tensor | None, y: Tensor, tiling: Int4SwappedTiling
) -> None:
    """Fill y [M, N] with x [M, K] @ weight^T + bias, or with SwiGLU of both halves of that where tiling.parts is 2.

    x       [M, K] of 16 bits, 16-byte aligned
    weight  [parts * N, K / 2] uint8, rows contiguous, 16-byte aligned; y contiguous, N a multiple of 8
    scales, zeros   [parts * N, K / group] fp32 and uint8
    """
    num_rows, size_in = x.shape
    size_out, pairs = y.shape[1], size_in // 2
    kernel = launcher(tiling, x.dtype, y.dtype, x.device)
    w_map: tuple[tuple[int, ...], tuple[int, ...]] = ((size_out, pairs), (pairs, 1))
    if tiling.parts == 2:
        w_map = (size_out // 8, 2, 8, pairs), (8 * pairs, size_out * pairs, pairs, 1)
    height = -(-num_rows // -(-num_rows // tiling.pad))
    apart = height - tiling.half  # rows that halves are apart
    x_map = (1, num_rows, size_in), (x.stride(0), x.stride(0), 1)
    if tiling.halves == 2:
        x_map = (2, num_rows - apart, size_in), (apart * x.stride(0), x.stride(0), 1)
    w_box, x_box = kernel.boxes
    num_programs = -(-size_out * tiling.parts // tiling.rows) * -(-num_rows // tiling.pad)
    if tiling.splits == 1:
        num_programs = min(tiling.programs * num_processors(x.device), num_programs)
    arguments = (
        kernel.encode(weight.data_ptr(), *w_box, *w_map, 0), *w_map[0], *w_map[1],
        kernel.encode(x.data_ptr(), *x_box, *x_map, 0), *x_map[0], *x_map[1],
        y.data_ptr(), None if bias is None else bias.data_ptr(), scales.data_ptr(), zeros.data_ptr(),
        num_rows, height, size_out // 8, size_in,
    )  # fmt: skip
    kernel((num_programs, 1, 1), arguments)


# A pure function of what is compiled in: the cache holds no state.
@lru_cache(maxsize=256)
def launcher(tiling: Int4SwappedTiling, dtype: torch.dtype, dtype_out: torch.dtype, device: torch.device) -> Loaded:
    """`compiled_int4_swapped`, ready to launch past Triton's binder, which takes longer than a small matmul."""
    return Loaded(compiled_int4_swapped(tiling, dtype, dtype_out), device, cluster=tiling.splits)


def compiled_int4_swapped(tiling: Int4SwappedTiling, dtype: torch.dtype, dtype_out: torch.dtype) -> Any:
    """`hallmark_int4_swapped_matmul` of these dtypes for sm_90; no GPU is needed."""
    half = tiling.group // 2
    weights = [tiling.rows // 16, 2, 8, half] if tiling.parts == 2 else [tiling.rows, half]
    swizzle = half if tiling.group > 32 else 0
    inputs = [tiling.halves, tiling.half, tiling.group]
    return hallmark_int4_swapped_matmul.warmup(
        any_map(torch.uint8, weights, swizzle), any_map(dtype, inputs, min(128, 2 * tiling.group)),
        AnyTensor(dtype_out, 0), AnyTensor(dtype, 0), AnyTensor(torch.float32, 4), AnyTensor(torch.uint8, 1),
        1, 1, 1, 1, tiling, grid=(1,), num_warps=tiling.rows // 16, launch_pdl=True, maxnreg=tiling.registers,
    )  # fmt: skip
