"""The first grouped product of experts without a gate, and their activation; the second is every other mixture's."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
# The signatures of jitted functions are Triton's: only their constexpr parameters are annotated.

import triton
import triton.language as tl

from kernels.experts.portable.products import row_step, tile_of_program, weight_step


@triton.jit(do_not_specialize=["num_active", "num_tiles"])
def hallmark_experts_up(
    x_ptr, w_ptr, inner_ptr, order_ptr, tiles_ptr, num_active, num_tiles, stride_x, hidden, width,
    EVEN_K: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """One program: BLOCK_M rows, gathered from the tokens x, by BLOCK_N columns of max(up, 0)^2.

    w [E, width, hidden], inner [slots, width] in the order of rows. Surplus programs leave at once.
    """
    m, n = tile_of_program(width, num_tiles, BLOCK_N)
    expert = tl.load(tiles_ptr + m * 3).to(tl.int64)
    if expert < 0:
        return
    rows = tl.load(tiles_ptr + m * 3 + 1) + tl.arange(0, BLOCK_M)
    is_row = rows < tl.load(tiles_ptr + m * 3 + 2)
    tokens = (tl.load(order_ptr + rows, mask=is_row, other=0) // num_active).to(tl.int64)
    columns = n * BLOCK_N + tl.arange(0, BLOCK_N)
    is_column = columns < width
    w_rows = expert * width + columns
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    up = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for first in range(0, hidden, BLOCK_K):
        x = row_step(x_ptr, tokens, is_row, stride_x, first, hidden, EVEN_K, BLOCK_K)
        w = weight_step(w_ptr, None, w_rows, is_column, first, hidden, dtype, False, EVEN_K, BLOCK_N, BLOCK_K)
        up = tl.dot(x, w, up, input_precision="ieee")
    up = tl.where(up < 0, 0.0, up)  # NaN stays
    at = inner_ptr + rows[:, None].to(tl.int64) * width + columns[None, :]
    tl.store(at, (up * up).to(dtype), mask=is_row[:, None] & is_column[None, :])
