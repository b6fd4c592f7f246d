"""The sm_90 kernel of `fp8_skinny_path.py` for one row of x, which it rounds itself: nothing else is launched for it.

Every program rounds all of x, while its ring of weights fills: a row is 8 to 28 KB of L2, and the weights that arrive
meanwhile take longer. Else as `fp8_skinny.py`. Scales and roundings are those of `fp8_weights.py`, to the bit.

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
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, mma_v2

from kernels.calls.launch import Loaded
from kernels.calls.processors import num_processors
from kernels.linear.formats.fp8_weights import LARGEST as _LARGEST
from kernels.linear.formats.fp8_weights import LEAST_SCALE as _LEAST_SCALE
from kernels.linear.hopper.few_bits_tilings import COLUMNS as _COLUMNS
from kernels.linear.hopper.few_bits_tilings import Fp8Scales, Fp8SkinnyTiling
from kernels.linear.hopper.fp8_skinny import any_codes, load_weights, row_scales, store_tile, weight_scales
from kernels.linear.hopper.skinny import launch_next_grid, wait_for_previous_grid
from kernels.tma.pointers import AnyTensor

BOX = gl.constexpr(_COLUMNS)
LARGEST = gl.constexpr(_LARGEST)
LEAST_SCALE = gl.constexpr(_LEAST_SCALE)
ROWS_SCALED = gl.constexpr(Fp8Scales.ROWS.value)
STATIC_SCALED = gl.constexpr(Fp8Scales.STATIC.value)
BLOCKS_SCALED = gl.constexpr(Fp8Scales.BLOCKS.value)


@jit
def magnitude(x):
    """The bits of |x|, fp32: as integers in the order of the magnitudes, NaN above all."""
    return x.to(gl.int32, bitcast=True) & 0x7FFFFFFF


@jit
def scale_of(largest_bits):
    """The scale by which a largest magnitude becomes 448; NaN of NaN."""
    scale = gl.div_rn(largest_bits.to(gl.float32, bitcast=True), LARGEST)
    return gl.where(scale < LEAST_SCALE, LEAST_SCALE, scale)


@jit
def rounded(x, scale, inverse):
    """The numbers e4m3 nearest to x / scale, those beyond 448 cut off; inverse is 1 / scale.

    The quotient is corrected twice by what is left of x, as `div.rn` does where no exponent is extreme.
    """
    values = x * inverse
    values = gl.fma(gl.fma(-values, scale, x), inverse, values)
    values = gl.fma(gl.fma(-values, scale, x), inverse, values)
    return values.to(gl.float8e4nv)


@jit
def round_row(x_ptr, given_ptr, codes_smem, scales_smem, size_in, CHUNKS: gl.constexpr, TILING: gl.constexpr):
    """Round x into codes_smem [chunks, runs, folds, 128], zeros behind it; return its scale, where it has one.

    scales_smem  [chunks, runs, folds] of blocks
    """
    FOLDS: gl.constexpr = TILING.folds
    WARPS: gl.constexpr = TILING.box_rows // 16
    RUNS: gl.constexpr = TILING.runs_of_chunk
    # 16 columns of a run to a thread, a run to 8 threads.
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 1, 16], [4 // FOLDS, FOLDS, 8], [WARPS, 1, 1], [2, 1, 0])
    segment = size_in // FOLDS
    run = gl.arange(0, RUNS, gl.SliceLayout(1, gl.SliceLayout(2, LAYOUT)))[:, None, None]
    fold = gl.arange(0, FOLDS, gl.SliceLayout(0, gl.SliceLayout(2, LAYOUT)))[None, :, None]
    place = gl.arange(0, BOX, gl.SliceLayout(0, gl.SliceLayout(1, LAYOUT)))[None, None, :]
    chunks = ()
    for c in gl.static_range(CHUNKS):
        column = (c * RUNS + run) * BOX + place
        chunks += (gl.load(x_ptr + fold * segment + column, mask=column < segment, other=0.0),)
    scale = 1.0
    if TILING.scales == ROWS_SCALED:
        largest = magnitude(chunks[0].to(gl.float32))
        for c in gl.static_range(1, CHUNKS):
            largest = gl.maximum(largest, magnitude(chunks[c].to(gl.float32)))
        scale = scale_of(gl.max(gl.max(gl.max(largest, axis=2), axis=1), axis=0))
    elif TILING.scales == STATIC_SCALED:
        scale = gl.load(given_ptr)
    inverse = gl.div_rn(1.0, scale)
    for c in gl.static_range(CHUNKS):
        x = chunks[c].to(gl.float32)
        if TILING.scales == BLOCKS_SCALED:
            scales = scale_of(gl.max(magnitude(x), axis=2))
            scales_smem.index(c).store(scales)
            codes = rounded(x, scales[:, :, None], gl.div_rn(1.0, scales)[:, :, None])
        else:
            codes = rounded(x, scale, inverse)
        codes_smem.index(c).store(codes)
    return scale


@jit(do_not_specialize=["size_out", "size_in"])
def hallmark_fp8_one_row_matmul(
    w_desc, x_ptr, y_ptr, bias_ptr, w_scales_ptr, given_ptr, size_out, size_in,
    CHUNKS: gl.constexpr, TILING: gl.constexpr,
):  # fmt: skip
    """One program of a persistent grid. w_desc is [folds, parts, N, K / folds], x [K]; given_ptr is the scale of x.

    Weights, of the first rounds, are read before the wait for the kernel before this one; x is read, and y written,
    after it.
    """
    STAGES: gl.constexpr = TILING.stages
    BOXES: gl.constexpr = TILING.boxes
    ROWS: gl.constexpr = TILING.box_rows
    STEP: gl.constexpr = BOXES * BOX
    FOLDS: gl.constexpr = TILING.folds
    PAD: gl.constexpr = TILING.pad
    RUNS: gl.constexpr = TILING.runs_of_chunk
    PER_FOLD: gl.constexpr = TILING.parts * TILING.rows
    ACC: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [FOLDS, PER_FOLD // 16, 1], [1, 16, 8])
    FIRST: gl.constexpr = gl.DotOperandLayout(0, ACC, 4)
    SECOND: gl.constexpr = gl.DotOperandLayout(1, ACC, 4)
    BYTES: gl.constexpr = ROWS * STEP
    w_smem = gl.allocate_shared_memory(gl.float8e4nv, [STAGES * BOXES, ROWS, BOX], gl.NVMMASharedLayout(128, 8, rank=2))
    codes_smem = gl.allocate_shared_memory(
        gl.float8e4nv, [CHUNKS, RUNS, FOLDS, BOX], gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0])
    )
    scales_smem = gl.allocate_shared_memory(gl.float32, [CHUNKS, RUNS, FOLDS], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
    codes_of_runs = codes_smem._reinterpret(
        gl.float8e4nv, [CHUNKS * RUNS, FOLDS, BOX], gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    )
    scales_of_runs = scales_smem._reinterpret(gl.float32, [CHUNKS * RUNS, FOLDS], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for s in gl.static_range(STAGES):
        mbarrier.init(full.index(s), count=1)
    launch_next_grid()

    first, num_programs = gl.program_id(0), gl.num_programs(0)
    num_steps = gl.cdiv(size_in // FOLDS, STEP)  # of a tile
    total = gl.cdiv(gl.cdiv(size_out, TILING.rows) - first, num_programs) * num_steps
    for s in gl.static_range(STAGES):
        if s < total:
            mbarrier.expect(full.index(s), BYTES)
            tile = first + s // num_steps * num_programs
            load_weights(w_desc, w_smem, full.index(s), s, tile, s % num_steps * STEP, TILING)
    of_rows = row_scales(w_scales_ptr, first, size_out, ACC, TILING)
    wait_for_previous_grid()
    x_scale = round_row(x_ptr, given_ptr, codes_smem, scales_smem, size_in, CHUNKS, TILING)

    load_tile = first + STAGES // num_steps * num_programs
    load_step = STAGES % num_steps
    runs = gl.cdiv(size_in, BOX)
    tile = first
    step = 0
    acc = gl.zeros([FOLDS, PER_FOLD, PAD], gl.float32, ACC)
    if TILING.scales == BLOCKS_SCALED:
        of_weights = weight_scales(w_scales_ptr, tile, step, size_out, runs, ACC, TILING)
    for i in range(total):
        slot = i % STAGES
        if TILING.scales == BLOCKS_SCALED:
            is_last = step + 1 == num_steps
            next_tile, next_step = gl.where(is_last, tile + num_programs, tile), gl.where(is_last, 0, step + 1)
            next_of_weights = weight_scales(w_scales_ptr, next_tile, next_step, size_out, runs, ACC, TILING)
        mbarrier.wait(full.index(slot), (i // STAGES) & 1)
        weights = ()
        for c in gl.static_range(BOXES):
            box = w_smem.index(slot * BOXES + c).reshape([FOLDS, PER_FOLD, BOX])
            weights += (box.load(FIRST),)
        if i + STAGES < total:
            gl.thread_barrier()  # every warp has read the slot
            mbarrier.expect(full.index(slot), BYTES)
            load_weights(w_desc, w_smem, full.index(slot), slot, load_tile, load_step * STEP, TILING)
            load_step += 1
            if load_step == num_steps:
                load_step = 0
                load_tile += num_programs
        for c in gl.static_range(BOXES):
            run = step * BOXES + c
            codes = codes_of_runs.index(run).load(gl.SliceLayout(2, SECOND))
            # All columns of the operand are x: the results of all but the first are not stored.
            x = codes.to(gl.float16)[:, :, None].broadcast_to([FOLDS, BOX, PAD])
            w = weights[c].to(gl.float16)
            if TILING.scales == BLOCKS_SCALED:
                found = mma_v2(w, x, gl.zeros([FOLDS, PER_FOLD, PAD], gl.float32, ACC))
                of_x = scales_of_runs.index(run).load(gl.SliceLayout(1, gl.SliceLayout(2, ACC)))
                acc += found * (of_weights[c] * of_x[:, None])[:, :, None]
            else:
                acc = mma_v2(w, x, acc)
        if TILING.scales == BLOCKS_SCALED:
            of_weights = next_of_weights
        step += 1
        if step == num_steps:
            sums = gl.sum(acc, axis=0)  # of all segments
            if TILING.scales != BLOCKS_SCALED:
                sums = sums * of_rows[:, None] * x_scale
            store_tile(sums, y_ptr, bias_ptr, tile, 1, size_out, TILING)
            acc = gl.zeros([FOLDS, PER_FOLD, PAD], gl.float32, ACC)
            step = 0
            tile += num_programs
            of_rows = row_scales(w_scales_ptr, tile, size_out, ACC, TILING)


def launch_fp8_one_row(
    x: Tensor, given: Tensor | None, weight: Tensor, w_scales: Tensor, bias: Tensor | None, y: Tensor,
    tiling: Fp8SkinnyTiling,
) -> None:  # fmt: skip
    """Fill y [1, N] with x [1, K] @ weight^T + bias, or with SwiGLU of both halves of that where tiling.parts is 2.

    x         of 16 bits, 16-byte aligned; given: its scale [1] fp32, where the weight's format says it
    weight    [parts * N, K] e4m3, rows contiguous, 16-byte aligned; y contiguous
    w_scales  fp32, as `Fp8Scales` says
    """
    size_in = weight.shape[1]
    size_out, segment = y.shape[1], size_in // tiling.folds
    kernel = launcher(tiling, _num_chunks(tiling, size_in), x.dtype, y.dtype, x.device)
    w_map = (tiling.folds, tiling.parts, size_out, segment), (segment, size_out * size_in, size_in, 1)
    num_programs = min(num_processors(x.device), -(-size_out // tiling.rows))
    arguments = (
        kernel.encode(weight.data_ptr(), *kernel.boxes[0], *w_map, 0), *w_map[0], *w_map[1],
        x.data_ptr(), y.data_ptr(), None if bias is None else bias.data_ptr(), w_scales.data_ptr(),
        None if given is None else given.data_ptr(), size_out, size_in,
    )  # fmt: skip
    kernel((num_programs, 1, 1), arguments)


def _num_chunks(tiling: Fp8SkinnyTiling, size_in: int) -> int:
    """Chunks of the runs that a tile's steps read."""
    num_runs = -(-size_in // tiling.folds // (_COLUMNS * tiling.boxes)) * tiling.boxes
    return -(-num_runs // tiling.runs_of_chunk)


# A pure function of what is compiled in: the cache holds no state.
@lru_cache(maxsize=256)
def launcher(
    tiling: Fp8SkinnyTiling, num_chunks: int, dtype: torch.dtype, dtype_out: torch.dtype, device: torch.device
) -> Loaded:
    """`compiled_fp8_one_row`, ready to launch past Triton's binder, which takes longer than a small matmul."""
    return Loaded(compiled_fp8_one_row(tiling, num_chunks, dtype, dtype_out), device)


def compiled_fp8_one_row(tiling: Fp8SkinnyTiling, num_chunks: int, dtype: torch.dtype, dtype_out: torch.dtype) -> Any:
    """`hallmark_fp8_one_row_matmul` of these dtypes for sm_90; no GPU is needed."""
    weights = [tiling.folds, tiling.parts, tiling.rows, _COLUMNS]
    scales = AnyTensor(torch.float32, 4)  # at any multiple of 4 bytes: parts of a tensor start anywhere
    return hallmark_fp8_one_row_matmul.warmup(
        any_codes(weights), AnyTensor(dtype, 0), AnyTensor(dtype_out, 0), AnyTensor(dtype, 0), scales, scales, 1, 1,
        num_chunks, tiling, grid=(1,), num_warps=tiling.box_rows // 16, launch_pdl=True,
    )  # fmt: skip
