"""The sm_90 kernel of `fp8_swapped_path.py`: up to 128 rows times a weight of 8 bits, multiplied as they are stored.

As `wide.py`: weights are the M of wgmma and the rows of x its N, a tile's weights are read once, and where there are
fewer tiles than multiprocessors, the programs of a cluster share one, each with its part of the inner dim. But codes
are multiplied by wgmma in 8 bits, which nothing has to convert. It cuts sums to 13 bits behind the first one, so sums
of a box of 128 columns are added up in fp32, times the scales of a block where there are such.

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
from kernels.linear.hopper.few_bits_tilings import COLUMNS as _COLUMNS
from kernels.linear.hopper.fp8_skinny import any_codes
from kernels.linear.hopper.fp8_swapped_tilings import Fp8SwappedTiling
from kernels.linear.hopper.skinny import launch_next_grid, wait_for_previous_grid
from kernels.linear.hopper.wide import store_tile
from kernels.tma.cluster import cluster_rank, summed_over_cluster
from kernels.tma.pointers import AnyTensor

BOX = gl.constexpr(_COLUMNS)


@jit
def load_weights(w_desc, w_smem, bar, slot, tile, column, TILING: gl.constexpr):
    BOXES: gl.constexpr = TILING.boxes
    ROWS: gl.constexpr = TILING.rows
    for c in gl.static_range(BOXES):
        box = w_smem.index(slot * BOXES + c)
        if TILING.parts == 2:
            at = [tile * (ROWS // 16), 0, 0, column + c * BOX]
            tma.async_copy_global_to_shared(w_desc, at, bar, box.reshape([ROWS // 16, 2, 8, BOX]))
        else:
            tma.async_copy_global_to_shared(w_desc, [tile * ROWS, column + c * BOX], bar, box)


@jit
def load_inputs(x_desc, x_smem, bar, slot, column, TILING: gl.constexpr):
    BOXES: gl.constexpr = TILING.boxes
    for c in gl.static_range(BOXES):
        tma.async_copy_global_to_shared(x_desc, [0, column + c * BOX], bar, x_smem.index(slot * BOXES + c))


@jit
def row_scales(w_scales_ptr, tile, size_out, ACC: gl.constexpr, TILING: gl.constexpr):
    """Scales of a tile's rows of the weight [rows]: 8 of the gate, the same of the up projection, and so on."""
    place = gl.arange(0, TILING.rows, gl.SliceLayout(1, ACC))
    if TILING.parts == 2:
        column = tile * (TILING.rows // 2) + place // 16 * 8 + place % 8
        at = w_scales_ptr + place // 8 % 2 * size_out + column
    else:
        column = tile * TILING.rows + place
        at = w_scales_ptr + column
    return gl.load(at, mask=column < size_out, other=0.0)


@jit
def weight_scales(w_scales_ptr, tile, step, runs, size_out, ACC: gl.constexpr, TILING: gl.constexpr):
    """Scales of the weights of each box of a stage: of one block, or of the gate's and the up projection's."""
    BOXES: gl.constexpr = TILING.boxes
    OUT: gl.constexpr = TILING.rows // TILING.parts
    scales = ()
    for c in gl.static_range(BOXES):
        run = gl.minimum(step * BOXES + c, runs - 1)
        at = w_scales_ptr + tile * OUT // BOX * runs + run
        if TILING.parts == 2:
            place = gl.arange(0, TILING.rows, gl.SliceLayout(1, ACC))
            of_gate = gl.load(at)
            of_up = gl.load(at + size_out // BOX * runs)
            scales += (gl.where(place // 8 % 2 == 0, of_gate, of_up)[:, None],)
        else:
            scales += (gl.load(at),)
    return scales


@jit
def input_scales(x_scales_ptr, stride, step, runs, ACC: gl.constexpr, TILING: gl.constexpr):
    """Scales of x of each box of a stage, [1, pad] of each; those behind the rows of x mean nothing."""
    BOXES: gl.constexpr = TILING.boxes
    m = gl.arange(0, TILING.pad, gl.SliceLayout(0, ACC))
    scales = ()
    for c in gl.static_range(BOXES):
        run = gl.minimum(step * BOXES + c, runs - 1)
        scales += (gl.load(x_scales_ptr + run * stride + m)[None, :],)
    return scales


@jit(do_not_specialize=["rows_8", "num_rows", "size_out_8", "size_in"])
def hallmark_fp8_swapped_matmul(
    w_desc, x_desc, y_ptr, bias_ptr, w_scales_ptr, x_scales_ptr, rows_8, num_rows, size_out_8, size_in,
    TILING: gl.constexpr,
):  # fmt: skip
    """One program of a persistent grid, or of a cluster. w_desc is [N, K] or [N / 8, 2, 8, K], x_desc [M, K].

    What a descriptor has no columns or rows for arrives as zeros. Weights, of the first rounds, are read before the
    wait for the kernel before this one; x and its scales are read, and y written, after it. N is 8 * size_out_8.

    rows_8  eighths of the rows that x_desc has, which scales of blocks are apart
    """
    STAGES: gl.constexpr = TILING.stages
    BOXES: gl.constexpr = TILING.boxes
    ROWS: gl.constexpr = TILING.rows
    PAD: gl.constexpr = TILING.pad
    SPLITS: gl.constexpr = TILING.splits
    REDUCERS: gl.constexpr = TILING.reducers
    STEP: gl.constexpr = BOXES * BOX
    SWIZZLED: gl.constexpr = gl.NVMMASharedLayout(128, 8, rank=2)
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [ROWS // 16, 1], [16, PAD, 32])
    BYTES: gl.constexpr = (ROWS + PAD) * STEP
    w_smem = gl.allocate_shared_memory(gl.float8e4nv, [STAGES * BOXES, ROWS, BOX], SWIZZLED)
    x_smem = gl.allocate_shared_memory(gl.float8e4nv, [STAGES * BOXES, PAD, BOX], SWIZZLED)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for s in gl.static_range(STAGES):
        mbarrier.init(full.index(s), count=1)
    launch_next_grid()

    size_out = size_out_8 * 8
    num_steps = gl.cdiv(size_in, STEP)
    num_tiles = gl.cdiv(size_out * TILING.parts, ROWS)
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
            mbarrier.expect(full.index(s), BYTES)
            tile = first + s // count * stride
            load_weights(w_desc, w_smem, full.index(s), s, tile, (begin + s % count) * STEP, TILING)
    wait_for_previous_grid()
    for s in gl.static_range(STAGES):
        if s < total:
            load_inputs(x_desc, x_smem, full.index(s), s, (begin + s % count) * STEP, TILING)

    runs, stride_scales = gl.cdiv(size_in, BOX), rows_8 * 8
    m = gl.arange(0, PAD, gl.SliceLayout(0, ACC))
    if TILING.is_static:
        of_x = gl.load(x_scales_ptr + m * 0)
    elif not TILING.is_blocks:
        of_x = gl.load(x_scales_ptr + m, mask=m < num_rows, other=0.0)
    load_tile = first + STAGES // count * stride
    load_step = STAGES % count
    i = 0
    for tile in range(first, num_tiles, stride):
        acc = gl.zeros([ROWS, PAD], gl.float32, ACC)
        if TILING.is_blocks:
            of_weights = weight_scales(w_scales_ptr, tile, begin, runs, size_out, ACC, TILING)
            of_inputs = input_scales(x_scales_ptr, stride_scales, begin, runs, ACC, TILING)
        else:
            of_rows = row_scales(w_scales_ptr, tile, size_out, ACC, TILING)  # here: a tile's end would wait for them
        for step in range(count):
            slot = i % STAGES
            if TILING.is_blocks:
                next_of_weights = weight_scales(w_scales_ptr, tile, begin + step + 1, runs, size_out, ACC, TILING)
                next_of_inputs = input_scales(x_scales_ptr, stride_scales, begin + step + 1, runs, ACC, TILING)
            mbarrier.wait(full.index(slot), (i // STAGES) & 1)
            parts = ()
            for c in gl.static_range(BOXES):
                x = x_smem.index(slot * BOXES + c).permute((1, 0))
                part = gl.zeros([ROWS, PAD], gl.float32, ACC)
                part = warpgroup_mma(w_smem.index(slot * BOXES + c), x, part, use_acc=False, is_async=True)
                parts += (part,)
            if BOXES == 1:
                parts = (warpgroup_mma_wait(0, deps=[parts[0]]),)
            else:
                parts = warpgroup_mma_wait(0, deps=parts)
            if i + STAGES < total:
                gl.thread_barrier()  # every warp has read the slot
                mbarrier.expect(full.index(slot), BYTES)
                column = (begin + load_step) * STEP
                load_weights(w_desc, w_smem, full.index(slot), slot, load_tile, column, TILING)
                load_inputs(x_desc, x_smem, full.index(slot), slot, column, TILING)
                load_step += 1
                if load_step == count:
                    load_step = 0
                    load_tile += stride
            for c in gl.static_range(BOXES):
                if TILING.is_blocks:
                    acc += parts[c] * of_weights[c] * of_inputs[c]
                else:
                    acc += parts[c]
            if TILING.is_blocks:
                of_weights, of_inputs = next_of_weights, next_of_inputs
            i += 1
        if not TILING.is_blocks:
            acc = acc * of_rows[:, None] * of_x[None, :]
        if SPLITS == 1:
            store_tile(acc, y_ptr, bias_ptr, tile, 0, num_rows, size_out, TILING)
        else:
            sums = summed_over_cluster(acc, rank, SPLITS, REDUCERS, TILING.ring_bytes)
            if rank < REDUCERS:
                store_tile(sums, y_ptr, bias_ptr, tile, rank * (PAD // REDUCERS), num_rows, size_out, TILING)


def launch_fp8_swapped(
    codes: Tensor, x_scales: Tensor, weight: Tensor, w_scales: Tensor, bias: Tensor | None, y: Tensor,
    tiling: Fp8SwappedTiling,
) -> None:  # fmt: skip
    """Fill y [M, N] with x [M, K] @ weight^T + bias, or with SwiGLU of both halves of that where tiling.parts is 2.

    codes     [padded rows, K up to the next 128] e4m3 and x_scales: as `padded_codes` has them; M at most tiling.pad
    weight    [parts * N, K] e4m3, rows contiguous, 16-byte aligned; y contiguous, N a multiple of 8
    w_scales  fp32, as `Fp8Scales` says
    """
    num_rows, size_out = y.shape
    size_in = weight.shape[1]
    kernel = launcher(tiling, y.dtype, bias.dtype if bias is not None else y.dtype, codes.device)
    w_map: tuple[tuple[int, ...], tuple[int, ...]] = ((size_out, size_in), (size_in, 1))
    if tiling.parts == 2:
        w_map = (size_out // 8, 2, 8, size_in), (8 * size_in, size_out * size_in, size_in, 1)
    x_map = codes.shape, codes.stride()
    w_box, x_box = kernel.boxes
    num_tiles = -(-size_out * tiling.parts // tiling.rows)
    num_programs = min(num_processors(codes.device), num_tiles) if tiling.splits == 1 else num_tiles
    arguments = (
        kernel.encode(weight.data_ptr(), *w_box, *w_map, 0), *w_map[0], *w_map[1],
        kernel.encode(codes.data_ptr(), *x_box, *x_map, 0), *x_map[0], *x_map[1],
        y.data_ptr(), None if bias is None else bias.data_ptr(), w_scales.data_ptr(), x_scales.data_ptr(),
        codes.shape[0] // 8, num_rows, size_out // 8, size_in,
    )  # fmt: skip
    kernel((num_programs, 1, 1), arguments)


# A pure function of what is compiled in: the cache holds no state.
@lru_cache(maxsize=256)
def launcher(tiling: Fp8SwappedTiling, dtype_out: torch.dtype, dtype_bias: torch.dtype, device: torch.device) -> Loaded:
    """`compiled_fp8_swapped`, ready to launch past Triton's binder, which takes longer than a small matmul."""
    return Loaded(compiled_fp8_swapped(tiling, dtype_out, dtype_bias), device, cluster=tiling.splits)


def compiled_fp8_swapped(tiling: Fp8SwappedTiling, dtype_out: torch.dtype, dtype_bias: torch.dtype) -> Any:
    """`hallmark_fp8_swapped_matmul` of these dtypes for sm_90; no GPU is needed."""
    weights = [tiling.rows // 16, 2, 8, _COLUMNS] if tiling.parts == 2 else [tiling.rows, _COLUMNS]
    scales = AnyTensor(torch.float32, 4)  # at any multiple of 4 bytes: parts of a tensor start anywhere
    of_x = AnyTensor(torch.float32, 0) if tiling.is_blocks else scales
    return hallmark_fp8_swapped_matmul.warmup(
        any_codes(weights), any_codes([tiling.pad, _COLUMNS]), AnyTensor(dtype_out, 0), AnyTensor(dtype_bias, 0),
        scales, of_x, 1, 1, 1, 1, tiling, grid=(1,), num_warps=tiling.rows // 16, launch_pdl=True,
    )  # fmt: skip
