"""The sm_90 kernel of `int4_skinny_path.py`: a few rows times a weight of 4 bits, which is read once.

As `fp8_skinny.py`, but that eight codes of a row come as one word. A code less its zero point is a small whole number,
exact in 16 bits: a word's codes become one without a conversion, by bits of their own beside the exponent of 128 (fp16:
1024). The four pairs of a word are columns 0 and 4, 1 and 5, and so on; so that they stand where wgmma has them, the
columns of x are put in the same order before. The sums of a group are multiplied by its scale in fp32.

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
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, mma_v2, tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.runtime.jit import constexpr_function

from kernels.calls.launch import Loaded
from kernels.calls.processors import num_processors
from kernels.linear.hopper.few_bits_tilings import Int4SkinnyTiling
from kernels.linear.hopper.skinny import launch_next_grid, wait_for_previous_grid
from kernels.tma.pointers import AnyTensor

_WORDS = 32  # of a box, 128 bytes
WORDS = gl.constexpr(_WORDS)
BOX = gl.constexpr(8 * _WORDS)  # columns
_GLUON_DTYPES = {torch.float16: gl.float16, torch.bfloat16: gl.bfloat16, torch.int32: gl.int32}


def _unpacking(magic: int, difference: str) -> Any:
    """Return code that makes a word's four pairs of codes e and e + 4, less zero points, of a word and those twice."""
    pairs = "".join(
        f"shr.u32 w, $8, {4 * place};\nlop3.b32 {pair}, w, 0x000F000F, {magic:#x}, 0xEA;\n"
        f"{difference} {pair}, {pair}, $9;\nmov.b32 {{${2 * place}, ${2 * place + 1}}}, {pair};\n"
        for place, pair in enumerate("abcd")
    )
    return gl.constexpr(f"{{ .reg .b32 w, a, b, c, d;\n{pairs}}}")


EIGHT_BF16, EIGHT_FP16 = gl.constexpr((gl.bfloat16,) * 8), gl.constexpr((gl.float16,) * 8)
UNPACK_BF16, UNPACK_FP16 = _unpacking(0x43004300, "sub.rn.bf16x2"), _unpacking(0x64006400, "sub.rn.f16x2")


@jit
def load_weights(w_desc, w_smem, bar, slot, tile, step, TILING: gl.constexpr):
    BOXES: gl.constexpr = TILING.boxes
    SHAPE: gl.constexpr = [TILING.folds, TILING.parts, TILING.rows, WORDS]
    for c in gl.static_range(BOXES):
        box = w_smem.index(slot * BOXES + c).reshape(SHAPE)
        tma.async_copy_global_to_shared(w_desc, [0, 0, tile * TILING.rows, (step * BOXES + c) * WORDS], bar, box)


@jit
def load_inputs(x_desc, x_smem, bar, slot, step, TILING: gl.constexpr):
    GROUPS: gl.constexpr = TILING.boxes * (BOX // TILING.group)
    SHAPE: gl.constexpr = [TILING.folds, TILING.pad, TILING.group]
    for g in gl.static_range(GROUPS):
        box = x_smem.index(slot * GROUPS + g).reshape(SHAPE)
        tma.async_copy_global_to_shared(x_desc, [0, 0, (step * GROUPS + g) * TILING.group], bar, box)


@jit
def halves(words):
    """[f, n, w] as two of [f, n, w / 2], both of whose columns a thread has itself."""
    F: gl.constexpr = words.shape[0]
    N: gl.constexpr = words.shape[1]
    W: gl.constexpr = words.shape[2]
    return gl.split(words.reshape([F, N, 2, W // 2]).permute([0, 1, 3, 2]))


@jit
def by_groups(words, GROUP: gl.constexpr):
    """[f, n, 32] words as one tuple of those of each group."""
    first, second = halves(words)
    if GROUP == 128:
        return first, second
    else:  # noqa: RET505 -- what is compiled of a branch ends with it
        a, b = halves(first)
        c, d = halves(second)
        if GROUP == 64:
            return a, b, c, d
        else:  # noqa: RET505
            a0, a1 = halves(a)
            b0, b1 = halves(b)
            c0, c1 = halves(c)
            d0, d1 = halves(d)
            return a0, a1, b0, b1, c0, c1, d0, d1


@jit
def numbers_of(words, zeros, DTYPE: gl.constexpr, FIRST: gl.constexpr):
    """Codes less zero points [f, n, 8 * w], an operand; words [f, n, w], zeros [f, n] uint8.

    Of 32 columns, which four threads have, that of thread q and code e is at (e % 4) * 8 + q * 2 + e // 4.
    """
    MAGIC: gl.constexpr = 0x64006400 if gl.float16 == DTYPE else 0x43004300
    ASM: gl.constexpr = UNPACK_FP16 if gl.float16 == DTYPE else UNPACK_BF16
    pairs = gl.convert_layout(zeros.to(gl.int32), gl.SliceLayout(2, words.type.layout)) * 65537 + MAGIC
    a, e, b, f, c, g, d, h = gl.inline_asm_elementwise(
        ASM, "=h,=h,=h,=h,=h,=h,=h,=h,r,r", [words, pairs[:, :, None]],
        dtype=EIGHT_FP16 if gl.float16 == DTYPE else EIGHT_BF16, is_pure=True, pack=1,
    )  # fmt: skip
    first = gl.join(gl.join(a, e), gl.join(b, f))
    second = gl.join(gl.join(c, g), gl.join(d, h))
    joined = gl.join(first, second)  # [f, n, w, 2 of a pair, 2 pairs, 2]
    F: gl.constexpr = words.shape[0]
    N: gl.constexpr = words.shape[1]
    W: gl.constexpr = words.shape[2]
    joined = joined.reshape([F, N, W // 4, 4, 2, 2, 2]).permute([0, 1, 2, 6, 5, 3, 4])
    return gl.convert_layout(joined.reshape([F, N, W * 8]), FIRST, assert_trivial=True)


@constexpr_function
def columns_layout(second: Any) -> Any:
    """The layout of [f, m, k] whose columns a thread has as `numbers_of` has codes, of one of operands [f, k, m]."""

    def moved(bases: Any) -> list[list[int]]:
        return [[fold, m, column_of(k)] for fold, k, m in bases]

    fold, k, m = second.shape
    return gl.DistributedLinearLayout(
        moved(second.reg_bases), moved(second.lane_bases), moved(second.warp_bases), [], [fold, m, k]
    )


@constexpr_function
def column_of(place: int) -> int:
    """The column that is at a place, of those of an operand."""
    return place // 32 * 32 + place % 8 // 2 * 8 + place % 2 * 4 + place % 32 // 16 * 2 + place % 16 // 8


@jit
def inputs_of(box, FIRST_LAYOUT: gl.constexpr, SECOND: gl.constexpr):
    """Columns of x as an operand [f, k, m], in the order of `numbers_of`; box [f, m, k] in shared memory."""
    F: gl.constexpr = box.shape[0]
    M: gl.constexpr = box.shape[1]
    K: gl.constexpr = box.shape[2]
    x = box.load(FIRST_LAYOUT).reshape([F, M, K // 32, 4, 2, 2, 2])  # 32 columns, thread, of a pair, 2, 2 pairs
    x = x.permute([0, 2, 5, 6, 3, 4, 1]).reshape([F, K, M])
    return gl.convert_layout(x, SECOND, assert_trivial=True)


@jit
def store_tile(acc, y_ptr, bias_ptr, tile, num_rows, size_out, TILING: gl.constexpr):
    """y of one tile's columns, with what is fused into it."""
    ROWS: gl.constexpr = TILING.rows
    WARPS: gl.constexpr = TILING.box_rows // 16
    sums = gl.sum(acc, axis=0)  # of all segments
    if TILING.parts == 2:
        HALVES: gl.constexpr = gl.BlockedLayout([2, 1, 1], [1, 32, 1], [1, 1, WARPS], [0, 1, 2])
        both = gl.convert_layout(sums.reshape([2, ROWS, TILING.pad]), HALVES)
        gate, up = gl.split(both.permute([1, 2, 0]))
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


@constexpr_function
def fours_layout(rows: Any) -> Any:
    """The layout of [f, n, 4] whose last dim a thread has itself, of that of [f, n]."""

    def moved(bases: Any) -> list[list[int]]:
        return [[*basis, 0] for basis in bases]

    return gl.DistributedLinearLayout(
        [[0, 0, 1], [0, 0, 2], *moved(rows.reg_bases)], moved(rows.lane_bases), moved(rows.warp_bases), [],
        [*rows.shape, 4],
    )  # fmt: skip


@jit
def four_of(fours, OF_ROWS: gl.constexpr):
    """[f, n, 4] as four [f, n]."""
    F: gl.constexpr = fours.shape[0]
    N: gl.constexpr = fours.shape[1]
    even, odd = gl.split(fours.reshape([F, N, 2, 2]))
    a, c = gl.split(even)
    b, d = gl.split(odd)
    return (
        gl.convert_layout(a, OF_ROWS, assert_trivial=True), gl.convert_layout(b, OF_ROWS, assert_trivial=True),
        gl.convert_layout(c, OF_ROWS, assert_trivial=True), gl.convert_layout(d, OF_ROWS, assert_trivial=True),
    )  # fmt: skip


@jit
def stage_scales(
    scales_ptr, zeros_ptr, i, first_tile, num_programs, num_steps, size_out, groups, OF_FOURS: gl.constexpr,
    TILING: gl.constexpr,
):  # fmt: skip
    """Scales and zero points of the groups of a program's i-th stage, [folds, parts * rows, 4] of each four groups.

    0 where there are none. Rows of both begin at multiples of 4 groups where TILING.has_fours.
    """
    FOURS: gl.constexpr = TILING.boxes * (BOX // TILING.group) // 4
    tile, step = first_tile + i // num_steps * num_programs, i % num_steps
    fold = gl.arange(0, TILING.folds, gl.SliceLayout(1, gl.SliceLayout(2, OF_FOURS)))[:, None, None]
    place = gl.arange(0, TILING.parts * TILING.rows, gl.SliceLayout(0, gl.SliceLayout(2, OF_FOURS)))[None, :, None]
    group = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(1, OF_FOURS)))[None, None, :]
    row, per_fold = tile * TILING.rows + place % TILING.rows, groups // TILING.folds
    of_part = place // TILING.rows * size_out + row
    if TILING.has_fours:
        first = (of_part * (groups // 4) + fold * (per_fold // 4)) * 4
    else:
        first = of_part * groups + fold * per_fold
    scales, zeros = (), ()
    for four in gl.static_range(FOURS):
        begin = (step * FOURS + four) * 4
        at = begin + group
        # All four are there or none where folds hold whole fours: so they are loaded at once.
        is_there = (row < size_out) & ((begin < per_fold) if TILING.has_fours else (at < per_fold))
        scales += (gl.load(scales_ptr + first + at, mask=is_there, other=0.0),)
        zeros += (gl.load(zeros_ptr + first + at, mask=is_there, other=0),)
    return scales, zeros


@jit(do_not_specialize=["num_rows", "size_out", "size_in"])
def hallmark_int4_skinny_matmul(
    w_desc, x_desc, y_ptr, bias_ptr, scales_ptr, zeros_ptr, num_rows, size_out, size_in, TILING: gl.constexpr
):
    """One program of a persistent grid. w_desc is [folds, parts, N, K / 8 / folds], x_desc [folds, M, K / folds].

    What a descriptor has no columns or rows for arrives as zeros. Weights, of the first rounds, are read before the
    wait for the kernel before this one; x is read, and y written, after it.
    """
    dtype: gl.constexpr = x_desc.dtype
    STAGES: gl.constexpr = TILING.stages
    BOXES: gl.constexpr = TILING.boxes
    ROWS: gl.constexpr = TILING.box_rows
    GROUP: gl.constexpr = TILING.group
    GROUPS: gl.constexpr = BOX // GROUP  # of a box
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
    BYTES: gl.constexpr = (ROWS // 2 + 2 * FOLDS * PAD) * BOXES * BOX
    w_smem = gl.allocate_shared_memory(gl.int32, [STAGES * BOXES, ROWS, WORDS], gl.NVMMASharedLayout(128, 32, rank=2))
    x_smem = gl.allocate_shared_memory(
        dtype,
        [STAGES * BOXES * GROUPS, FOLDS * PAD, GROUP],
        gl.NVMMASharedLayout(64 if GROUP == 32 else 128, 16, rank=2),
    )
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for s in gl.static_range(STAGES):
        mbarrier.init(full.index(s), count=1)
    launch_next_grid()

    first, num_programs = gl.program_id(0), gl.num_programs(0)
    groups = gl.cdiv(size_in, GROUP)
    num_steps = gl.cdiv(size_in // TILING.folds, BOXES * BOX)  # of a tile
    total = gl.cdiv(gl.cdiv(size_out, TILING.rows) - first, num_programs) * num_steps
    for s in gl.static_range(STAGES):
        if s < total:
            mbarrier.expect(full.index(s), BYTES)
            tile = first + s // num_steps * num_programs
            load_weights(w_desc, w_smem, full.index(s), s, tile, s % num_steps, TILING)
    wait_for_previous_grid()
    for s in gl.static_range(STAGES):
        if s < total:
            load_inputs(x_desc, x_smem, full.index(s), s, s % num_steps, TILING)

    load_tile = first + STAGES // num_steps * num_programs
    load_step = STAGES % num_steps
    tile = first
    step = 0
    acc = gl.zeros([FOLDS, PER_FOLD, PAD], gl.float32, ACC)
    # Two stages ahead: their scales come from memory too, and arrive no sooner than the weights.
    scales, zeros = stage_scales(
        scales_ptr, zeros_ptr, 0, first, num_programs, num_steps, size_out, groups, OF_FOURS, TILING
    )
    next_scales, next_zeros = stage_scales(
        scales_ptr, zeros_ptr, 1, first, num_programs, num_steps, size_out, groups, OF_FOURS, TILING
    )
    for i in range(total):
        slot = i % STAGES
        last_scales, last_zeros = stage_scales(
            scales_ptr, zeros_ptr, i + 2, first, num_programs, num_steps, size_out, groups, OF_FOURS, TILING
        )
        mbarrier.wait(full.index(slot), (i // STAGES) & 1)
        words, inputs = (), ()
        for c in gl.static_range(BOXES):
            words += (w_smem.index(slot * BOXES + c).reshape([FOLDS, PER_FOLD, WORDS]).load(OF_WORDS),)
        for g in gl.static_range(BOXES * GROUPS):
            box = x_smem.index(slot * BOXES * GROUPS + g).reshape([FOLDS, PAD, GROUP])
            inputs += (inputs_of(box, OF_INPUTS, SECOND),)
        if i + STAGES < total:
            gl.thread_barrier()  # every warp has read the slot
            mbarrier.expect(full.index(slot), BYTES)
            load_weights(w_desc, w_smem, full.index(slot), slot, load_tile, load_step, TILING)
            load_inputs(x_desc, x_smem, full.index(slot), slot, load_step, TILING)
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
                found = mma_v2(w, inputs[four * 4 + g], gl.zeros([FOLDS, PER_FOLD, PAD], gl.float32, ACC))
                acc += found * scales_of_four[g][:, :, None]
        scales, zeros = next_scales, next_zeros
        next_scales, next_zeros = last_scales, last_zeros
        step += 1
        if step == num_steps:
            store_tile(acc, y_ptr, bias_ptr, tile, num_rows, size_out, TILING)
            acc = gl.zeros([FOLDS, PER_FOLD, PAD], gl.float32, ACC)
            step = 0
            tile += num_programs


def launch_int4_skinny(
    x: Tensor, weight: Tensor, scales: Tensor, zeros: Tensor, bias: Tensor | None, y: Tensor, tiling: Int4SkinnyTiling
) -> None:
    """Fill y [M, N] with x [M, K] @ weight^T + bias, or with SwiGLU of both halves of that where tiling.parts is 2.

    x       [M, K] of 16 bits, 16-byte aligned
    weight  [parts * N, K / 2] uint8, rows contiguous, 16-byte aligned; y contiguous
    scales, zeros   [parts * N, K / group] fp32 and uint8
    """
    num_rows, size_in = x.shape
    size_out, segment = y.shape[1], size_in // tiling.folds
    if (scales.data_ptr() | zeros.data_ptr()) % 16:  # rows of a larger weight may begin anywhere
        tiling = replace(tiling, has_fours=False)
    kernel = launcher(tiling, x.dtype, y.dtype, x.device)
    words = size_in // 8
    w_map = (tiling.folds, tiling.parts, size_out, segment // 8), (segment // 8, size_out * words, words, 1)
    x_map = (tiling.folds, num_rows, segment), (segment, x.stride(0), 1)
    w_box, x_box = kernel.boxes
    num_programs = min(num_processors(x.device), -(-size_out // tiling.rows))
    arguments = (
        kernel.encode(weight.data_ptr(), *w_box, *w_map, 0), *w_map[0], *w_map[1],
        kernel.encode(x.data_ptr(), *x_box, *x_map, 0), *x_map[0], *x_map[1],
        y.data_ptr(), None if bias is None else bias.data_ptr(), scales.data_ptr(), zeros.data_ptr(),
        num_rows, size_out, size_in,
    )  # fmt: skip
    kernel((num_programs, 1, 1), arguments)


# A pure function of what is compiled in: the cache holds no state.
@lru_cache(maxsize=256)
def launcher(tiling: Int4SkinnyTiling, dtype: torch.dtype, dtype_out: torch.dtype, device: torch.device) -> Loaded:
    """`compiled_int4_skinny`, ready to launch past Triton's binder, which takes longer than a small matmul."""
    return Loaded(compiled_int4_skinny(tiling, dtype, dtype_out), device)


def compiled_int4_skinny(tiling: Int4SkinnyTiling, dtype: torch.dtype, dtype_out: torch.dtype) -> Any:
    """`hallmark_int4_skinny_matmul` of these dtypes for sm_90; no GPU is needed."""
    weights = [tiling.folds, tiling.parts, tiling.rows, _WORDS]
    inputs = [tiling.folds, tiling.pad, tiling.group]
    return hallmark_int4_skinny_matmul.warmup(
        any_map(torch.int32, weights), any_map(dtype, inputs), AnyTensor(dtype_out, 0), AnyTensor(dtype, 0),
        AnyTensor(torch.float32, 0 if tiling.has_fours else 4), AnyTensor(torch.uint8, 0 if tiling.has_fours else 1),
        1, 1, 1, tiling,
        grid=(1,), num_warps=tiling.box_rows // 16, launch_pdl=True,
    )  # fmt: skip


def any_map(dtype: torch.dtype, box: list[int]) -> TensorDescriptor:
    """Return a stand-in for every tensor map of this dtype and box: what Triton compiles in of one."""
    layout = gl.NVMMASharedLayout.get_default_for(box, _GLUON_DTYPES[dtype])
    return TensorDescriptor(AnyTensor(dtype, 0), [1] * len(box), [16] * (len(box) - 1) + [1], box, layout)
