"""The sm_90 kernel of `ordered_path.py`: products of any number of rows, each summed in one order.

The order is "k16": one fp32 accumulator for each number of the result, to which wgmma adds 16 columns of the inner dim
at a time, from the first to the last. Or "k16x4": each fourth of the inner dim so, and ((0 + 2) + (1 + 3)) of them, as
`skinny.py` sums its folds. Nothing is summed across programs, so that the bits of a row depend on that row and the
weight alone.

wgmma's M takes the weights, its N the rows of x. So that all multiprocessors read, a tile may be of 32 rows of the
weight: what wgmma reads behind them is whatever stands in the ring there, and the products of that are dropped. For
SwiGLU a tile holds 8 rows of the gate, the same rows of the up projection, and so on; their sums are rounded to the
dtype of x first, as a product that is stored and then activated rounds them.

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
from kernels.linear.hopper.skinny import launch_next_grid, wait_for_previous_grid
from kernels.linear.ordered.tilings import BOX as _BOX
from kernels.linear.ordered.tilings import OrderedTiling
from kernels.tma.launches import any_map
from kernels.tma.pointers import AnyTensor

BOX = gl.constexpr(_BOX)


@jit
def load_weights(w_desc, w_smem, bar, slot, tile, segment, column, TILING: gl.constexpr):
    BOXES: gl.constexpr = TILING.boxes
    HEIGHT: gl.constexpr = TILING.height
    for c in gl.static_range(BOXES):
        box = w_smem.index(slot * BOXES + c)
        if TILING.parts == 2:
            at = [tile * (HEIGHT // 16), 0, 0, column + c * BOX]
            tma.async_copy_global_to_shared(w_desc, at, bar, box.reshape([HEIGHT // 16, 2, 8, BOX]))
        elif TILING.segments > 1:
            at = [segment, tile * HEIGHT, column + c * BOX]
            tma.async_copy_global_to_shared(w_desc, at, bar, box.reshape([1, HEIGHT, BOX]))
        else:
            tma.async_copy_global_to_shared(w_desc, [tile * HEIGHT, column + c * BOX], bar, box)


@jit
def load_inputs(x_desc, x_smem, bar, slot, row, segment, column, TILING: gl.constexpr):
    BOXES: gl.constexpr = TILING.boxes
    for c in gl.static_range(BOXES):
        box = x_smem.index(slot * BOXES + c)
        if TILING.segments > 1:
            at = [segment, row, column + c * BOX]
            tma.async_copy_global_to_shared(x_desc, at, bar, box.reshape([1, TILING.pad, BOX]))
        else:
            tma.async_copy_global_to_shared(x_desc, [row, column + c * BOX], bar, box)


@jit
def segment_of(place, TILING: gl.constexpr):
    """The segment that is multiplied at this place: 0, 2, 1, 3."""
    if TILING.segments > 1:
        segment = place % 2 * 2 + place // 2
    else:
        segment = 0
    return segment


@jit
def products(w_desc, x_desc, smem, num_steps, i, total, to_tile, to_place, to_step, first_row, TILING: gl.constexpr):
    """Sums [groups * 64, pad] fp32 of a segment, the ring's next steps, and how far the ring is.

    Slots are filled again: next comes a step of the segment at a place of a tile.
    """
    dtype: gl.constexpr = w_desc.dtype
    STAGES: gl.constexpr = TILING.stages
    BOXES: gl.constexpr = TILING.boxes
    ROWS: gl.constexpr = TILING.rows
    PAD: gl.constexpr = TILING.pad
    SWIZZLED: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [ROWS // 16, 1], [16, PAD, 16])
    BYTES: gl.constexpr = (TILING.height + PAD) * BOXES * BOX * 2
    w_smem, x_smem, full = smem
    acc = gl.zeros([ROWS, PAD], gl.float32, ACC)
    for _ in range(num_steps):
        slot = i % STAGES
        mbarrier.wait(full.index(slot), (i // STAGES) & 1)
        for c in gl.static_range(BOXES):
            w = w_smem.index(slot * BOXES + c)._reinterpret(dtype, [ROWS, BOX], SWIZZLED)
            acc = warpgroup_mma(w, x_smem.index(slot * BOXES + c).permute((1, 0)), acc, is_async=True)
        acc = warpgroup_mma_wait(BOXES, deps=[acc])  # those of the step before
        if (i >= 1) & (i - 1 + STAGES < total):
            free = (i - 1) % STAGES
            gl.thread_barrier()  # every warp has read the slot
            mbarrier.expect(full.index(free), BYTES)
            segment = segment_of(to_place, TILING)
            column = to_step * (BOXES * BOX)
            load_weights(w_desc, w_smem, full.index(free), free, to_tile, segment, column, TILING)
            load_inputs(x_desc, x_smem, full.index(free), free, first_row, segment, column, TILING)
            to_step += 1
            if to_step == num_steps:
                to_step = 0
                to_place += 1
                if to_place == TILING.segments:
                    to_place = 0
                    to_tile += 1
        i += 1
    return warpgroup_mma_wait(0, deps=[acc]), i, to_tile, to_place, to_step


@jit
def store_tile(acc, y_ptr, bias_ptr, tile, first_row, num_rows, size_out, dtype: gl.constexpr, TILING: gl.constexpr):
    """Store y of one tile, with what is fused into it; acc [groups * 64, pad] as wgmma leaves it."""
    PAD: gl.constexpr = TILING.pad
    OUT: gl.constexpr = TILING.rows // TILING.parts
    COLUMNS: gl.constexpr = TILING.height // TILING.parts  # of y; those behind them are another tile's
    if TILING.parts == 2:
        gate, up = gl.split(acc.reshape([OUT // 8, 2, 8, PAD]).permute([0, 2, 3, 1]))
        gate = gate.to(dtype).to(gl.float32)
        up = up.to(dtype).to(gl.float32)
        decay = gl.exp(-gl.abs(gate))  # never overflows
        acc = (gate * (gl.where(gate >= 0, 1.0, decay) / (1.0 + decay)) * up).reshape([OUT, PAD])
    if TILING.has_bias:
        column = tile * COLUMNS + gl.arange(0, OUT, gl.SliceLayout(1, acc.type.layout))
        acc += gl.load(bias_ptr + column, mask=column < size_out, other=0.0).to(gl.float32)[:, None]
    ACROSS: gl.constexpr = OUT // 8 if OUT < 256 else 32
    STORED: gl.constexpr = gl.BlockedLayout([8, 1], [ACROSS, 32 // ACROSS], [1, TILING.groups * 4], [0, 1])
    out = gl.convert_layout(acc.to(y_ptr.dtype.element_ty), STORED)
    column = tile * COLUMNS + gl.arange(0, OUT, gl.SliceLayout(1, STORED))[:, None]
    row = first_row + gl.arange(0, PAD, gl.SliceLayout(0, STORED))[None, :]
    is_own = (column < size_out) & (column < (tile + 1) * COLUMNS)
    at = y_ptr + row.to(gl.int64) * size_out + column
    gl.store(at, out, mask=is_own & (row < num_rows))


@jit(do_not_specialize=["num_rows", "size_out", "size_in"])
def hallmark_ordered_matmul(w_desc, x_desc, y_ptr, bias_ptr, num_rows, size_out, size_in, TILING: gl.constexpr):
    """One program: of the first axis a share of the weight's tiles, of the second one `pad` rows of x.

    w_desc is [N, K], [N / 8, 2, 8, K] or [4, N, K / 4], x_desc [M, K] or [4, M, K / 4]. What a descriptor has no
    columns or rows for arrives as zeros. Weights, of the first rounds, are read before the wait for the kernel before
    this one; x is read, and y written, after it. N is size_out * TILING.multiple.
    """
    dtype: gl.constexpr = w_desc.dtype
    STAGES: gl.constexpr = TILING.stages
    BOXES: gl.constexpr = TILING.boxes
    SEGMENTS: gl.constexpr = TILING.segments
    HEIGHT: gl.constexpr = TILING.height
    PAD: gl.constexpr = TILING.pad
    STEP: gl.constexpr = BOXES * BOX
    SWIZZLED: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
    BYTES: gl.constexpr = (HEIGHT + PAD) * STEP * 2
    w_smem = gl.allocate_shared_memory(dtype, [STAGES * BOXES + TILING.slack, HEIGHT, BOX], SWIZZLED)
    x_smem = gl.allocate_shared_memory(dtype, [STAGES * BOXES, PAD, BOX], SWIZZLED)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for s in gl.static_range(STAGES):
        mbarrier.init(full.index(s), count=1)
    launch_next_grid()

    size_out *= TILING.multiple
    num_tiles = gl.cdiv(size_out * TILING.parts, HEIGHT)
    share = gl.cdiv(num_tiles, gl.num_programs(0))
    first = gl.program_id(0) * share
    end = gl.minimum(first + share, num_tiles)
    # The last rows overlap those before them, and are stored twice with the same bits: boxes that are partly outside
    # of x arrive later (96 rows took up to 1.3 times as long as 128, one H200).
    first_row = gl.minimum(gl.program_id(1) * PAD, gl.maximum(num_rows - PAD, 0))
    num_steps = gl.cdiv(size_in // SEGMENTS, STEP)  # of a segment
    of_tile = num_steps * SEGMENTS
    total = (end - first) * of_tile
    for s in gl.static_range(STAGES):
        if s < total:
            mbarrier.expect(full.index(s), BYTES)
            segment = segment_of(s % of_tile // num_steps, TILING)
            column = s % num_steps * STEP  # num_steps divides of_tile
            load_weights(w_desc, w_smem, full.index(s), s, first + s // of_tile, segment, column, TILING)
    wait_for_previous_grid()
    for s in gl.static_range(STAGES):
        if s < total:
            segment = segment_of(s % of_tile // num_steps, TILING)
            column = s % num_steps * STEP
            load_inputs(x_desc, x_smem, full.index(s), s, first_row, segment, column, TILING)

    smem = (w_smem, x_smem, full)
    to_tile = first + STAGES // of_tile
    to_place = STAGES % of_tile // num_steps
    to_step = STAGES % num_steps
    i = 0
    for tile in range(first, end):
        acc, i, to_tile, to_place, to_step = products(
            w_desc, x_desc, smem, num_steps, i, total, to_tile, to_place, to_step, first_row, TILING
        )  # fmt: skip
        if SEGMENTS > 1:
            other, i, to_tile, to_place, to_step = products(
                w_desc, x_desc, smem, num_steps, i, total, to_tile, to_place, to_step, first_row, TILING
            )
            acc += other
            odd, i, to_tile, to_place, to_step = products(
                w_desc, x_desc, smem, num_steps, i, total, to_tile, to_place, to_step, first_row, TILING
            )
            other, i, to_tile, to_place, to_step = products(
                w_desc, x_desc, smem, num_steps, i, total, to_tile, to_place, to_step, first_row, TILING
            )
            acc += odd + other
        store_tile(acc, y_ptr, bias_ptr, tile, first_row, num_rows, size_out, dtype, TILING)


def launch_ordered(
    x: Tensor, weight: Tensor, bias: Tensor | None, y: Tensor, tiling: OrderedTiling, num_programs: int
) -> None:
    """Fill y [M, N] with x [M, K] @ weight^T + bias, or with SwiGLU of both halves of that where tiling.parts is 2.

    x and weight [parts * N, K] of one 16-bit dtype, 16-byte aligned, rows of weight contiguous; y contiguous, N a
    multiple of 8 where there are two parts, K of 32 where there are segments. num_programs: of the weight's rows.
    """
    (num_rows, size_in), segments = x.shape, tiling.segments
    size_out, segment, stride = y.shape[1], size_in // segments, x.stride(0)
    kernel = launcher(tiling, x.dtype, y.dtype, x.device)
    w_map: tuple[tuple[int, ...], tuple[int, ...]] = ((size_out, size_in), (size_in, 1))
    x_map: tuple[tuple[int, ...], tuple[int, ...]] = ((num_rows, size_in), (stride, 1))
    if tiling.parts == 2:
        w_map = (size_out // 8, 2, 8, size_in), (8 * size_in, size_out * size_in, size_in, 1)
    elif segments > 1:
        w_map, x_map = (
            ((segments, size_out, segment), (segment, size_in, 1)),
            ((segments, num_rows, segment), (segment, stride, 1)),
        )
    w_box, x_box = kernel.boxes
    arguments = (
        kernel.encode(weight.data_ptr(), *w_box, *w_map, 0), *w_map[0], *w_map[1],
        kernel.encode(x.data_ptr(), *x_box, *x_map, 0), *x_map[0], *x_map[1],
        y.data_ptr(), None if bias is None else bias.data_ptr(), num_rows, size_out // tiling.multiple, size_in,
    )  # fmt: skip
    kernel((num_programs, -(-num_rows // tiling.pad), 1), arguments)


# A pure function of what is compiled in: the cache holds no state.
@lru_cache(maxsize=256)
def launcher(tiling: OrderedTiling, dtype: torch.dtype, dtype_out: torch.dtype, device: torch.device) -> Loaded:
    """`compiled_ordered`, ready to launch past Triton's binder, which takes longer than a small matmul."""
    return Loaded(compiled_ordered(tiling, dtype, dtype_out), device)


def compiled_ordered(tiling: OrderedTiling, dtype: torch.dtype, dtype_out: torch.dtype) -> Any:
    """`hallmark_ordered_matmul` of these dtypes for sm_90; no GPU is needed."""
    return hallmark_ordered_matmul.warmup(
        any_map(dtype, tiling.weights_box), any_map(dtype, tiling.inputs_box), AnyTensor(dtype_out, 0),
        AnyTensor(dtype, 0), 1, 1, 1, tiling, grid=(1,), num_warps=tiling.groups * 4, launch_pdl=True,
    )  # fmt: skip
