"""The sm_90 kernel of `fp8_skinny_path.py`: a few rows times a weight of 8 bits, which is read once.

As `skinny.py`, but that codes e4m3 come by TMA in boxes of 128 columns and become fp16 in registers, in which they are
exact; so all that is summed is fp32, and sums are multiplied by scales once a tile, or once 128 columns where blocks
have scales. Each warp multiplies 16 rows of one segment ("fold") by `mma`. A first version, by wgmma with codes from
registers, took 1.0 to 1.7 times as long at 1 to 32 rows (an 8B's products, one H200); it loaded scales later too.

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
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, mma_v2, tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from kernels.calls.launch import Loaded
from kernels.calls.processors import num_processors
from kernels.linear.formats.fp8_weights import E4M3
from kernels.linear.hopper.few_bits_tilings import COLUMNS as _COLUMNS
from kernels.linear.hopper.few_bits_tilings import Fp8Scales, Fp8SkinnyTiling
from kernels.linear.hopper.skinny import launch_next_grid, wait_for_previous_grid
from kernels.tma.pointers import AnyTensor

BOX = gl.constexpr(_COLUMNS)
ROWS_SCALED = gl.constexpr(Fp8Scales.ROWS.value)
BLOCKS_SCALED = gl.constexpr(Fp8Scales.BLOCKS.value)


@jit
def load_weights(w_desc, w_smem, bar, slot, tile, column, TILING: gl.constexpr):
    BOXES: gl.constexpr = TILING.boxes
    SHAPE: gl.constexpr = [TILING.folds, TILING.parts, TILING.rows, BOX]
    for c in gl.static_range(BOXES):
        box = w_smem.index(slot * BOXES + c).reshape(SHAPE)
        tma.async_copy_global_to_shared(w_desc, [0, 0, tile * TILING.rows, column + c * BOX], bar, box)


@jit
def load_inputs(x_desc, x_smem, bar, slot, column, TILING: gl.constexpr):
    BOXES: gl.constexpr = TILING.boxes
    SHAPE: gl.constexpr = [TILING.folds, TILING.pad, BOX]
    for c in gl.static_range(BOXES):
        box = x_smem.index(slot * BOXES + c).reshape(SHAPE)
        tma.async_copy_global_to_shared(x_desc, [0, 0, column + c * BOX], bar, box)


@jit
def row_scales(w_scales_ptr, tile, size_out, ACC: gl.constexpr, TILING: gl.constexpr):
    """Scales of a tile's rows of the weight [parts * rows], as the sums of all segments have them; 1 of blocks."""
    place = gl.arange(0, TILING.parts * TILING.rows, gl.SliceLayout(1, gl.SliceLayout(0, ACC)))
    if TILING.scales == BLOCKS_SCALED:
        scales = gl.full([TILING.parts * TILING.rows], 1.0, gl.float32, gl.SliceLayout(1, gl.SliceLayout(0, ACC)))
    else:
        column = tile * TILING.rows + place % TILING.rows
        at = w_scales_ptr + place // TILING.rows * size_out + column
        scales = gl.load(at, mask=column < size_out, other=0.0)
    return scales


@jit
def store_tile(sums, y_ptr, bias_ptr, tile, num_rows, size_out, TILING: gl.constexpr):
    """y of one tile's columns, with what is fused into it; sums [parts * rows, pad]."""
    ROWS: gl.constexpr = TILING.rows
    WARPS: gl.constexpr = TILING.box_rows // 16
    if TILING.parts == 2:
        HALVES: gl.constexpr = gl.BlockedLayout([2, 1, 1], [1, 32, 1], [1, 1, WARPS], [0, 1, 2])
        halves = gl.convert_layout(sums.reshape([2, ROWS, TILING.pad]), HALVES)
        gate, up = gl.split(halves.permute([1, 2, 0]))
        decay = gl.exp(-gl.abs(gate))  # never overflows
        out = gate * (gl.where(gate >= 0, 1.0, decay) / (1.0 + decay)) * up
    else:
        out = gl.convert_layout(sums, gl.BlockedLayout([1, 1], [32, 1], [1, WARPS], [0, 1]))
    column = tile * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, out.type.layout))[:, None]
    row = gl.arange(0, TILING.pad, gl.SliceLayout(0, out.type.layout))[None, :]
    if TILING.has_bias:
        out += gl.load(bias_ptr + column, mask=column < size_out, other=0.0).to(gl.float32)
    at = y_ptr + row.to(gl.int64) * size_out + column
    gl.store(at, out.to(y_ptr.dtype.element_ty), mask=(row < num_rows) & (column < size_out))


@jit
def weight_scales(w_scales_ptr, tile, step, size_out, runs, ACC: gl.constexpr, TILING: gl.constexpr):
    """Scales of the weights of each 128 columns of a stage, [folds, parts * rows] of each; 0 where there are none."""
    BOXES: gl.constexpr = TILING.boxes
    fold = gl.arange(0, TILING.folds, gl.SliceLayout(1, gl.SliceLayout(2, ACC)))[:, None]
    place = gl.arange(0, TILING.parts * TILING.rows, gl.SliceLayout(0, gl.SliceLayout(2, ACC)))[None, :]
    row, per_fold = tile * TILING.rows + place % TILING.rows, runs // TILING.folds
    first = (place // TILING.rows * size_out + row) // BOX * runs + fold * per_fold
    scales = ()
    for c in gl.static_range(BOXES):
        run = step * BOXES + c
        is_there = (row < size_out) & (run < per_fold)
        scales += (gl.load(w_scales_ptr + first + run, mask=is_there, other=0.0),)
    return scales


@jit
def input_scales(x_scales_ptr, step, num_rows, runs, ACC: gl.constexpr, TILING: gl.constexpr):
    """Scales of x of each 128 columns of a stage, [folds, pad] of each; 0 where there are none."""
    BOXES: gl.constexpr = TILING.boxes
    fold = gl.arange(0, TILING.folds, gl.SliceLayout(1, gl.SliceLayout(1, ACC)))[:, None]
    m = gl.arange(0, TILING.pad, gl.SliceLayout(0, gl.SliceLayout(1, ACC)))[None, :]
    per_fold = runs // TILING.folds
    scales = ()
    for c in gl.static_range(BOXES):
        run = step * BOXES + c
        at = (fold * per_fold + run) * num_rows + m
        scales += (gl.load(x_scales_ptr + at, mask=(m < num_rows) & (run < per_fold), other=0.0),)
    return scales


@jit(do_not_specialize=["num_rows", "size_out", "size_in"])
def hallmark_fp8_skinny_matmul(
    w_desc, x_desc, y_ptr, bias_ptr, w_scales_ptr, x_scales_ptr, num_rows, size_out, size_in, TILING: gl.constexpr
):
    """One program of a persistent grid. w_desc is [folds, parts, N, K / folds], x_desc [folds, M, K / folds].

    What a descriptor has no columns or rows for arrives as zeros. Weights, of the first rounds, are read before the
    wait for the kernel before this one; x and its scales are read, and y written, after it.
    """
    STAGES: gl.constexpr = TILING.stages
    BOXES: gl.constexpr = TILING.boxes
    ROWS: gl.constexpr = TILING.box_rows
    STEP: gl.constexpr = BOXES * BOX
    FOLDS: gl.constexpr = TILING.folds
    PAD: gl.constexpr = TILING.pad
    PER_FOLD: gl.constexpr = TILING.parts * TILING.rows
    ACC: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [FOLDS, PER_FOLD // 16, 1], [1, 16, 8])
    FIRST: gl.constexpr = gl.DotOperandLayout(0, ACC, 4)
    SECOND: gl.constexpr = gl.DotOperandLayout(1, ACC, 4)
    BYTES: gl.constexpr = (ROWS + FOLDS * PAD) * STEP
    w_smem = gl.allocate_shared_memory(gl.float8e4nv, [STAGES * BOXES, ROWS, BOX], gl.NVMMASharedLayout(128, 8, rank=2))
    x_smem = gl.allocate_shared_memory(
        gl.float8e4nv, [STAGES * BOXES, FOLDS * PAD, BOX], gl.NVMMASharedLayout(128, 8, rank=2)
    )
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
    of_rows = row_scales(w_scales_ptr, first, size_out, ACC, TILING)
    wait_for_previous_grid()
    for s in gl.static_range(STAGES):
        if s < total:
            load_inputs(x_desc, x_smem, full.index(s), s, s % num_steps * STEP, TILING)

    m = gl.arange(0, PAD, gl.SliceLayout(0, gl.SliceLayout(0, ACC)))
    if TILING.scales == ROWS_SCALED:
        of_x = gl.load(x_scales_ptr + m, mask=m < num_rows, other=0.0)
    elif TILING.scales != BLOCKS_SCALED:
        of_x = gl.load(x_scales_ptr + m * 0)
    load_tile = first + STAGES // num_steps * num_programs
    load_step = STAGES % num_steps
    runs = gl.cdiv(size_in, BOX)
    tile = first
    step = 0
    acc = gl.zeros([FOLDS, PER_FOLD, PAD], gl.float32, ACC)
    if TILING.scales == BLOCKS_SCALED:
        of_weights = weight_scales(w_scales_ptr, tile, step, size_out, runs, ACC, TILING)
        of_inputs = input_scales(x_scales_ptr, step, num_rows, runs, ACC, TILING)
    for i in range(total):
        slot = i % STAGES
        if TILING.scales == BLOCKS_SCALED:
            is_last = step + 1 == num_steps
            next_tile, next_step = gl.where(is_last, tile + num_programs, tile), gl.where(is_last, 0, step + 1)
            next_of_weights = weight_scales(w_scales_ptr, next_tile, next_step, size_out, runs, ACC, TILING)
            next_of_inputs = input_scales(x_scales_ptr, next_step, num_rows, runs, ACC, TILING)
        mbarrier.wait(full.index(slot), (i // STAGES) & 1)
        weights, inputs = (), ()
        for c in gl.static_range(BOXES):
            box = slot * BOXES + c
            weights += (w_smem.index(box).reshape([FOLDS, PER_FOLD, BOX]).load(FIRST),)
            inputs += (x_smem.index(box).reshape([FOLDS, PAD, BOX]).permute((0, 2, 1)).load(SECOND),)
        if i + STAGES < total:
            gl.thread_barrier()  # every warp has read the slot
            mbarrier.expect(full.index(slot), BYTES)
            load_weights(w_desc, w_smem, full.index(slot), slot, load_tile, load_step * STEP, TILING)
            load_inputs(x_desc, x_smem, full.index(slot), slot, load_step * STEP, TILING)
            load_step += 1
            if load_step == num_steps:
                load_step = 0
                load_tile += num_programs
        for c in gl.static_range(BOXES):
            w, x = weights[c].to(gl.float16), inputs[c].to(gl.float16)
            if TILING.scales == BLOCKS_SCALED:
                found = mma_v2(w, x, gl.zeros([FOLDS, PER_FOLD, PAD], gl.float32, ACC))
                acc += found * of_weights[c][:, :, None] * of_inputs[c][:, None, :]
            else:
                acc = mma_v2(w, x, acc)
        if TILING.scales == BLOCKS_SCALED:
            of_weights, of_inputs = next_of_weights, next_of_inputs
        step += 1
        if step == num_steps:
            sums = gl.sum(acc, axis=0)  # of all segments
            if TILING.scales != BLOCKS_SCALED:
                sums = sums * of_rows[:, None] * of_x[None, :]
            store_tile(sums, y_ptr, bias_ptr, tile, num_rows, size_out, TILING)
            acc = gl.zeros([FOLDS, PER_FOLD, PAD], gl.float32, ACC)
            step = 0
            tile += num_programs
            of_rows = row_scales(w_scales_ptr, tile, size_out, ACC, TILING)  # here: a tile's end would wait for them


def launch_fp8_skinny(
    codes: Tensor, x_scales: Tensor, weight: Tensor, w_scales: Tensor, bias: Tensor | None, y: Tensor,
    tiling: Fp8SkinnyTiling,
) -> None:  # fmt: skip
    """Fill y [M, N] with x [M, K] @ weight^T + bias, or with SwiGLU of both halves of that where tiling.parts is 2.

    codes     [M, K up to the next 128] e4m3: x over its scales, zeros from K on
    weight    [parts * N, K] e4m3, rows contiguous, 16-byte aligned; y contiguous
    x_scales, w_scales   fp32, as `Fp8Scales` says
    """
    num_rows, columns = codes.shape
    size_in = weight.shape[1]
    size_out, segment = y.shape[1], size_in // tiling.folds
    kernel = launcher(tiling, y.dtype, bias.dtype if bias is not None else y.dtype, codes.device)
    w_map = (tiling.folds, tiling.parts, size_out, segment), (segment, size_out * size_in, size_in, 1)
    x_map = (tiling.folds, num_rows, segment), (segment, columns, 1)
    w_box, x_box = kernel.boxes
    num_programs = min(num_processors(codes.device), -(-size_out // tiling.rows))
    arguments = (
        kernel.encode(weight.data_ptr(), *w_box, *w_map, 0), *w_map[0], *w_map[1],
        kernel.encode(codes.data_ptr(), *x_box, *x_map, 0), *x_map[0], *x_map[1],
        y.data_ptr(), None if bias is None else bias.data_ptr(), w_scales.data_ptr(), x_scales.data_ptr(),
        num_rows, size_out, size_in,
    )  # fmt: skip
    kernel((num_programs, 1, 1), arguments)


# A pure function of what is compiled in: the cache holds no state.
@lru_cache(maxsize=256)
def launcher(tiling: Fp8SkinnyTiling, dtype_out: torch.dtype, dtype_bias: torch.dtype, device: torch.device) -> Loaded:
    """`compiled_fp8_skinny`, ready to launch past Triton's binder, which takes longer than a small matmul."""
    return Loaded(compiled_fp8_skinny(tiling, dtype_out, dtype_bias), device)


def compiled_fp8_skinny(tiling: Fp8SkinnyTiling, dtype_out: torch.dtype, dtype_bias: torch.dtype) -> Any:
    """`hallmark_fp8_skinny_matmul` of these dtypes for sm_90; no GPU is needed."""
    weights = [tiling.folds, tiling.parts, tiling.rows, _COLUMNS]
    inputs = [tiling.folds, tiling.pad, _COLUMNS]
    scales = AnyTensor(torch.float32, 4)  # at any multiple of 4 bytes: parts of a tensor start anywhere
    return hallmark_fp8_skinny_matmul.warmup(
        any_codes(weights), any_codes(inputs), AnyTensor(dtype_out, 0), AnyTensor(dtype_bias, 0),
        scales, scales, 1, 1, 1, tiling, grid=(1,), num_warps=tiling.box_rows // 16, launch_pdl=True,
    )  # fmt: skip


def any_codes(box: list[int]) -> TensorDescriptor:
    """Return a stand-in for every tensor map of codes and this box: what Triton compiles in of one."""
    layout = gl.NVMMASharedLayout.get_default_for(box, gl.float8e4nv)
    return TensorDescriptor(AnyTensor(E4M3, 0), [1] * len(box), [16] * (len(box) - 1) + [1], box, layout)
