"""The sm_90 kernel of `int4_wide_path.py`: many rows times a weight of 4 bits, by wgmma.

One persistent program per multiprocessor, in roles:

  consumers  4 warps each  64 rows each of a tile of 128 rows of the weight, times 128 rows of x
  producer   4 warps       copies codes and x by TMA into a ring, ahead of the consumers

A consumer widens its codes tile by tile: less their zero points, small whole numbers that are exact in 16 bits, in
registers, from which wgmma takes its first operand. A group's sums are multiplied by its scale and added up in fp32,
while the other consumer's are multiplied. For SwiGLU a tile holds 8 rows of the gate, the same rows of the up
projection, and so on: a thread's accumulators hold both.

Written in Gluon for Triton 3.6.0.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
# mypy: disable-error-code="assignment, misc, var-annotated"
# The signatures of jitted functions are Triton's: only their constexpr parameters are annotated; their tuples grow.

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from triton.experimental.gluon import jit
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma, warpgroup_mma_wait
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from kernels.calls.launch import Loaded
from kernels.calls.processors import num_processors
from kernels.hopper.pipeline import hardware_arrive, hardware_sync
from kernels.linear.hopper.skinny import launch_next_grid, wait_for_previous_grid
from kernels.tma.pointers import AnyTensor

_ROWS, _INPUTS, _STEP = 128, 128, 128  # rows of the weight and of x in a tile, columns of a stage
ROWS, INPUTS, STEP = gl.constexpr(_ROWS), gl.constexpr(_INPUTS), gl.constexpr(_STEP)
THREADS = gl.constexpr(3 * 128)  # of the consumers and the producer
FREE = gl.constexpr(9)  # hardware barriers from 9 on: stages given back; Triton 3.6 uses 0, 1 and one a partition
NEIGHBOURS = gl.constexpr(16)  # tiles of x that are multiplied one behind the other with the same weights
_GLUON_DTYPES = {torch.float16: gl.float16, torch.bfloat16: gl.bfloat16, torch.uint8: gl.uint8}


@dataclass(frozen=True, slots=True)
class Int4WideTiling:
    """The compiled constants of `hallmark_int4_wide_matmul`.

    parts   2 where the weight is a gate and an up projection, and y is SwiGLU of them
    group   columns that share a scale and a zero point
    stages  of the ring, 40 KB each: 7 at most, each of which has a hardware barrier
    """

    parts: int
    group: int
    has_bias: bool
    stages: int = 5


def _unpacking(magic: int, difference: str) -> Any:
    """Return code that makes both codes of a byte, less zero points, of the byte and of those twice."""
    return gl.constexpr(
        "{ .reg .b32 a;\n"
        f"mad.lo.u32 a, $2, 4097, 0;\nlop3.b32 a, a, 0x000F000F, {magic:#x}, 0xEA;\n{difference} a, a, $3;\n"
        "mov.b32 {$0, $1}, a; }"
    )


UNPACK_BF16, UNPACK_FP16 = _unpacking(0x43004300, "sub.rn.bf16x2"), _unpacking(0x64006400, "sub.rn.f16x2")
TWO_BF16, TWO_FP16 = gl.constexpr((gl.bfloat16,) * 2), gl.constexpr((gl.float16,) * 2)


@jit
def numbers_of(codes, zeros, DTYPE: gl.constexpr, FIRST: gl.constexpr):
    """Codes less zero points [n, 2 * b], an operand; codes [n, b] of two each, zeros [n], both uint8."""
    MAGIC: gl.constexpr = 0x64006400 if gl.float16 == DTYPE else 0x43004300
    ASM: gl.constexpr = UNPACK_FP16 if gl.float16 == DTYPE else UNPACK_BF16
    pairs = gl.convert_layout(zeros.to(gl.int32), gl.SliceLayout(1, codes.type.layout)) * 65537 + MAGIC
    low, high = gl.inline_asm_elementwise(
        ASM, "=h,=h,r,r", [codes.to(gl.int32), pairs[:, None]],
        dtype=TWO_FP16 if gl.float16 == DTYPE else TWO_BF16, is_pure=True, pack=1,
    )  # fmt: skip
    N: gl.constexpr = codes.shape[0]
    B: gl.constexpr = codes.shape[1]
    return gl.convert_layout(gl.join(low, high).reshape([N, 2 * B]), FIRST, assert_trivial=True)


@jit
def place_of(tile, num_m, num_n):
    """(tile of x, tile of the weight): the former varies fastest, so that weights stay in L2."""
    first = tile // (NEIGHBOURS * num_n) * NEIGHBOURS
    height = gl.minimum(num_m - first, NEIGHBOURS)
    within = tile % (NEIGHBOURS * num_n)
    return first + within % height, within // height


@jit
def first_row(m, num_rows):
    """The first row of x of a tile; the last one begins within the one before: TMA takes longer for rows x lacks."""
    return gl.minimum(m * INPUTS, gl.maximum(num_rows - INPUTS, 0))


@jit
def produce(w_desc, x_desc, num_rows, num_m, num_n, size_in, smem, TILING: gl.constexpr):
    """Fill the ring for one tile after the other."""
    STAGES: gl.constexpr = TILING.stages
    GROUP: gl.constexpr = TILING.group
    GROUPS: gl.constexpr = STEP // GROUP
    w_smem, x_smem, full = smem
    num_steps = gl.cdiv(size_in, STEP)
    fill = 0
    for tile in range(gl.program_id(0), num_m * num_n, gl.num_programs(0)):
        m, n = place_of(tile, num_m, num_n)
        for step in range(num_steps):
            stage = fill % STAGES
            if fill >= STAGES:
                hardware_sync(FREE + stage, THREADS)
            bar = full.index(stage)
            mbarrier.expect(bar, (ROWS // 2 + INPUTS * 2) * STEP)
            for g in gl.static_range(GROUPS):
                box = w_smem.index(stage * GROUPS + g)
                column = (step * GROUPS + g) * (GROUP // 2)
                if TILING.parts == 2:
                    to = box.reshape([ROWS // 16, 2, 8, GROUP // 2])
                    tma.async_copy_global_to_shared(w_desc, [n * (ROWS // 16), 0, 0, column], bar, to)
                else:
                    tma.async_copy_global_to_shared(w_desc, [n * ROWS, column], bar, box)
                at = [first_row(m, num_rows), (step * GROUPS + g) * GROUP]
                tma.async_copy_global_to_shared(x_desc, at, bar, x_smem.index(stage * GROUPS + g))
            fill += 1
    for i in range(gl.maximum(fill - STAGES, 0), fill):  # no arrival stays behind
        hardware_sync(FREE + i % STAGES, THREADS)


@jit
def group_scales(scales_ptr, zeros_ptr, first, is_row, step, groups, TILING: gl.constexpr):
    """Scales and zero points of each group of a stage, of the rows whose own begin at `first`; 0 where none are."""
    GROUPS: gl.constexpr = STEP // TILING.group
    scales, zeros = (), ()
    for g in gl.static_range(GROUPS):
        group = step * GROUPS + g
        scales += (gl.load(scales_ptr + first + group, mask=is_row & (group < groups), other=0.0),)
        zeros += (gl.load(zeros_ptr + first + group, mask=is_row & (group < groups), other=0),)
    return scales, zeros


@jit
def consume(
    W: gl.constexpr, y_ptr, bias_ptr, scales_ptr, zeros_ptr, num_rows, size_out, size_in, num_m, num_n, smem,
    TILING: gl.constexpr,
):  # fmt: skip
    """One consumer: 64 rows of the weight of every tile of this program."""
    STAGES: gl.constexpr = TILING.stages
    GROUP: gl.constexpr = TILING.group
    GROUPS: gl.constexpr = STEP // GROUP
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, INPUTS, 16])
    FIRST: gl.constexpr = gl.DotOperandLayout(0, ACC, 2)
    OF_CODES: gl.constexpr = gl.DotOperandLayout(0, ACC, 1)
    w_smem, x_smem, full = smem
    dtype: gl.constexpr = x_smem.dtype
    num_steps, groups = gl.cdiv(size_in, STEP), gl.cdiv(size_in, GROUP)
    OUT: gl.constexpr = 64 // TILING.parts
    place = W * 64 + gl.arange(0, 64, gl.SliceLayout(1, ACC))
    fill = 0
    for tile in range(gl.program_id(0), num_m * num_n, gl.num_programs(0)):
        m, n = place_of(tile, num_m, num_n)
        if TILING.parts == 2:
            row = n * (ROWS // 2) + place // 16 * 8 + place % 8
            first = (place // 8 % 2 * size_out + row) * groups
        else:
            row = n * ROWS + place
            first = row * groups
        is_row = row < size_out
        scales, zeros = group_scales(scales_ptr, zeros_ptr, first, is_row, 0, groups, TILING)
        acc = gl.zeros([64, INPUTS], gl.float32, ACC)
        for step in range(num_steps):
            stage = fill % STAGES
            next_scales, next_zeros = group_scales(scales_ptr, zeros_ptr, first, is_row, step + 1, groups, TILING)
            mbarrier.wait(full.index(stage), (fill // STAGES) & 1)
            for g in gl.static_range(GROUPS):
                codes = w_smem.index(stage * GROUPS + g).slice(W * 64, 64, dim=0).load(OF_CODES)
                w = numbers_of(codes, zeros[g], dtype, FIRST)
                x = x_smem.index(stage * GROUPS + g).permute((1, 0))
                found = warpgroup_mma(w, x, gl.zeros([64, INPUTS], gl.float32, ACC), use_acc=False, is_async=True)
                acc += warpgroup_mma_wait(0, deps=[found]) * scales[g][:, None]
            hardware_arrive(FREE + stage, THREADS)
            scales, zeros = next_scales, next_zeros
            fill += 1
        if TILING.parts == 2:
            gate, up = gl.split(acc.reshape([4, 2, 8, INPUTS]).permute([0, 2, 3, 1]))
            decay = gl.exp(-gl.abs(gate))  # never overflows
            out = (gate * (gl.where(gate >= 0, 1.0, decay) / (1.0 + decay)) * up).reshape([OUT, INPUTS])
        else:
            out = acc
        begin = n * (ROWS // TILING.parts) + W * OUT
        if TILING.has_bias:
            column = begin + gl.arange(0, OUT, gl.SliceLayout(1, out.type.layout))
            out += gl.load(bias_ptr + column, mask=column < size_out, other=0.0).to(gl.float32)[:, None]
        STORED: gl.constexpr = gl.BlockedLayout([8, 1], [OUT // 8, 256 // OUT], [1, 4], [0, 1])
        out = gl.convert_layout(out.to(y_ptr.dtype.element_ty), STORED)
        column = begin + gl.arange(0, OUT, gl.SliceLayout(1, STORED))[:, None]
        at_row = first_row(m, num_rows) + gl.arange(0, INPUTS, gl.SliceLayout(0, STORED))[None, :]
        at = y_ptr + at_row.to(gl.int64) * size_out + column
        gl.store(at, out, mask=(at_row < num_rows) & (column < size_out))


@jit(do_not_specialize=["num_rows", "size_out_8", "size_in", "num_m", "num_n"])
def hallmark_int4_wide_matmul(
    w_desc, x_desc, y_ptr, bias_ptr, scales_ptr, zeros_ptr, num_rows, size_out_8, size_in, num_m, num_n,
    TILING: gl.constexpr,
):  # fmt: skip
    """One program. w_desc is [N, K / 2] or [N / 8, 2, 8, K / 2], x_desc [M, K]; N is 8 * size_out_8."""
    STAGES: gl.constexpr = TILING.stages
    GROUP: gl.constexpr = TILING.group
    GROUPS: gl.constexpr = STEP // GROUP
    size_out = size_out_8 * 8
    w_smem = gl.allocate_shared_memory(
        gl.uint8, [STAGES * GROUPS, ROWS, GROUP // 2], gl.NVMMASharedLayout(GROUP // 2 if GROUP > 32 else 0, 8, rank=2)
    )
    x_smem = gl.allocate_shared_memory(
        x_desc.dtype, [STAGES * GROUPS, INPUTS, GROUP],
        gl.NVMMASharedLayout(64 if GROUP == 32 else 128, 16, rank=2),
    )  # fmt: skip
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for s in gl.static_range(STAGES):
        mbarrier.init(full.index(s), count=1)
    smem = (w_smem, x_smem, full)
    wait_for_previous_grid()
    launch_next_grid()
    gl.warp_specialize([
        (consume, (0, y_ptr, bias_ptr, scales_ptr, zeros_ptr, num_rows, size_out, size_in, num_m, num_n, smem, TILING)),
        (consume, (1, y_ptr, bias_ptr, scales_ptr, zeros_ptr, num_rows, size_out, size_in, num_m, num_n, smem, TILING)),
        (produce, (w_desc, x_desc, num_rows, num_m, num_n, size_in, smem, TILING)),
    ], [4, 4], [232, 40])  # fmt: skip


def launch_int4_wide(
    x: Tensor, weight: Tensor, scales: Tensor, zeros: Tensor, bias: Tensor | None, y: Tensor, tiling: Int4WideTiling
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
    x_map = (num_rows, size_in), (x.stride(0), 1)
    w_box, x_box = kernel.boxes
    num_m, num_n = -(-num_rows // _INPUTS), -(-size_out * tiling.parts // _ROWS)
    arguments = (
        kernel.encode(weight.data_ptr(), *w_box, *w_map, 0), *w_map[0], *w_map[1],
        kernel.encode(x.data_ptr(), *x_box, *x_map, 0), *x_map[0], *x_map[1],
        y.data_ptr(), None if bias is None else bias.data_ptr(), scales.data_ptr(), zeros.data_ptr(),
        num_rows, size_out // 8, size_in, num_m, num_n,
    )  # fmt: skip
    kernel((min(num_processors(x.device), num_m * num_n), 1, 1), arguments)


# A pure function of what is compiled in: the cache holds no state.
@lru_cache(maxsize=256)
def launcher(tiling: Int4WideTiling, dtype: torch.dtype, dtype_out: torch.dtype, device: torch.device) -> Loaded:
    """`compiled_int4_wide`, ready to launch past Triton's binder."""
    return Loaded(compiled_int4_wide(tiling, dtype, dtype_out), device)


def compiled_int4_wide(tiling: Int4WideTiling, dtype: torch.dtype, dtype_out: torch.dtype) -> Any:
    """`hallmark_int4_wide_matmul` of these dtypes for sm_90; no GPU is needed."""
    half = tiling.group // 2
    weights = [_ROWS // 16, 2, 8, half] if tiling.parts == 2 else [_ROWS, half]
    swizzle = half if tiling.group > 32 else 0
    return hallmark_int4_wide_matmul.warmup(
        any_map(torch.uint8, weights, swizzle), any_map(dtype, [_INPUTS, tiling.group], min(128, 2 * tiling.group)),
        AnyTensor(dtype_out, 0), AnyTensor(dtype, 0), AnyTensor(torch.float32, 4), AnyTensor(torch.uint8, 1),
        1, 1, 1, 1, 1, tiling, grid=(1,), num_warps=4, launch_pdl=True,
    )  # fmt: skip


def any_map(dtype: torch.dtype, box: list[int], swizzle: int) -> TensorDescriptor:
    """Return a stand-in for every tensor map of this dtype and box: what Triton compiles in of one."""
    layout = gl.NVMMASharedLayout(swizzle, 8 * dtype.itemsize, rank=len(box))
    return TensorDescriptor(AnyTensor(dtype, 0), [1] * len(box), [16] * (len(box) - 1) + [1], box, layout)
