"""The sm_90 kernel of `wide_path.py` for more rows than `skinny.py` takes, as long as memory is what bounds it.

A program multiplies a tile of 64 to 256 weight rows (the M of wgmma) with all rows of x (its N), so that weights are
read once and x, from L2, once for each tile. Where there are fewer tiles than multiprocessors, the programs of a
cluster share a tile, each with its part of the inner dim, and sum their accumulators through shared memory. For SwiGLU
a tile holds 8 rows of the gate, the same rows of the up projection, and so on: a thread's accumulators hold both.

With programmatic dependent launch a program fills its ring while the kernel before it still runs: the weights do not
depend on that kernel. Written in Gluon for Triton 3.6.0.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
# The signatures of jitted functions are Triton's: only their constexpr parameters are annotated.

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from triton.experimental.gluon import jit
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma, warpgroup_mma_wait

from kernels.calls.launch import Loaded
from kernels.calls.processors import num_processors
from kernels.linear.hopper.skinny import launch_next_grid, wait_for_previous_grid
from kernels.linear.hopper.tilings import BOX as _BOX
from kernels.linear.hopper.tilings import WideTiling
from kernels.tma.cluster import cluster_rank, summed_over_cluster
from kernels.tma.launches import any_map
from kernels.tma.pointers import AnyTensor

BOX = gl.constexpr(_BOX)
# Of a tile that is put in order before it is stored, in shared memory behind the ring; larger ones are stored as is.
_ORDERED_BYTES = gl.constexpr(32 * 1024)


@jit
def load_weights(w_desc, w_smem, bar, slot, tile, column, TILING: gl.constexpr):
    BOXES: gl.constexpr = TILING.boxes
    ROWS: gl.constexpr = TILING.rows
    SHAPE: gl.constexpr = [ROWS // 16, 2, 8, BOX]
    for c in gl.static_range(BOXES):
        box = w_smem.index(slot * BOXES + c)
        if TILING.parts == 2:
            at = [tile * (ROWS // 16), 0, 0, column + c * BOX]
            tma.async_copy_global_to_shared(w_desc, at, bar, box.reshape(SHAPE))
        else:
            tma.async_copy_global_to_shared(w_desc, [tile * ROWS, column + c * BOX], bar, box)


@jit
def load_inputs(x_desc, x_smem, bar, slot, column, TILING: gl.constexpr):
    BOXES: gl.constexpr = TILING.boxes
    for c in gl.static_range(BOXES):
        tma.async_copy_global_to_shared(x_desc, [0, column + c * BOX], bar, x_smem.index(slot * BOXES + c))


@jit
def store_tile(sums, y_ptr, bias_ptr, tile, first_row, num_rows, size_out, TILING: gl.constexpr):
    """y's rows from first_row on, of one tile's columns, with what is fused into it; sums [rows, some rows of x]."""
    COLUMNS: gl.constexpr = sums.shape[1]
    OUT: gl.constexpr = TILING.rows // TILING.parts
    if TILING.parts == 2:
        gate, up = gl.split(sums.reshape([OUT // 8, 2, 8, COLUMNS]).permute([0, 2, 3, 1]))
        decay = gl.exp(-gl.abs(gate))  # never overflows
        sums = (gate * (gl.where(gate >= 0, 1.0, decay) / (1.0 + decay)) * up).reshape([OUT, COLUMNS])
    if TILING.has_bias:
        column = tile * OUT + gl.arange(0, OUT, gl.SliceLayout(1, sums.type.layout))
        sums += gl.load(bias_ptr + column, mask=column < size_out, other=0.0).to(gl.float32)[:, None]
    out = sums.to(y_ptr.dtype.element_ty)
    if OUT * COLUMNS * y_ptr.dtype.element_ty.primitive_bitwidth // 8 <= _ORDERED_BYTES:
        ACROSS: gl.constexpr = OUT // 8 if OUT < 256 else 32
        ORDERED: gl.constexpr = gl.BlockedLayout([8, 1], [ACROSS, 32 // ACROSS], [1, TILING.rows // 16], [0, 1])
        out = gl.convert_layout(out, ORDERED)
    column = tile * OUT + gl.arange(0, OUT, gl.SliceLayout(1, out.type.layout))[:, None]
    row = first_row + gl.arange(0, COLUMNS, gl.SliceLayout(0, out.type.layout))[None, :]
    at = y_ptr + row.to(gl.int64) * size_out + column
    gl.store(at, out, mask=(row < num_rows) & (column < size_out))


@jit(do_not_specialize=["num_rows", "size_out_8", "size_in"])
def hallmark_wide_matmul(w_desc, x_desc, y_ptr, bias_ptr, num_rows, size_out_8, size_in, TILING: gl.constexpr):
    """One program of a persistent grid, or of a cluster. w_desc is [N, K] or [N / 8, 2, 8, K], x_desc [M, K].

    What a descriptor has no columns or rows for arrives as zeros. Weights, of the first rounds, are read before the
    wait for the kernel before this one; x is read, and y written, after it. N is 8 * size_out_8.
    """
    dtype: gl.constexpr = w_desc.dtype
    STAGES: gl.constexpr = TILING.stages
    BOXES: gl.constexpr = TILING.boxes
    ROWS: gl.constexpr = TILING.rows
    PAD: gl.constexpr = TILING.pad
    SPLITS: gl.constexpr = TILING.splits
    REDUCERS: gl.constexpr = TILING.reducers
    STEP: gl.constexpr = BOXES * BOX
    SWIZZLED: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [ROWS // 16, 1], [16, PAD, 16])
    BYTES: gl.constexpr = (ROWS + PAD) * STEP * 2
    w_smem = gl.allocate_shared_memory(dtype, [STAGES * BOXES, ROWS, BOX], SWIZZLED)
    x_smem = gl.allocate_shared_memory(dtype, [STAGES * BOXES, PAD, BOX], SWIZZLED)
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

    load_tile = first + STAGES // count * stride
    load_step = STAGES % count
    i = 0
    for tile in range(first, num_tiles, stride):
        acc = gl.zeros([ROWS, PAD], gl.float32, ACC)
        for _ in range(count):
            slot = i % STAGES
            mbarrier.wait(full.index(slot), (i // STAGES) & 1)
            for c in gl.static_range(BOXES):
                x = x_smem.index(slot * BOXES + c).permute((1, 0))
                acc = warpgroup_mma(w_smem.index(slot * BOXES + c), x, acc, is_async=True)
            acc = warpgroup_mma_wait(BOXES, deps=[acc])  # those of the step before
            if (i >= 1) & (i - 1 + STAGES < total):
                free = (i - 1) % STAGES
                gl.thread_barrier()  # every warp has read the slot
                mbarrier.expect(full.index(free), BYTES)
                column = (begin + load_step) * STEP
                load_weights(w_desc, w_smem, full.index(free), free, load_tile, column, TILING)
                load_inputs(x_desc, x_smem, full.index(free), free, column, TILING)
                load_step += 1
                if load_step == count:
                    load_step = 0
                    load_tile += stride
            i += 1
        acc = warpgroup_mma_wait(0, deps=[acc])
        if SPLITS == 1:
            store_tile(acc, y_ptr, bias_ptr, tile, 0, num_rows, size_out, TILING)
        else:
            sums = summed_over_cluster(acc, rank, SPLITS, REDUCERS, TILING.ring_bytes)
            if rank < REDUCERS:
                store_tile(sums, y_ptr, bias_ptr, tile, rank * (PAD // REDUCERS), num_rows, size_out, TILING)


def launch_wide(x: Tensor, weight: Tensor, bias: Tensor | None, y: Tensor, tiling: WideTiling) -> None:
    """Fill y [M, N] with x [M, K] @ weight^T + bias, or with SwiGLU of both halves of that where tiling.parts is 2.

    x and weight [parts * N, K] of one 16-bit dtype, 16-byte aligned, rows of weight contiguous; y contiguous, N a
    multiple of 8, M at most tiling.pad.
    """
    num_rows, size_in = x.shape
    size_out = y.shape[1]
    kernel = launcher(tiling, x.dtype, y.dtype, x.device)
    w_map: tuple[tuple[int, ...], tuple[int, ...]] = ((size_out, size_in), (size_in, 1))
    if tiling.parts == 2:
        w_map = (size_out // 8, 2, 8, size_in), (8 * size_in, size_out * size_in, size_in, 1)
    x_map = (num_rows, size_in), (x.stride(0), 1)
    w_box, x_box = kernel.boxes
    num_programs = -(-size_out * tiling.parts // tiling.rows)
    if tiling.splits == 1:
        num_programs = min(num_processors(x.device), num_programs)
    arguments = (
        kernel.encode(weight.data_ptr(), *w_box, *w_map, 0), *w_map[0], *w_map[1],
        kernel.encode(x.data_ptr(), *x_box, *x_map, 0), *x_map[0], *x_map[1],
        y.data_ptr(), None if bias is None else bias.data_ptr(), num_rows, size_out // 8, size_in,
    )  # fmt: skip
    kernel((num_programs, 1, 1), arguments)


# A pure function of what is compiled in: the cache holds no state.
@lru_cache(maxsize=256)
def launcher(tiling: WideTiling, dtype: torch.dtype, dtype_out: torch.dtype, device: torch.device) -> Loaded:
    """`compiled_wide`, ready to launch past Triton's binder, which takes longer than a small matmul."""
    return Loaded(compiled_wide(tiling, dtype, dtype_out), device, cluster=tiling.splits)


def compiled_wide(tiling: WideTiling, dtype: torch.dtype, dtype_out: torch.dtype) -> Any:
    """`hallmark_wide_matmul` of these dtypes for sm_90; no GPU is needed."""
    weights = [tiling.rows // 16, 2, 8, _BOX] if tiling.parts == 2 else [tiling.rows, _BOX]
    return hallmark_wide_matmul.warmup(
        any_map(dtype, weights), any_map(dtype, [tiling.pad, _BOX]), AnyTensor(dtype_out, 0), AnyTensor(dtype, 0),
        1, 1, 1, tiling, grid=(1,), num_warps=tiling.rows // 16, launch_pdl=True,
    )  # fmt: skip
