"""Consumers of the Gluon kernels that are one block of scores ahead.

One steady step, for key block j (blocks run from the last a tile sees down to the first); X are scores less their max:

    issue S(j-1) = Q K(j-1)^T     rescale O     P(j) = exp2(X(j))      wait for V(j)      issue O += P(j) V(j)
    wait S(j-1)   free K(j-1)     maxima and X(j-1)                    wait for K(j-2)    wait O   free V(j)

A warp that issues wgmma stands still while the tensor cores are busy, so a step lasts as long as its products and what
is done between them. Here exponentials stand behind one product and maxima behind the other; where both products are
issued together (consumer.py) all that is behind the second. With `early_waits` V(j) is waited for right behind
the first product and K(j-2) right behind the second.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
# The signatures of jitted functions are Triton's: only their constexpr parameters are annotated.

from triton.experimental.gluon import jit
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma_wait

from kernels.hopper.blocks import (
    empty_output,
    finish_tile,
    first_product,
    head_sink,
    held_queries,
    issue_output,
    issue_scores,
    num_masked,
    own_blocks,
    skip_keys,
    skip_values,
    wait_output,
)
from kernels.hopper.pipeline import (
    PAIR,
    ROWS,
    TURN,
    free_key,
    free_value,
    hardware_arrive,
    pass_turn,
    take_turn,
    wait_fill,
)
from kernels.hopper.schedule import first_of, take_tile
from kernels.hopper.softmax import add_weights, first_scores, lane_sum, next_scores, rescale, row_totals


@jit
def add_block(x, shrink, sums, acc, values, fill, dtype: gl.constexpr, VARIANT: gl.constexpr):
    """Weights of a block, added to the sums; O += P V is under way when this returns."""
    P_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, acc[0].type.layout, 2)
    if VARIANT.tiling.early_waits:
        wait_fill(values, fill, True, VARIANT)
    acc = rescale(acc, shrink, VARIANT)
    p = gl.exp2(x)
    sums = add_weights(sums, shrink, p)
    p16 = gl.convert_layout(p.to(dtype), P_LAYOUT)
    if not VARIANT.tiling.early_waits:
        wait_fill(values, fill, True, VARIANT)
    return issue_output(p16, values, fill, acc, VARIANT), sums


@jit
def step_ahead(
    queries, buffer, held_q, keys, values, fill, i, num_more, last, x, shrink, m, acc, sums, zero, scale, softcap_scale,
    position, index, visible, window, dtype: gl.constexpr, MASKED: gl.constexpr, W: gl.constexpr, VARIANT: gl.constexpr,
):  # fmt: skip
    """One steady step, see the head of this file. MASKED: 0 never, 1 where the block asks for it, 2 always."""
    take_turn(W, VARIANT)
    s = issue_scores(queries, buffer, keys, fill + 1, zero, held_q, VARIANT)
    pass_turn(W, VARIANT)
    acc, sums = add_block(x, shrink, sums, acc, values, fill, dtype, VARIANT)
    if VARIANT.tiling.early_waits:
        wait_fill(keys, fill + 2, i + 1 < num_more, VARIANT)
    s = warpgroup_mma_wait(VARIANT.behind, deps=(s,))
    free_key(keys, fill + 1, True, VARIANT)
    x, m_new = next_scores(
        s, m, scale, softcap_scale, position, W * ROWS // VARIANT.pack, index, visible, window, last - 1 - i, MASKED,
        VARIANT,
    )  # fmt: skip
    shrink = gl.exp2(m - m_new)
    if not VARIANT.tiling.early_waits:  # ptxas moves no maximum across a spin loop
        wait_fill(keys, fill + 2, i + 1 < num_more, VARIANT)
    acc = wait_output(acc, VARIANT)
    free_value(values, fill, VARIANT)
    return x, shrink, m_new, acc, sums


@jit
def consume_ahead(
    result, sinks, spans, scale, softcap_scale, window, tiles, queries, keys, values,
    W: gl.constexpr, STORE: gl.constexpr, VARIANT: gl.constexpr,
):  # fmt: skip
    """The role of consumer W: ROWS query rows of every tile."""
    q_smem, q_full, q_free = queries
    dtype: gl.constexpr = q_smem[0].dtype
    BLOCK_N: gl.constexpr = VARIANT.tiling.block_n
    Q_BUFFERS: gl.constexpr = VARIANT.tiling.q_buffers
    CONSUMERS: gl.constexpr = VARIANT.tiling.consumers
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    S_ROW: gl.constexpr = gl.SliceLayout(1, S_LAYOUT)
    index = (W * ROWS + gl.arange(0, ROWS, layout=S_ROW)) // VARIANT.pack
    zero = gl.zeros([ROWS, BLOCK_N], gl.float32, S_LAYOUT)
    if VARIANT.tiling.named_barriers and W == CONSUMERS - 1:
        hardware_arrive(TURN, PAIR)  # consumer 0 begins

    row, rows, position, num_keys, head, _first_key, low, top, part = take_tile(tiles, 0, VARIANT)
    low = first_of(low, VARIANT)
    if row >= 0:
        last, lowest = own_blocks(position, low, top, window, W, VARIANT)
        num_more = last - lowest  # blocks after the first
        num_below = lowest - low
        visible = (spans, row, rows, num_keys, index)
        sink = head_sink(sinks, head, S_ROW, VARIANT)
        s, held_q, fill = first_product(queries, keys, values, top - last, zero, W, VARIANT)  # fill: of what x holds
        n = 0
        first_col = last * BLOCK_N
        x, m = first_scores(s, scale, softcap_scale, position + index, visible, window, first_col, S_ROW, VARIANT)
        shrink = gl.full([ROWS], 1.0, gl.float32, S_ROW)
        acc = empty_output(VARIANT)
        sums = lane_sum(zero)

        more = True
        while more:
            buffer = (n % Q_BUFFERS) * CONSUMERS + W
            wait_fill(keys, fill + 1, num_more > 0, VARIANT)
            first_whole = 0  # of the steps below: the first of a block that needs no mask
            if VARIANT.masks_apart:
                first_whole = num_masked(position, last, num_more, W, VARIANT)
                for i in range(first_whole):
                    x, shrink, m, acc, sums = step_ahead(
                        queries, buffer, held_q, keys, values, fill, i, num_more, last, x, shrink, m, acc, sums, zero,
                        scale, softcap_scale, position, index, visible, window, dtype, 2, W, VARIANT,
                    )  # fmt: skip
                    fill += 1
            for i in range(first_whole, num_more):
                x, shrink, m, acc, sums = step_ahead(
                    queries, buffer, held_q, keys, values, fill, i, num_more, last, x, shrink, m, acc, sums, zero,
                    scale, softcap_scale, position, index, visible, window, dtype,
                    0 if VARIANT.masks_apart else 1, W, VARIANT,
                )  # fmt: skip
                fill += 1

            # tile border: the last P V of this tile beside S of the next tile's first block
            mbarrier.arrive(q_free.index(buffer), count=1)
            n += 1
            taken = take_tile(tiles, n, VARIANT)
            next_row, next_rows, position, num_keys, next_head, _first_key, low, top, next_part = taken
            low = first_of(low, VARIANT)
            # If there is none, S is computed from stale shared memory and dropped: cheaper than a branch around wgmma.
            more = next_row >= 0
            last, lowest = own_blocks(position, low, top, window, W, VARIANT)
            num_more = last - lowest
            visible = (spans, next_row, next_rows, num_keys, index)
            held = fill
            fill += 1
            if VARIANT.skips:
                fill = skip_keys(keys, fill, num_below + gl.where(more, top - last, 0), W, VARIANT)
            num_below = lowest - low
            buffer = (n % Q_BUFFERS) * CONSUMERS + W
            mbarrier.wait(q_full.index(buffer), (n // Q_BUFFERS) & 1, pred=more)
            wait_fill(keys, fill, more, VARIANT)
            held_q = held_queries(queries, buffer, zero, VARIANT)
            take_turn(W, VARIANT)
            s = issue_scores(queries, buffer, keys, fill, zero, held_q, VARIANT)
            pass_turn(W, VARIANT)
            acc, sums = add_block(x, shrink, sums, acc, values, held, dtype, VARIANT)
            total = row_totals(sums, m, sink, part, VARIANT)
            m_done = m
            s = warpgroup_mma_wait(VARIANT.behind, deps=(s,))
            free_key(keys, fill, more, VARIANT)
            first_col = last * BLOCK_N
            x, m = first_scores(s, scale, softcap_scale, position + index, visible, window, first_col, S_ROW, VARIANT)
            shrink = gl.full([ROWS], 1.0, gl.float32, S_ROW)
            wait_fill(values, held, True, VARIANT)  # cannot block: for ptxas
            acc = wait_output(acc, VARIANT)
            free_value(values, held, VARIANT)
            finish_tile(result, row, rows, head, part, acc, m_done, total, W, STORE, VARIANT)
            if VARIANT.skips:  # only now: freed before the P V above, skipped values could deadlock a two-stage ring
                skip_values(values, held + 1, fill, VARIANT)
            acc = empty_output(VARIANT)
            sums = lane_sum(zero)
            sink = head_sink(sinks, next_head, S_ROW, VARIANT)
            row = next_row
            rows = next_rows
            head = next_head
            part = next_part
