"""Products of rounded inputs with weights of 8 bits in Triton.

Weights are the first operand, so that a few rows of x are the narrow one. Up to 64 rows memory is what bounds a
product: codes become fp16, in which they are exact, and are summed as 16-bit products are. Of more rows the matrix
units multiply codes; what they sum to less than fp32 ends after 128 columns, and is added up in fp32.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
# The signatures of jitted functions are Triton's: only their constexpr parameters are annotated.

import triton
import triton.language as tl

from kernels.linear.portable.fp8_inputs import RUN
from kernels.linear.portable.program import silu_times, tile_of


@triton.jit
def summed(w, x, sums, AS_HALF: tl.constexpr, IS_WHOLE: tl.constexpr):
    """Sums [n, m] and the products of codes w [n, k] and x [k, m]: IS_WHOLE where k columns are not scaled apart."""
    if AS_HALF:
        w, x = w.to(tl.float16), x.to(tl.float16)
        return tl.dot(w, x, sums) if IS_WHOLE else tl.dot(w, x)
    found = tl.dot(w, x)
    return sums + found if IS_WHOLE else found


@triton.jit
def scales_at(scales_ptr, rows, is_row, first, runs):
    """Scales of the blocks of 128 x 128 that hold the rows' columns from `first` on; a row of them is `runs` long."""
    return tl.load(scales_ptr + rows // RUN * runs + first // RUN, mask=is_row, other=0.0)


@triton.jit(do_not_specialize=["num_rows"])
def hallmark_fp8_matmul(
    x_ptr, x_scales_ptr, w_ptr, w_scales_ptr, bias_ptr, y_ptr, num_rows, size_out, size_in, columns,
    IN_BLOCKS: tl.constexpr, IS_STATIC: tl.constexpr, PARTS: tl.constexpr, HAS_BIAS: tl.constexpr,
    AS_HALF: tl.constexpr, EVEN_K: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """One program: BLOCK_N columns of y [rows, size_out], of BLOCK_M rows.

    x [rows, columns] codes, zeros from size_in on; x_scales [1, rows], [1] or [columns / 128, rows]
    w [PARTS * size_out, size_in] codes; w_scales [PARTS * size_out, 1], or [their 128s, columns / 128]
    """
    n, m = tile_of(tl.program_id(0), size_out, num_rows, BLOCK_N, BLOCK_M)
    w_rows = n * BLOCK_N + tl.arange(0, BLOCK_N)
    rows = m * BLOCK_M + tl.arange(0, BLOCK_M)
    is_w, is_row = w_rows < size_out, rows < num_rows
    inner = tl.arange(0, BLOCK_K)
    x_at = x_ptr + rows[None, :].to(tl.int64) * columns + inner[:, None]
    w_at = w_ptr + w_rows[:, None].to(tl.int64) * size_in + inner[None, :]
    up_rows = w_rows + size_out
    up_at = w_ptr + up_rows[:, None].to(tl.int64) * size_in + inner[None, :]
    runs = columns // RUN
    sums = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    ups = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    for first in range(0, columns, BLOCK_K):
        x = tl.load(x_at + first, mask=is_row[None, :], other=0.0)
        is_inside = is_w[:, None] if EVEN_K else is_w[:, None] & (first + inner < size_in)[None, :]
        w = tl.load(w_at + first, mask=is_inside, other=0.0)
        if IN_BLOCKS:
            x_scales = tl.load(x_scales_ptr + first // RUN * num_rows + rows, mask=is_row, other=0.0)[None, :]
            scales = scales_at(w_scales_ptr, w_rows, is_w, first, runs)[:, None]
            sums += summed(w, x, sums, AS_HALF, False) * (scales * x_scales)
        else:
            sums = summed(w, x, sums, AS_HALF, True)
        if PARTS == 2:
            w = tl.load(up_at + first, mask=is_inside, other=0.0)
            if IN_BLOCKS:
                scales = scales_at(w_scales_ptr, up_rows, is_w, first, runs)[:, None]
                ups += summed(w, x, ups, AS_HALF, False) * (scales * x_scales)
            else:
                ups = summed(w, x, ups, AS_HALF, True)
    if not IN_BLOCKS:
        x_scales = tl.load(x_scales_ptr) if IS_STATIC else tl.load(x_scales_ptr + rows, mask=is_row, other=0.0)[None, :]
        sums = sums * tl.load(w_scales_ptr + w_rows, mask=is_w, other=0.0)[:, None] * x_scales
        if PARTS == 2:
            ups = ups * tl.load(w_scales_ptr + up_rows, mask=is_w, other=0.0)[:, None] * x_scales
    if PARTS == 2:
        sums = silu_times(sums, ups)
    if HAS_BIAS:
        sums += tl.load(bias_ptr + w_rows, mask=is_w, other=0.0).to(tl.float32)[:, None]
    y_at = y_ptr + rows[None, :].to(tl.int64) * size_out + w_rows[:, None]
    tl.store(y_at, sums.to(y_ptr.dtype.element_ty), mask=is_w[:, None] & is_row[None, :])
