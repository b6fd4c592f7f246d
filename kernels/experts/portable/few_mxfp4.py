"""Products of few tokens with mxfp4 weights, bound by memory and by what a code takes to become a number.

Every slot reads its expert's weights itself, so that nothing is sorted, and multiplies without tensor cores: a code is
taken out of its word by a rotation and a mask (bit_order.py), and a scale is applied to the sum of its 32 products. A
program owns whole rows of weights. The first product's programs are each one slot's; the second's are each one token's,
and add up its experts in the order of its slots. With programmatic dependent launch the second's weights are read while
the first product still runs: they depend on the experts alone, which are known before the first begins.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
# The signatures of jitted functions are Triton's: only their constexpr parameters are annotated.

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.experts.portable.codes import factors_of, numbers, units_of
from kernels.experts.portable.products import activated

# x is multiplied by 2^64 and the sum by 2^62, as `numbers` are times 2^-126: a product is a subnormal number for an x
# below 2^-64 only.
_TWO_64 = tl.constexpr(2.0**64)
_TWO_62 = tl.constexpr(2.0**62)


@triton.jit
def read_codes(w_ptr, rows, is_row, first, SIZE_IN: tl.constexpr, BLOCK_K: tl.constexpr):
    """Columns [first, first + BLOCK_K) of some rows of a weight [*, SIZE_IN], 8 codes an int32; outside 0."""
    words = first // 8 + tl.arange(0, BLOCK_K // 8)
    is_inside = is_row[:, None] & (words < SIZE_IN // 8)[None, :]
    return tl.load(w_ptr + rows[:, None] * (SIZE_IN // 8) + words[None, :], mask=is_inside, other=0)


@triton.jit
def read_factors(scales_ptr, rows, is_row, first, SIZE_IN: tl.constexpr, BLOCK_K: tl.constexpr):
    """The same columns' scales, one of 32: fp32 [rows, BLOCK_K / 32]; 1 where there are none."""
    blocks = first // 32 + tl.arange(0, BLOCK_K // 32)
    is_inside = is_row[:, None] & (blocks < SIZE_IN // 32)[None, :]
    scales = tl.load(scales_ptr + rows[:, None] * (SIZE_IN // 32) + blocks[None, :], mask=is_inside, other=127)
    return factors_of(scales)


@triton.jit
def by_place(x, UNITS: tl.constexpr):
    """x [16 * UNITS] as the 8 places of both words of each unit of codes."""
    first, second = tl.split(tl.permute(tl.reshape(x, [UNITS, 2, 8]), [0, 2, 1]))
    return places_of(first, UNITS), places_of(second, UNITS)


@triton.jit
def places_of(x, UNITS: tl.constexpr):
    """x [UNITS, 8] as 8 columns."""
    evens, odds = tl.split(tl.reshape(x, [UNITS, 4, 2]))
    evens, more_evens = tl.split(tl.reshape(evens, [UNITS, 2, 2]))
    odds, more_odds = tl.split(tl.reshape(odds, [UNITS, 2, 2]))
    x0, x4 = tl.split(evens)
    x2, x6 = tl.split(more_evens)
    x1, x5 = tl.split(odds)
    x3, x7 = tl.split(more_odds)
    return x0, x1, x2, x3, x4, x5, x6, x7


@triton.jit
def products(codes, factors, x):
    """Products of rows and x [BLOCK_K] fp32, 2^64 times as large, summed over the 32 columns that share a factor."""
    ROWS: tl.constexpr = codes.shape[0]
    UNITS: tl.constexpr = codes.shape[1] // 2
    units = units_of(codes)
    places = by_place(x, UNITS)
    sums = numbers(units, 0, 0) * places[0][0][None, :]
    for i in tl.static_range(1, 16):
        sums += numbers(units, i // 8, i % 8) * places[i // 8][i % 8][None, :]
    return tl.sum(tl.reshape(sums, [ROWS, UNITS // 2, 2]), 2) * _TWO_62 * factors


@triton.jit(do_not_specialize=["num_active"])
def hallmark_experts_few_gate_up(
    x_ptr, w_ptr, scales_ptr, bias_ptr, inner_ptr, experts_ptr, num_active, stride_x, width, limit, alpha,
    HIDDEN: tl.constexpr, ACTIVATION: tl.constexpr, HAS_BIAS: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, IS_DEPENDENT: tl.constexpr,
):  # fmt: skip
    """One program: BLOCK_N columns of activation(gate) * up of one slot.

    w [E, 2 * width, HIDDEN / 8] int32, inner [slots, width].
    """
    if IS_DEPENDENT:
        gdc_wait()
        gdc_launch_dependents()  # not before: what is launched reads the experts at once
    slot = tl.program_id(1).to(tl.int64)
    expert = tl.load(experts_ptr + slot).to(tl.int64)
    columns = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    is_column = columns < width
    gate_rows = expert * 2 * width + columns
    up_rows = gate_rows + width
    gates = tl.zeros([BLOCK_N, BLOCK_K // 32], tl.float32)
    ups = tl.zeros([BLOCK_N, BLOCK_K // 32], tl.float32)
    x_ptr += slot // num_active * stride_x
    for first in tl.static_range(0, HIDDEN, BLOCK_K):
        gate = read_codes(w_ptr, gate_rows, is_column, first, HIDDEN, BLOCK_K)
        up = read_codes(w_ptr, up_rows, is_column, first, HIDDEN, BLOCK_K)
        gate_factors = read_factors(scales_ptr, gate_rows, is_column, first, HIDDEN, BLOCK_K)
        up_factors = read_factors(scales_ptr, up_rows, is_column, first, HIDDEN, BLOCK_K)
        inputs = first + tl.arange(0, BLOCK_K)
        x = tl.load(x_ptr + inputs, mask=inputs < HIDDEN, other=0.0).to(tl.float32) * _TWO_64
        gates += products(gate, gate_factors, x)
        ups += products(up, up_factors, x)
    gate = tl.sum(gates, 1)
    up = tl.sum(ups, 1)
    if HAS_BIAS:
        gate += tl.load(bias_ptr + gate_rows, mask=is_column, other=0.0).to(tl.float32)
        up += tl.load(bias_ptr + up_rows, mask=is_column, other=0.0).to(tl.float32)
    inner = activated(gate, up, limit, alpha, ACTIVATION)
    tl.store(inner_ptr + slot * width + columns, inner.to(inner_ptr.dtype.element_ty), mask=is_column)


@triton.jit
def hallmark_experts_few_down(
    inner_ptr, w_ptr, scales_ptr, bias_ptr, out_ptr, experts_ptr, weights_ptr, stride_weights, stride_out, hidden,
    WIDTH: tl.constexpr, NUM_ACTIVE: tl.constexpr, BLOCK_A: tl.constexpr, HAS_BIAS: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, IS_DEPENDENT: tl.constexpr,
):  # fmt: skip
    """One program: BLOCK_N columns of one token's weighted sum over its slots, in their order.

    w [E, hidden, WIDTH / 8] int32, inner [slots, WIDTH]. BLOCK_A: slots whose weights are read together; the first of
    them, where it is a dependent launch, before the wait for what computes inner.
    """
    STEPS: tl.constexpr = (WIDTH + BLOCK_K - 1) // BLOCK_K
    token = tl.program_id(1).to(tl.int64)
    columns = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    is_column = columns < hidden
    sums = tl.zeros([BLOCK_N, BLOCK_K // 32], tl.float32)
    biases = tl.zeros([BLOCK_N], tl.float32)
    experts_ptr += token * NUM_ACTIVE
    inner_ptr += token * NUM_ACTIVE * WIDTH
    weights_ptr += token * stride_weights
    for at in tl.static_range(0, NUM_ACTIVE, BLOCK_A):
        codes = ()
        factors = ()
        for a in tl.static_range(BLOCK_A):
            if at + a < NUM_ACTIVE:
                expert = tl.load(experts_ptr + at + a, cache_modifier=".cg").to(tl.int64)
                rows = expert * hidden + columns
                for first in tl.static_range(0, WIDTH, BLOCK_K):
                    read = read_codes(w_ptr, rows, is_column, first, WIDTH, BLOCK_K)
                    codes = codes + (read,)  # type: ignore[assignment]  # noqa: RUF005  Triton unpacks nothing
                    read = read_factors(scales_ptr, rows, is_column, first, WIDTH, BLOCK_K)
                    factors = factors + (read,)  # type: ignore[assignment]  # noqa: RUF005
                if HAS_BIAS:
                    weight = tl.load(weights_ptr + at + a, cache_modifier=".cg")
                    biases += weight * tl.load(bias_ptr + rows, mask=is_column, other=0.0).to(tl.float32)
        if IS_DEPENDENT and at == 0:
            gdc_wait()
        for a in tl.static_range(BLOCK_A):
            if at + a < NUM_ACTIVE:
                weight = tl.load(weights_ptr + at + a, cache_modifier=".cg") * _TWO_64
                for step in tl.static_range(STEPS):
                    inputs = step * BLOCK_K + tl.arange(0, BLOCK_K)
                    inner = tl.load(inner_ptr + (at + a) * WIDTH + inputs, mask=inputs < WIDTH, other=0.0)
                    x = inner.to(tl.float32) * weight
                    sums += products(codes[a * STEPS + step], factors[a * STEPS + step], x)
    total = tl.sum(sums, 1) + biases
    tl.store(out_ptr + token * stride_out + columns, total.to(out_ptr.dtype.element_ty), mask=is_column)
