"""The consumers of the Gluon kernels: S = Q K^T and O += P V by wgmma, the softmax in registers.

Two kinds: those of consumer_ahead.py, and those here, which issue both products of a step together. One steady step, of
key block j (blocks run from the last a tile sees down to the first):

    issue S(j) = Q K(j)^T       issue O += P(j+1) V(j+1)       wait S(j)      free K(j)
    softmax of S(j), pack P(j)  wait for K(j-1) to arrive      wait O         free V(j+1)      rescale O

The wait for K(j-1) has a second job: it is a spin loop, and ptxas does not move the softmax across it. Without it ptxas
sinks the exponentials below the wait for O and none of them overlaps P V. At a tile's end the first S of the next tile
is issued beside the last P V of this one.
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
    wait_all,
    wait_output,
)
from kernels.hopper.consumer_ahead import consume_ahead
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
from kernels.hopper.softmax import (
    add_weights,
    first_scores,
    lane_sum,
    next_scores,
    rescale,
    row_totals,
    weights,
)


@jit
def repacked(p16):
    """The same weights, two a register. Between two loops LLVM would carry each on its own: 64 PRMT a step."""
    return gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [p16], dtype=p16.dtype, is_pure=True, pack=2)


@jit
def step(
    queries, n, held_q, keys, values, fill, i, num_more, last, acc, p16, m, sums, zero, scale, softcap_scale, position,
    index, visible, window, MASKED: gl.constexpr, W: gl.constexpr, VARIANT: gl.constexpr,
):  # fmt: skip
    """One steady step, see the head of this file. MASKED: 0 never, 1 where the block asks for it, 2 always."""
    CONSUMERS: gl.constexpr = VARIANT.tiling.consumers
    take_turn(W, VARIANT)
    s = issue_scores(queries, (n % VARIANT.tiling.q_buffers) * CONSUMERS + W, keys, fill, zero, held_q, VARIANT)
    wait_fill(values, fill - 1, True, VARIANT)
    acc = issue_output(p16, values, fill - 1, acc, VARIANT)
    pass_turn(W, VARIANT)
    s = warpgroup_mma_wait(1, deps=(s,))
    free_key(keys, fill, True, VARIANT)
    if VARIANT.tiling.q_buffers == 1:
        mbarrier.arrive(queries[2].index(W), count=1, pred=i + 1 == num_more)
    x, m_new = next_scores(
        s, m, scale, softcap_scale, position, W * ROWS // VARIANT.pack, index, visible, window,
        last - 1 - i, MASKED, VARIANT,
    )  # fmt: skip
    p = weights(x, VARIANT)
    shrink = gl.exp2(m - m_new)
    sums = add_weights(sums, shrink, p)
    p16 = gl.convert_layout(p.to(p16.dtype), p16.type.layout)
    fill += 1
    wait_fill(keys, fill, i + 1 < num_more, VARIANT)  # also the pin, see the head of this file
    acc = wait_output(acc, VARIANT)
    free_value(values, fill - 2, VARIANT)
    return rescale(acc, shrink, VARIANT), p16, m_new, sums


@jit
def consume_beside(
    result, sinks, spans, scale, softcap_scale, window, tiles, queries, keys, values,
    W: gl.constexpr, STORE: gl.constexpr, VARIANT: gl.constexpr,
):  # fmt: skip
    """`consume` as the head of this file has it."""
    q_smem, q_full, q_free = queries
    dtype: gl.constexpr = q_smem[0].dtype
    BLOCK_N: gl.constexpr = VARIANT.tiling.block_n
    Q_BUFFERS: gl.constexpr = VARIANT.tiling.q_buffers
    CONSUMERS: gl.constexpr = VARIANT.tiling.consumers
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    O_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, VARIANT.columns[0], 16])
    P_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, O_LAYOUT, 2)
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
        s, held_q, fill = first_product(queries, keys, values, top - last, zero, W, VARIANT)
        n = 0
        if Q_BUFFERS == 1:
            mbarrier.arrive(q_free.index(W), count=1, pred=num_more == 0)
        first_col = last * BLOCK_N
        x, m = first_scores(s, scale, softcap_scale, position + index, visible, window, first_col, S_ROW, VARIANT)
        p = gl.exp2(x)
        sums = lane_sum(p)
        p16 = gl.convert_layout(p.to(dtype), P_LAYOUT)
        acc = empty_output(VARIANT)
        fill += 1

        more = True
        while more:
            if num_more > 0:
                wait_fill(keys, fill, True, VARIANT)
            first_whole = 0  # of the steps below: the first of a block that needs no mask
            if VARIANT.masks_apart:
                first_whole = num_masked(position, last, num_more, W, VARIANT)
                for i in range(first_whole):
                    acc, p16, m, sums = step(
                        queries, n, held_q, keys, values, fill, i, num_more, last, acc, p16, m, sums, zero,
                        scale, softcap_scale, position, index, visible, window, 2, W, VARIANT,
                    )  # fmt: skip
                    fill += 1
                p16 = repacked(p16)
            for i in range(first_whole, num_more):
                acc, p16, m, sums = step(
                    queries, n, held_q, keys, values, fill, i, num_more, last, acc, p16, m, sums, zero,
                    scale, softcap_scale, position, index, visible, window, 0 if VARIANT.masks_apart else 1, W, VARIANT,
                )  # fmt: skip
                fill += 1

            # tile border: S of the next tile's first block beside the last P V of this tile
            if Q_BUFFERS > 1:
                mbarrier.arrive(q_free.index((n % Q_BUFFERS) * CONSUMERS + W), count=1)
            n += 1
            taken = take_tile(tiles, n, VARIANT)
            next_row, next_rows, position, num_keys, next_head, _first_key, low, top, next_part = taken
            low = first_of(low, VARIANT)
            # If there is none, S is computed from stale shared memory and dropped: cheaper than a branch around wgmma.
            more = next_row >= 0
            last, lowest = own_blocks(position, low, top, window, W, VARIANT)
            num_more = last - lowest
            visible = (spans, next_row, next_rows, num_keys, index)
            held = fill - 1  # the values of this fill still have to meet p16
            if VARIANT.skips:
                fill = skip_keys(keys, fill, num_below + gl.where(more, top - last, 0), W, VARIANT)
            num_below = lowest - low
            total = row_totals(sums, m, sink, part, VARIANT)
            m_done = m
            if VARIANT.tiling.pv_first:  # with one Q buffer the next queries come late: do not hold P V back for them
                wait_fill(values, held, True, VARIANT)
                acc = issue_output(p16, values, held, acc, VARIANT)
            buffer = (n % Q_BUFFERS) * CONSUMERS + W
            mbarrier.wait(q_full.index(buffer), (n // Q_BUFFERS) & 1, pred=more)
            wait_fill(keys, fill, more, VARIANT)
            held_q = held_queries(queries, buffer, zero, VARIANT)
            take_turn(W, VARIANT)
            s = issue_scores(queries, buffer, keys, fill, zero, held_q, VARIANT)
            if VARIANT.tiling.pv_first:
                pass_turn(W, VARIANT)
                acc, s = wait_all(acc, s, VARIANT)
            else:
                wait_fill(values, held, True, VARIANT)
                acc = issue_output(p16, values, held, acc, VARIANT)
                pass_turn(W, VARIANT)
                s = warpgroup_mma_wait(1, deps=(s,))
            free_key(keys, fill, more, VARIANT)
            if Q_BUFFERS == 1:
                mbarrier.arrive(q_free.index(W), count=1, pred=more & (num_more == 0))
            first_col = last * BLOCK_N
            x, m = first_scores(s, scale, softcap_scale, position + index, visible, window, first_col, S_ROW, VARIANT)
            p = gl.exp2(x)
            sums = lane_sum(p)
            p16 = gl.convert_layout(p.to(dtype), P_LAYOUT)
            wait_fill(values, held, True, VARIANT)  # cannot block: the pin again
            if not VARIANT.tiling.pv_first:
                acc = wait_output(acc, VARIANT)
            free_value(values, held, VARIANT)
            finish_tile(result, row, rows, head, part, acc, m_done, total, W, STORE, VARIANT)
            if VARIANT.skips:  # only now: freed before the P V above, skipped values could deadlock a two-stage ring
                skip_values(values, held + 1, fill, VARIANT)
            acc = empty_output(VARIANT)
            fill += 1
            sink = head_sink(sinks, next_head, S_ROW, VARIANT)
            row = next_row
            rows = next_rows
            head = next_head
            part = next_part


@jit
def consume(
    result, sinks, spans, scale, softcap_scale, window, tiles, queries, keys, values,
    W: gl.constexpr, STORE: gl.constexpr, VARIANT: gl.constexpr,
):  # fmt: skip
    """The role of consumer W: ROWS query rows of every tile.

    result  the output, its strides of a row and of a head; with parts: their tensor, that of their logs, heads of tiles
    """
    if VARIANT.tiling.scores_ahead:
        consume_ahead(
            result, sinks, spans, scale, softcap_scale, window, tiles, queries, keys, values, W, STORE, VARIANT
        )
    else:
        consume_beside(
            result, sinks, spans, scale, softcap_scale, window, tiles, queries, keys, values, W, STORE, VARIANT
        )
