"""Products of few tokens, which memory bounds: every slot reads its expert's weights itself, so that nothing is sorted.

A program owns whole rows of weights. The first product's programs are each one slot's; the second's are each one
token's, and add up its experts in the order of its slots. With programmatic dependent launch the second's weights are
read while the first product still runs: they depend on the experts alone, which are known before the first begins.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
# The signatures of jitted functions are Triton's: only their constexpr parameters are annotated.

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.experts.products import activated


@triton.jit
def read_rows(w_ptr, rows, is_row, first, SIZE_IN: tl.constexpr, BLOCK_K: tl.constexpr):
    """Columns [first, first + BLOCK_K) of some rows of a weight [*, SIZE_IN]; what lies outside is 0."""
    columns = first + tl.arange(0, BLOCK_K)
    is_inside = is_row[:, None] & (columns < SIZE_IN)[None, :]
    return tl.load(w_ptr + rows[:, None] * SIZE_IN + columns[None, :], mask=is_inside, other=0.0)


@triton.jit(do_not_specialize=["num_active"])
def hallmark_experts_few_gate_up(
    x_ptr, w_ptr, bias_ptr, inner_ptr, experts_ptr, num_active, stride_x, width, limit, alpha,
    HIDDEN: tl.constexpr, ACTIVATION: tl.constexpr, HAS_BIAS: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, IS_DEPENDENT: tl.constexpr,
):  # fmt: skip
    """One program: BLOCK_N columns of activation(gate) * up of one slot. w [E, 2 * width, HIDDEN], inner [slots, width]."""
    if IS_DEPENDENT:
        gdc_wait()
        gdc_launch_dependents()
    slot = tl.program_id(1).to(tl.int64)
    expert = tl.load(experts_ptr + slot).to(tl.int64)
    columns = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    is_column = columns < width
    gate_rows = expert * 2 * width + columns
    gates = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    ups = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    x_ptr += slot // num_active * stride_x
    for first in tl.static_range(0, HIDDEN, BLOCK_K):
        gate = read_rows(w_ptr, gate_rows, is_column, first, HIDDEN, BLOCK_K)
        up = read_rows(w_ptr, gate_rows + width, is_column, first, HIDDEN, BLOCK_K)
        inputs = first + tl.arange(0, BLOCK_K)
        x = tl.load(x_ptr + inputs, mask=inputs < HIDDEN, other=0.0).to(tl.float32)[None, :]
        gates += gate.to(tl.float32) * x
        ups += up.to(tl.float32) * x
    gate = tl.sum(gates, 1)
    up = tl.sum(ups, 1)
    if HAS_BIAS:
        gate += tl.load(bias_ptr + gate_rows, mask=is_column, other=0.0).to(tl.float32)
        up += tl.load(bias_ptr + gate_rows + width, mask=is_column, other=0.0).to(tl.float32)
    inner = activated(gate, up, limit, alpha, ACTIVATION)
    tl.store(inner_ptr + slot * width + columns, inner.to(inner_ptr.dtype.element_ty), mask=is_column)


@triton.jit
def hallmark_experts_few_down(
    inner_ptr, w_ptr, bias_ptr, out_ptr, experts_ptr, weights_ptr, stride_weights, stride_out, hidden,
    WIDTH: tl.constexpr, NUM_ACTIVE: tl.constexpr, BLOCK_A: tl.constexpr, HAS_BIAS: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, IS_DEPENDENT: tl.constexpr,
):  # fmt: skip
    """One program: BLOCK_N columns of one token's weighted sum over its slots. w [E, hidden, WIDTH], inner [slots, WIDTH].

    BLOCK_A: slots whose weights are read together.
    """
    STEPS: tl.constexpr = (WIDTH + BLOCK_K - 1) // BLOCK_K
    token = tl.program_id(1).to(tl.int64)
    columns = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    is_column = columns < hidden
    sums = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    biases = tl.zeros([BLOCK_N], tl.float32)
    experts_ptr += token * NUM_ACTIVE
    inner_ptr += token * NUM_ACTIVE * WIDTH
    weights_ptr += token * stride_weights
    for at in tl.static_range(0, NUM_ACTIVE, BLOCK_A):
        read = ()
        for a in tl.static_range(BLOCK_A):
            if at + a < NUM_ACTIVE:
                expert = tl.load(experts_ptr + at + a, cache_modifier=".cg").to(tl.int64)
                rows = expert * hidden + columns
                for first in tl.static_range(0, WIDTH, BLOCK_K):
                    read = read + (read_rows(w_ptr, rows, is_column, first, WIDTH, BLOCK_K),)
                if HAS_BIAS:
                    weight = tl.load(weights_ptr + at + a, cache_modifier=".cg")
                    biases += weight * tl.load(bias_ptr + rows, mask=is_column, other=0.0).to(tl.float32)
        if IS_DEPENDENT and at == 0:
            gdc_wait()
        for a in tl.static_range(BLOCK_A):
            if at + a < NUM_ACTIVE:
                weight = tl.load(weights_ptr + at + a, cache_modifier=".cg")
                for step in tl.static_range(STEPS):
                    inputs = step * BLOCK_K + tl.arange(0, BLOCK_K)
                    inner = tl.load(inner_ptr + (at + a) * WIDTH + inputs, mask=inputs < WIDTH, other=0.0)
                    scaled = inner.to(tl.float32) * weight
                    sums += read[a * STEPS + step].to(tl.float32) * scaled[None, :]
    total = tl.sum(sums, 1) + biases
    tl.store(out_ptr + token * stride_out + columns, total.to(out_ptr.dtype.element_ty), mask=is_column)
