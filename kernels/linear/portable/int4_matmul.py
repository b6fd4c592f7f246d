"""Products with weights of 4 bits in Triton: codes less zero points times inputs, a group's sums by its scale.

A code less its zero point is a small whole number, exact in 16 bits, so that a product of 16 bits has it as it is; the
scale is applied to the sums of a group, in fp32. Nothing is rounded that a product of 16 bits does not round.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
# The signatures of jitted functions are Triton's: only their constexpr parameters are annotated.

import triton
import triton.language as tl

from kernels.linear.portable.program import silu_times, tile_of


@triton.jit
def group_sums(
    x, w_ptr, scales_ptr, zeros_ptr, rows, is_row, first, pairs, groups,
    GROUP: tl.constexpr, EVEN_K: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Products of weight rows, of one group of columns from `first` on, and x [GROUP, m]: [BLOCK_N, m] fp32.

    w [*, pairs] uint8, two codes each, the lower bits first; scales fp32 and zeros uint8 [*, groups]
    """
    bytes_in = first // 2 + tl.arange(0, GROUP // 2)
    is_inside = is_row[:, None] if EVEN_K else is_row[:, None] & (bytes_in < pairs)[None, :]
    packed = tl.load(w_ptr + rows[:, None].to(tl.int64) * pairs + bytes_in[None, :], mask=is_inside, other=0)
    codes = tl.reshape(tl.join(packed & 15, packed >> 4), [BLOCK_N, GROUP])
    at = rows.to(tl.int64) * groups + first // GROUP
    zeros = tl.load(zeros_ptr + at, mask=is_row, other=0)
    scales = tl.load(scales_ptr + at, mask=is_row, other=0.0)
    numbers = (codes.to(tl.int8) - zeros.to(tl.int8)[:, None]).to(x.dtype)
    return tl.dot(numbers, x, input_precision="ieee") * scales[:, None]


@triton.jit(do_not_specialize=["num_rows"])
def hallmark_int4_matmul(
    x_ptr, w_ptr, scales_ptr, zeros_ptr, bias_ptr, y_ptr, num_rows, size_out, size_in, stride_x, pairs, groups,
    PARTS: tl.constexpr, HAS_BIAS: tl.constexpr, EVEN_K: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """One program: BLOCK_N columns of y [rows, size_out], of BLOCK_M rows. What `group_sums` says of the weight."""
    n, m = tile_of(tl.program_id(0), size_out, num_rows, BLOCK_N, BLOCK_M)
    w_rows = n * BLOCK_N + tl.arange(0, BLOCK_N)
    rows = m * BLOCK_M + tl.arange(0, BLOCK_M)
    is_w, is_row = w_rows < size_out, rows < num_rows
    inner = tl.arange(0, GROUP)
    x_at = x_ptr + rows[None, :].to(tl.int64) * stride_x + inner[:, None]
    up_rows = w_rows + size_out
    sums = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    ups = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    for first in range(0, size_in, GROUP):
        is_inside = is_row[None, :] if EVEN_K else is_row[None, :] & (first + inner < size_in)[:, None]
        x = tl.load(x_at + first, mask=is_inside, other=0.0)
        sums += group_sums(x, w_ptr, scales_ptr, zeros_ptr, w_rows, is_w, first, pairs, groups, GROUP, EVEN_K, BLOCK_N)
        if PARTS == 2:
            ups += group_sums(
                x, w_ptr, scales_ptr, zeros_ptr, up_rows, is_w, first, pairs, groups, GROUP, EVEN_K, BLOCK_N
            )
    if PARTS == 2:
        sums = silu_times(sums, ups)
    if HAS_BIAS:
        sums += tl.load(bias_ptr + w_rows, mask=is_w, other=0.0).to(tl.float32)[:, None]
    y_at = y_ptr + rows[None, :].to(tl.int64) * size_out + w_rows[:, None]
    tl.store(y_at, sums.to(y_ptr.dtype.element_ty), mask=is_w[:, None] & is_row[None, :])
