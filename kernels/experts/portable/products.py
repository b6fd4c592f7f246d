"""Grouped products of a mixture of experts: tiles of rows that visit one expert, times that expert's weights.

A row's products are summed step by step over the inner dim in a fixed order, whatever rows share its tile.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
# The signatures of jitted functions are Triton's: only their constexpr parameters are annotated.

import triton
import triton.language as tl

from kernels.experts.portable.codes import factors_of, unpacked
from kernels.experts.routing.dependent import begin

_GROUP_M = tl.constexpr(8)  # tiles of rows whose columns are computed one after the other: weights stay in L2


@triton.jit
def tile_of_program(num_columns, num_tiles, BLOCK_N: tl.constexpr):
    """(index of a tile of rows, index of a tile of columns) of this program."""
    program = tl.program_id(0)
    across = tl.cdiv(num_columns, BLOCK_N)
    first = program // (_GROUP_M * across) * _GROUP_M
    height = tl.minimum(num_tiles - first, _GROUP_M)
    within = program % (_GROUP_M * across)
    return first + within % height, within // height


@triton.jit
def weight_step(
    w_ptr, scales_ptr, rows, is_row, first, size_in, dtype: tl.constexpr,
    IS_MXFP4: tl.constexpr, EVEN_K: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Columns [first, first + BLOCK_K) of some rows of a weight [*, size_in], transposed: [BLOCK_K, BLOCK_N].

    rows [BLOCK_N] int64; w of mxfp4 int32 of 8 codes. What lies past the last column, and rows that are none, are 0.
    """
    if IS_MXFP4:
        words = first // 8 + tl.arange(0, BLOCK_K // 8)
        block = first // 32 + tl.arange(0, BLOCK_K // 32)
        is_word = is_row[:, None] & (words < size_in // 8)[None, :]
        is_block = is_row[:, None] & (block < size_in // 32)[None, :]
        codes = tl.load(w_ptr + rows[:, None] * (size_in // 8) + words[None, :], mask=is_word, other=0)
        scales = tl.load(scales_ptr + rows[:, None] * (size_in // 32) + block[None, :], mask=is_block, other=127)
        factors = tl.broadcast_to(factors_of(scales)[:, :, None], [BLOCK_N, BLOCK_K // 32, 2])  # of each unit
        step = tl.trans(unpacked(codes, tl.reshape(factors, [BLOCK_N, BLOCK_K // 16]), dtype))
    else:
        columns = first + tl.arange(0, BLOCK_K)
        at = w_ptr + rows[None, :] * size_in + columns[:, None]
        if EVEN_K:
            step = tl.load(at, mask=is_row[None, :], other=0.0)
        else:
            step = tl.load(at, mask=is_row[None, :] & (columns < size_in)[:, None], other=0.0)
    return step


@triton.jit
def row_step(x_ptr, rows, is_row, stride, first, size_in, EVEN_K: tl.constexpr, BLOCK_K: tl.constexpr):
    """Columns [first, first + BLOCK_K) of some rows of x: [rows, BLOCK_K]; 0 past the last column and beside rows."""
    columns = first + tl.arange(0, BLOCK_K)
    at = x_ptr + rows[:, None] * stride + columns[None, :]
    if EVEN_K:
        step = tl.load(at, mask=is_row[:, None], other=0.0)
    else:
        step = tl.load(at, mask=is_row[:, None] & (columns < size_in)[None, :], other=0.0)
    return step


@triton.jit
def activated(gate, up, limit, alpha, ACTIVATION: tl.constexpr):
    """activation(gate) * up in fp32, or gpt-oss's clamped kind."""
    if ACTIVATION == "gelu":
        return 0.5 * (1.0 + tl.erf(gate * 0.7071067811865476)) * gate * up
    argument = gate
    if ACTIVATION == "clamped":
        gate = tl.minimum(gate, limit, propagate_nan=tl.PropagateNan.ALL)
        up = tl.maximum(tl.minimum(up, limit, propagate_nan=tl.PropagateNan.ALL), -limit) + 1.0
        argument = alpha * gate
    elif ACTIVATION == "gelu_pytorch_tanh":  # (1 + tanh(x)) / 2 is sigmoid(2 x)
        argument = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)
    decay = tl.exp(-tl.abs(argument))  # never overflows
    return gate * (tl.where(argument >= 0, 1.0, decay) / (1.0 + decay)) * up


@triton.jit(do_not_specialize=["num_active", "num_tiles"])
def hallmark_experts_gate_up(
    x_ptr, w_ptr, scales_ptr, bias_ptr, inner_ptr, order_ptr, tiles_ptr, num_active, num_tiles, stride_x,
    hidden, width, limit, alpha,
    ACTIVATION: tl.constexpr, HAS_BIAS: tl.constexpr, IS_MXFP4: tl.constexpr, EVEN_K: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """One program: BLOCK_M rows, gathered from the tokens x, by BLOCK_N columns of activation(gate) * up.

    w [E, 2 * width, hidden], inner [slots, width] in the order of rows. Surplus programs leave at once.
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
    gate_rows = expert * 2 * width + columns
    up_rows = gate_rows + width
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    gate = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    up = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for first in range(0, hidden, BLOCK_K):
        x = row_step(x_ptr, tokens, is_row, stride_x, first, hidden, EVEN_K, BLOCK_K)
        w = weight_step(
            w_ptr, scales_ptr, gate_rows, is_column, first, hidden, dtype, IS_MXFP4, EVEN_K, BLOCK_N, BLOCK_K
        )
        gate = tl.dot(x, w, gate, input_precision="ieee")
        w = weight_step(w_ptr, scales_ptr, up_rows, is_column, first, hidden, dtype, IS_MXFP4, EVEN_K, BLOCK_N, BLOCK_K)
        up = tl.dot(x, w, up, input_precision="ieee")
    if HAS_BIAS:
        gate += tl.load(bias_ptr + gate_rows, mask=is_column, other=0.0).to(tl.float32)[None, :]
        up += tl.load(bias_ptr + up_rows, mask=is_column, other=0.0).to(tl.float32)[None, :]
    inner = activated(gate, up, limit, alpha, ACTIVATION)
    at = inner_ptr + rows[:, None].to(tl.int64) * width + columns[None, :]
    tl.store(at, inner.to(dtype), mask=is_row[:, None] & is_column[None, :])


@triton.jit(do_not_specialize=["num_tiles"])
def hallmark_experts_down(
    inner_ptr, w_ptr, scales_ptr, bias_ptr, results_ptr, order_ptr, tiles_ptr, num_tiles, hidden, width,
    HAS_BIAS: tl.constexpr, IS_MXFP4: tl.constexpr, EVEN_K: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """One program: BLOCK_M rows of inner by BLOCK_N columns of the result, stored at the rows' slots.

    w [E, hidden, width], results [slots, hidden]. Surplus programs leave at once.
    """
    m, n = tile_of_program(hidden, num_tiles, BLOCK_N)
    expert = tl.load(tiles_ptr + m * 3).to(tl.int64)
    if expert < 0:
        return
    rows = tl.load(tiles_ptr + m * 3 + 1) + tl.arange(0, BLOCK_M)
    is_row = rows < tl.load(tiles_ptr + m * 3 + 2)
    slots = tl.load(order_ptr + rows, mask=is_row, other=0).to(tl.int64)
    columns = n * BLOCK_N + tl.arange(0, BLOCK_N)
    is_column = columns < hidden
    w_rows = expert * hidden + columns
    dtype: tl.constexpr = inner_ptr.dtype.element_ty
    sums = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for first in range(0, width, BLOCK_K):
        x = row_step(inner_ptr, rows.to(tl.int64), is_row, width, first, width, EVEN_K, BLOCK_K)
        w = weight_step(w_ptr, scales_ptr, w_rows, is_column, first, width, dtype, IS_MXFP4, EVEN_K, BLOCK_N, BLOCK_K)
        sums = tl.dot(x, w, sums, input_precision="ieee")
    if HAS_BIAS:
        sums += tl.load(bias_ptr + w_rows, mask=is_column, other=0.0).to(tl.float32)[None, :]
    at = results_ptr + slots[:, None] * hidden + columns[None, :]
    tl.store(at, sums.to(dtype), mask=is_row[:, None] & is_column[None, :])


@triton.jit
def hallmark_experts_combine(
    results_ptr, weights_ptr, out_ptr, stride_weights, stride_out, hidden,
    NUM_ACTIVE: tl.constexpr, BLOCK: tl.constexpr, IS_DEPENDENT: tl.constexpr,
):  # fmt: skip
    """One program: BLOCK columns of one token's weighted sum over its slots, in fp32 and in the order of the slots."""
    begin(IS_DEPENDENT)
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_column = columns < hidden
    total = tl.zeros([BLOCK], tl.float32)
    for place in tl.static_range(NUM_ACTIVE):  # unrolled: all are in flight at once
        weight = tl.load(weights_ptr + token * stride_weights + place)
        at = results_ptr + (token * NUM_ACTIVE + place) * hidden + columns
        total += weight * tl.load(at, mask=is_column, other=0.0).to(tl.float32)
    tl.store(out_ptr + token * stride_out + columns, total.to(out_ptr.dtype.element_ty), mask=is_column)
