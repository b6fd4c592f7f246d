"""Grouped products of experts in 8 or 4 bits, in Triton: tiles of rows that visit one expert, times its weights.

Weights are the first operand, as in `kernels/linear/portable`: codes of 8 bits become fp16, or are multiplied as they
are where a tile has many rows; codes of 4 bits are scaled by the sums of their groups.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
# The signatures of jitted functions are Triton's: only their constexpr parameters are annotated.

import triton
import triton.language as tl

from kernels.experts.portable.products import activated, tile_of_program
from kernels.linear.portable.fp8_inputs import RUN
from kernels.linear.portable.fp8_matmul import scales_at, summed


@triton.jit
def inputs_at(x_ptr, rows, is_row, stride_x, first, size_in, EVEN_K: tl.constexpr, BLOCK_K: tl.constexpr):
    """Columns [first, first + BLOCK_K) of some rows of x, transposed: [BLOCK_K, rows]; 0 past the last and beside."""
    columns = first + tl.arange(0, BLOCK_K)
    is_inside = is_row[None, :] if EVEN_K else is_row[None, :] & (columns < size_in)[:, None]
    return tl.load(x_ptr + rows[None, :] * stride_x + columns[:, None], mask=is_inside, other=0.0)


@triton.jit
def sums_of_group(
    x, w_ptr, scales_ptr, zeros_ptr, rows, is_row, first, pairs, groups,
    GROUP: tl.constexpr, EVEN_K: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """`group_sums` of kernels/linear/portable/int4_matmul.py, codes to numbers of 16 bits by their bits.

    128 + code in bf16, and 1024 + code in fp16, are the code below those numbers' own bits; less 128 or 1024 and the
    zero point they are exact: no conversion of integers, of which a multiprocessor does 16 in a clock.
    """
    bytes_in = first // 2 + tl.arange(0, GROUP // 2)
    is_inside = is_row[:, None] if EVEN_K else is_row[:, None] & (bytes_in < pairs)[None, :]
    packed = tl.load(w_ptr + rows[:, None].to(tl.int64) * pairs + bytes_in[None, :], mask=is_inside, other=0)
    codes = tl.reshape(tl.join(packed & 15, packed >> 4), [BLOCK_N, GROUP])
    at = rows.to(tl.int64) * groups + first // GROUP
    zeros = tl.load(zeros_ptr + at, mask=is_row, other=0)
    scales = tl.load(scales_ptr + at, mask=is_row, other=0.0)
    if x.dtype == tl.float32:
        numbers = (codes.to(tl.int8) - zeros.to(tl.int8)[:, None]).to(tl.float32)
    else:
        BASE: tl.constexpr = 0x4300 if x.dtype == tl.bfloat16 else 0x6400
        numbers = (codes.to(tl.int16) | BASE).to(x.dtype, bitcast=True)
        numbers -= (zeros.to(tl.int16) + BASE).to(x.dtype, bitcast=True)[:, None]
    return tl.dot(numbers, x, input_precision="ieee") * scales[:, None]


@triton.jit
def more_sums(
    sums, x, x_scales, w_ptr, scales_ptr, zeros_ptr, w_rows, is_w, first, size_in, size_of_row,
    KIND: tl.constexpr, AS_HALF: tl.constexpr, EVEN_K: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Sums [BLOCK_N, m] and the products of one step of columns.

    x_scales     [m], of blocks
    size_of_row  of the weight: its blocks, or its groups
    """
    if KIND == "int4":
        pairs = (size_in + 1) // 2
        if EVEN_K:  # whole groups of 32 or more: else bytes would be read one by one
            pairs = tl.multiple_of(pairs, 16)
        found = sums + sums_of_group(
            x, w_ptr, scales_ptr, zeros_ptr, w_rows, is_w, first, pairs, size_of_row, BLOCK_K, EVEN_K, BLOCK_N
        )
    else:
        columns = first + tl.arange(0, BLOCK_K)
        is_inside = is_w[:, None] if EVEN_K else is_w[:, None] & (columns < size_in)[None, :]
        w = tl.load(w_ptr + w_rows[:, None] * size_in + columns[None, :], mask=is_inside, other=0.0)
        if KIND == "rows":
            found = summed(w, x, sums, AS_HALF, True)
        else:
            scales = scales_at(scales_ptr, w_rows, is_w, first, size_of_row)
            found = sums + summed(w, x, sums, AS_HALF, False) * (scales[:, None] * x_scales[None, :])
    return found


@triton.jit(do_not_specialize=["num_tiles", "num_tokens"])
def hallmark_experts_few_bits_gate_up(
    x_ptr, x_scales_ptr, w_ptr, scales_ptr, zeros_ptr, inner_ptr, order_ptr, tiles_ptr,
    num_active, num_tiles, num_tokens, stride_x, hidden, columns, size_of_row, width, limit, alpha,
    ACTIVATION: tl.constexpr, KIND: tl.constexpr, AS_HALF: tl.constexpr, EVEN_K: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """One program: BLOCK_M rows by BLOCK_N columns of activation(gate) * up. Surplus programs leave at once.

    x [T, columns] and x_scales as `RoundedInputs`, or x [T, hidden]; w of [E * 2 * width, hidden]; inner [slots, width]
    """
    m, n = tile_of_program(width, num_tiles, BLOCK_N)
    expert = tl.load(tiles_ptr + m * 3).to(tl.int64)
    if expert < 0:
        return
    rows = tl.load(tiles_ptr + m * 3 + 1) + tl.arange(0, BLOCK_M)
    is_row = rows < tl.load(tiles_ptr + m * 3 + 2)
    tokens = (tl.load(order_ptr + rows, mask=is_row, other=0) // num_active).to(tl.int64)
    inner_columns = n * BLOCK_N + tl.arange(0, BLOCK_N)
    is_w = inner_columns < width
    gate_rows = expert * 2 * width + inner_columns
    up_rows = gate_rows + width
    gate = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    up = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    x_scales = tl.zeros([BLOCK_M], tl.float32)
    for first in range(0, columns, BLOCK_K):
        x = inputs_at(x_ptr, tokens, is_row, stride_x, first, columns, EVEN_K, BLOCK_K)
        if KIND == "blocks":
            x_scales = tl.load(x_scales_ptr + first // RUN * num_tokens + tokens, mask=is_row, other=0.0)
        gate = more_sums(
            gate, x, x_scales, w_ptr, scales_ptr, zeros_ptr, gate_rows, is_w, first, hidden, size_of_row,
            KIND, AS_HALF, EVEN_K, BLOCK_N, BLOCK_K,
        )  # fmt: skip
        up = more_sums(
            up, x, x_scales, w_ptr, scales_ptr, zeros_ptr, up_rows, is_w, first, hidden, size_of_row,
            KIND, AS_HALF, EVEN_K, BLOCK_N, BLOCK_K,
        )  # fmt: skip
    if KIND == "rows":
        x_scales = tl.load(x_scales_ptr + tokens, mask=is_row, other=0.0)
        gate *= tl.load(scales_ptr + gate_rows, mask=is_w, other=0.0)[:, None] * x_scales[None, :]
        up *= tl.load(scales_ptr + up_rows, mask=is_w, other=0.0)[:, None] * x_scales[None, :]
    inner = activated(gate, up, limit, alpha, ACTIVATION)
    at = inner_ptr + rows[None, :].to(tl.int64) * width + inner_columns[:, None]
    tl.store(at, inner.to(inner_ptr.dtype.element_ty), mask=is_w[:, None] & is_row[None, :])


@triton.jit(do_not_specialize=["num_tiles", "num_slots"])
def hallmark_experts_few_bits_down(
    x_ptr, x_scales_ptr, w_ptr, scales_ptr, zeros_ptr, results_ptr, order_ptr, tiles_ptr,
    num_tiles, num_slots, stride_x, width, columns, size_of_row, hidden,
    KIND: tl.constexpr, AS_HALF: tl.constexpr, EVEN_K: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """One program: BLOCK_M rows by BLOCK_N columns of the result, stored at the rows' slots.

    x [slots, columns] and x_scales as `RoundedInputs`, or x [slots, width]; w of [E * hidden, width]
    """
    m, n = tile_of_program(hidden, num_tiles, BLOCK_N)
    expert = tl.load(tiles_ptr + m * 3).to(tl.int64)
    if expert < 0:
        return
    rows = (tl.load(tiles_ptr + m * 3 + 1) + tl.arange(0, BLOCK_M)).to(tl.int64)
    is_row = rows < tl.load(tiles_ptr + m * 3 + 2)
    slots = tl.load(order_ptr + rows, mask=is_row, other=0).to(tl.int64)
    out_columns = n * BLOCK_N + tl.arange(0, BLOCK_N)
    is_w = out_columns < hidden
    w_rows = expert * hidden + out_columns
    sums = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    x_scales = tl.zeros([BLOCK_M], tl.float32)
    for first in range(0, columns, BLOCK_K):
        x = inputs_at(x_ptr, rows, is_row, stride_x, first, columns, EVEN_K, BLOCK_K)
        if KIND == "blocks":
            x_scales = tl.load(x_scales_ptr + first // RUN * num_slots + rows, mask=is_row, other=0.0)
        sums = more_sums(
            sums, x, x_scales, w_ptr, scales_ptr, zeros_ptr, w_rows, is_w, first, width, size_of_row,
            KIND, AS_HALF, EVEN_K, BLOCK_N, BLOCK_K,
        )  # fmt: skip
    if KIND == "rows":
        x_scales = tl.load(x_scales_ptr + rows, mask=is_row, other=0.0)
        sums *= tl.load(scales_ptr + w_rows, mask=is_w, other=0.0)[:, None] * x_scales[None, :]
    at = results_ptr + slots[None, :] * hidden + out_columns[:, None]
    tl.store(at, sums.to(results_ptr.dtype.element_ty), mask=is_w[:, None] & is_row[None, :])
