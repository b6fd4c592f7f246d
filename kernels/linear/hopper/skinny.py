"""The sm_90 kernel of `skinny_path.py`: a few rows times a large matrix, at the speed at which memory yields it.

A program owns whole tiles of weight rows, so that nothing is summed across programs. Boxes of 64 rows x 64 columns come
by TMA into a ring of shared memory and are multiplied by wgmma, whose M of 64 takes the weights: the few rows of x are
its N. Where tiles of 64 rows would leave multiprocessors idle, a box holds fewer rows of several segments of the inner
dim ("folds"), and the products of one segment's weights with another segment's x are dropped. For SwiGLU a box holds
rows of the gate and the same rows of the up projection ("parts").

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
from kernels.linear.hopper.tilings import BOX as _BOX
from kernels.linear.hopper.tilings import SkinnyTiling
from kernels.tma.launches import any_map
from kernels.tma.pointers import AnyTensor

BOX = gl.constexpr(_BOX)
_GLUON_DTYPES = {torch.float16: gl.float16, torch.bfloat16: gl.bfloat16}


@jit
def wait_for_previous_grid():
    gl.inline_asm_elementwise("griddepcontrol.wait; // $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@jit
def launch_next_grid():
    gl.inline_asm_elementwise("griddepcontrol.launch_dependents; // $0", "=r", [], gl.int32, is_pure=False, pack=1)


@jit
def load_weights(w_desc, w_smem, bar, slot, tile, column, TILING: gl.constexpr):
    BOXES: gl.constexpr = TILING.boxes
    ROWS: gl.constexpr = TILING.rows
    SHAPE: gl.constexpr = [TILING.folds, TILING.parts, ROWS, BOX]
    for c in gl.static_range(BOXES):
        box = w_smem.index(slot * BOXES + c).reshape(SHAPE)
        tma.async_copy_global_to_shared(w_desc, [0, 0, tile * ROWS, column + c * BOX], bar, box)


@jit
def load_inputs(x_desc, x_smem, bar, slot, column, TILING: gl.constexpr):
    BOXES: gl.constexpr = TILING.boxes
    SHAPE: gl.constexpr = [TILING.folds, TILING.pad, BOX]
    for c in gl.static_range(BOXES):
        box = x_smem.index(slot * BOXES + c).reshape(SHAPE)
        tma.async_copy_global_to_shared(x_desc, [0, 0, column + c * BOX], bar, box)


@jit
def unfold(acc, TILING: gl.constexpr):
    """[64, folds * pad] fp32 to [parts * rows, pad]: each segment's own products, summed over segments."""
    FOLDS: gl.constexpr = TILING.folds
    if FOLDS > 1:
        LAYOUT: gl.constexpr = acc.type.layout
        of_row = gl.arange(0, BOX, gl.SliceLayout(1, LAYOUT)) // (BOX // FOLDS)
        of_column = gl.arange(0, FOLDS * TILING.pad, gl.SliceLayout(0, LAYOUT)) // TILING.pad
        own = gl.where(of_row[:, None] == of_column[None, :], acc, 0.0)  # selects: what is dropped may be NaN
        acc = gl.sum(gl.sum(own.reshape([FOLDS, BOX // FOLDS, FOLDS, TILING.pad]), axis=2), axis=0)
    return acc


@jit
def store_tile(acc, y_ptr, bias_ptr, tile, num_rows, size_out, TILING: gl.constexpr):
    """y of one tile's columns, with what is fused into it."""
    ROWS: gl.constexpr = TILING.rows
    sums = unfold(acc, TILING)
    if TILING.parts == 2:
        HALVES: gl.constexpr = gl.BlockedLayout([2, 1, 1], [1, 32, 1], [1, 1, 4], [0, 1, 2])
        halves = gl.convert_layout(sums.reshape([2, ROWS, TILING.pad]), HALVES)
        gate, up = gl.split(halves.permute([1, 2, 0]))
        decay = gl.exp(-gl.abs(gate))  # never overflows
        out = gate * (gl.where(gate >= 0, 1.0, decay) / (1.0 + decay)) * up
    else:
        out = gl.convert_layout(sums, gl.BlockedLayout([1, 1], [32, 1], [1, 4], [0, 1]))
    column = tile * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, out.type.layout))[:, None]
    row = gl.arange(0, TILING.pad, gl.SliceLayout(0, out.type.layout))[None, :]
    if TILING.has_bias:
        out += gl.load(bias_ptr + column, mask=column < size_out, other=0.0).to(gl.float32)
    at = y_ptr + row.to(gl.int64) * size_out + column
    gl.store(at, out.to(y_ptr.dtype.element_ty), mask=(row < num_rows) & (column < size_out))


@jit(do_not_specialize=["num_rows", "size_out", "size_in"])
def hallmark_skinny_matmul(w_desc, x_desc, y_ptr, bias_ptr, num_rows, size_out, size_in, TILING: gl.constexpr):
    """One program of a persistent grid. w_desc is [folds, parts, N, K / folds], x_desc [folds, M, K / folds].

    What a descriptor has no columns or rows for arrives as zeros. Weights, of the first rounds, are read before the
    wait for the kernel before this one; x is read, and y written, after it.
    """
    dtype: gl.constexpr = w_desc.dtype
    STAGES: gl.constexpr = TILING.stages
    BOXES: gl.constexpr = TILING.boxes
    STEP: gl.constexpr = BOXES * BOX
    COLUMNS: gl.constexpr = TILING.folds * TILING.pad
    SWIZZLED: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS, 16])
    BYTES: gl.constexpr = (BOX + COLUMNS) * STEP * 2
    w_smem = gl.allocate_shared_memory(dtype, [STAGES * BOXES, BOX, BOX], SWIZZLED)
    x_smem = gl.allocate_shared_memory(dtype, [STAGES * BOXES, COLUMNS, BOX], SWIZZLED)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for s in gl.static_range(STAGES):
        mbarrier.init(full.index(s), count=1)
    launch_next_grid()

    first, num_programs = gl.program_id(0), gl.num_programs(0)
    num_steps = gl.cdiv(size_in // TILING.folds, STEP)  # of a tile
    total = gl.cdiv(gl.cdiv(size_out, TILING.rows) - first, num_programs) * num_steps
    for s in gl.static_range(STAGES):
        if s < total:
            mbarrier.expect(full.index(s), BYTES)
            tile = first + s // num_steps * num_programs
            load_weights(w_desc, w_smem, full.index(s), s, tile, s % num_steps * STEP, TILING)
    wait_for_previous_grid()
    for s in gl.static_range(STAGES):
        if s < total:
            load_inputs(x_desc, x_smem, full.index(s), s, s % num_steps * STEP, TILING)

    load_tile = first + STAGES // num_steps * num_programs
    load_step = STAGES % num_steps
    tile = first
    step = 0
    acc = gl.zeros([BOX, COLUMNS], gl.float32, ACC)
    for i in range(total):
        slot = i % STAGES
        mbarrier.wait(full.index(slot), (i // STAGES) & 1)
        for c in gl.static_range(BOXES):
            x = x_smem.index(slot * BOXES + c).permute((1, 0))
            acc = warpgroup_mma(w_smem.index(slot * BOXES + c), x, acc, is_async=True)
        acc = warpgroup_mma_wait(0, deps=[acc])
        if i + STAGES < total:
            gl.thread_barrier()  # every warp has read the slot
            mbarrier.expect(full.index(slot), BYTES)
            load_weights(w_desc, w_smem, full.index(slot), slot, load_tile, load_step * STEP, TILING)
            load_inputs(x_desc, x_smem, full.index(slot), slot, load_step * STEP, TILING)
            load_step += 1
            if load_step == num_steps:
                load_step = 0
                load_tile += num_programs
        step += 1
        if step == num_steps:
            store_tile(acc, y_ptr, bias_ptr, tile, num_rows, size_out, TILING)
            acc = gl.zeros([BOX, COLUMNS], gl.float32, ACC)
            step = 0
            tile += num_programs


def launch_skinny(x: Tensor, weight: Tensor, bias: Tensor | None, y: Tensor, tiling: SkinnyTiling) -> None:
    """Fill y [M, N] with x [M, K] @ weight^T + bias, or with SwiGLU of both halves of that where tiling.parts is 2.

    x and weight [parts * N, K] of one 16-bit dtype, 16-byte aligned, rows of weight contiguous; y contiguous.
    """
    num_rows, size_in = x.shape
    size_out, segment, stride = y.shape[1], size_in // tiling.folds, x.stride(0)
    kernel = launcher(tiling, x.dtype, y.dtype, x.device)
    w_map = (tiling.folds, tiling.parts, size_out, segment), (segment, size_out * size_in, size_in, 1)
    x_map = (tiling.folds, num_rows, segment), (segment, stride, 1)
    w_box, x_box = kernel.boxes
    num_programs = min(num_processors(x.device), -(-size_out // tiling.rows))
    arguments = (
        kernel.encode(weight.data_ptr(), *w_box, *w_map, 0), *w_map[0], *w_map[1],
        kernel.encode(x.data_ptr(), *x_box, *x_map, 0), *x_map[0], *x_map[1],
        y.data_ptr(), None if bias is None else bias.data_ptr(), num_rows, size_out, size_in,
    )  # fmt: skip
    kernel((num_programs, 1, 1), arguments)


# A pure function of what is compiled in: the cache holds no state.
@lru_cache(maxsize=256)
def launcher(tiling: SkinnyTiling, dtype: torch.dtype, dtype_out: torch.dtype, device: torch.device) -> Loaded:
    """`compiled_skinny`, ready to launch past Triton's binder, which takes longer than a small matmul."""
    return Loaded(compiled_skinny(tiling, dtype, dtype_out), device)


def compiled_skinny(tiling: SkinnyTiling, dtype: torch.dtype, dtype_out: torch.dtype) -> Any:
    """`hallmark_skinny_matmul` of these dtypes for sm_90; no GPU is needed."""
    weights = [tiling.folds, tiling.parts, tiling.rows, _BOX]
    inputs = [tiling.folds, tiling.pad, _BOX]
    return hallmark_skinny_matmul.warmup(
        any_map(dtype, weights), any_map(dtype, inputs), AnyTensor(dtype_out, 0), AnyTensor(dtype, 0),
        1, 1, 1, tiling, grid=(1,), num_warps=4, launch_pdl=True,
    )  # fmt: skip
