"""The consumers of `gluon.prefill.unmasked.hopper`: every row of a tile sees all keys of its sequence.

One steady step is that of `kernels/hopper/consumer_ahead.py`: one block of scores ahead. No block needs a mask but the
last of a sequence, which every tile computes first.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
# The signatures of jitted functions are Triton's: only their constexpr parameters are annotated.

from triton.experimental.gluon import jit
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma_wait

from kernels.hopper.blocks import empty_output, finish_tile, held_queries, issue_scores, wait_output
from kernels.hopper.consumer_ahead import add_block
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
from kernels.hopper.schedule import take_tile
from kernels.hopper.softmax import lane_sum, larger_max, row_max


@jit
def last_scores(s, scale, first_col, num_keys, ROW: gl.constexpr):
    """Scores of a sequence's last block less the maxima of their rows (both in log2), and these maxima.

    Keys from `num_keys` on are of other sequences: they become -inf.
    """
    col = first_col + gl.arange(0, s.shape[1], layout=gl.SliceLayout(0, s.type.layout))
    s = gl.where((col < num_keys)[None, :], s, float("-inf"))
    m = gl.maximum(row_max(s, ROW) * scale, -1e30)  # of a sequence without a key there is no maximum
    return s * scale - m[:, None], m


@jit
def step_full(
    queries, buffer, held_q, keys, values, fill, i, num_more, x, shrink, m, acc, sums, zero, scale,
    dtype: gl.constexpr, W: gl.constexpr, VARIANT: gl.constexpr,
):  # fmt: skip
    """One steady step, see the head of this file."""
    take_turn(W, VARIANT)
    s = issue_scores(queries, buffer, keys, fill + 1, zero, held_q, VARIANT)
    pass_turn(W, VARIANT)
    acc, sums = add_block(x, shrink, sums, acc, values, fill, dtype, VARIANT)
    if VARIANT.tiling.early_waits:
        wait_fill(keys, fill + 2, i + 1 < num_more, VARIANT)
    s = warpgroup_mma_wait(VARIANT.behind, deps=(s,))
    free_key(keys, fill + 1, True, VARIANT)
    ROW: gl.constexpr = m.type.layout
    m_new = larger_max(m, row_max(s, ROW) * scale, VARIANT)
    x = s * scale - m_new[:, None]
    shrink = gl.exp2(m - m_new)
    if not VARIANT.tiling.early_waits:  # ptxas moves no maximum across a spin loop
        wait_fill(keys, fill + 2, i + 1 < num_more, VARIANT)
    acc = wait_output(acc, VARIANT)
    free_value(values, fill, VARIANT)
    return x, shrink, m_new, acc, sums


@jit
def consume_full(
    result, scale, tiles, queries, keys, values, W: gl.constexpr, STORE: gl.constexpr, VARIANT: gl.constexpr
):
    """The role of consumer W: ROWS query rows of every tile. `result`: the output, its strides of a row and a head."""
    q_smem, q_full, q_free = queries
    dtype: gl.constexpr = q_smem[0].dtype
    BLOCK_N: gl.constexpr = VARIANT.tiling.block_n
    Q_BUFFERS: gl.constexpr = VARIANT.tiling.q_buffers
    CONSUMERS: gl.constexpr = VARIANT.tiling.consumers
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    S_ROW: gl.constexpr = gl.SliceLayout(1, S_LAYOUT)
    zero = gl.zeros([ROWS, BLOCK_N], gl.float32, S_LAYOUT)
    if VARIANT.tiling.named_barriers and W == CONSUMERS - 1:
        hardware_arrive(TURN, PAIR)  # consumer 0 begins

    row, rows, _position, num_keys, head, _first_key, _low, top, part = take_tile(tiles, 0, VARIANT)
    if row >= 0:
        fill = 0  # of what x holds
        n = 0
        mbarrier.wait(q_full.index(W), 0)
        wait_fill(keys, fill, True, VARIANT)
        held_q = held_queries(queries, W, zero, VARIANT)
        take_turn(W, VARIANT)
        s = issue_scores(queries, W, keys, fill, zero, held_q, VARIANT)
        pass_turn(W, VARIANT)
        s = warpgroup_mma_wait(0, deps=(s,))
        free_key(keys, fill, True, VARIANT)
        x, m = last_scores(s, scale, top * BLOCK_N, num_keys, S_ROW)
        num_more = top
        shrink = gl.full([ROWS], 1.0, gl.float32, S_ROW)
        acc = empty_output(VARIANT)
        sums = lane_sum(zero)

        more = True
        while more:
            buffer = (n % Q_BUFFERS) * CONSUMERS + W
            wait_fill(keys, fill + 1, num_more > 0, VARIANT)
            for i in range(num_more):
                x, shrink, m, acc, sums = step_full(
                    queries, buffer, held_q, keys, values, fill, i, num_more, x, shrink, m, acc, sums, zero, scale,
                    dtype, W, VARIANT,
                )  # fmt: skip
                fill += 1

            # tile border: the last P V of this tile beside S of the next tile's first block
            mbarrier.arrive(q_free.index(buffer), count=1)
            n += 1
            next_row, next_rows, _position, num_keys, next_head, _first_key, _low, top, part = take_tile(
                tiles, n, VARIANT
            )
            # If there is none, S is computed from stale shared memory and dropped: cheaper than a branch around wgmma.
            more = next_row >= 0
            num_more = top
            held = fill
            fill += 1
            buffer = (n % Q_BUFFERS) * CONSUMERS + W
            mbarrier.wait(q_full.index(buffer), (n // Q_BUFFERS) & 1, pred=more)
            wait_fill(keys, fill, more, VARIANT)
            held_q = held_queries(queries, buffer, zero, VARIANT)
            take_turn(W, VARIANT)
            s = issue_scores(queries, buffer, keys, fill, zero, held_q, VARIANT)
            pass_turn(W, VARIANT)
            acc, sums = add_block(x, shrink, sums, acc, values, held, dtype, VARIANT)
            total = gl.sum(sums, axis=1)
            m_done = m
            s = warpgroup_mma_wait(VARIANT.behind, deps=(s,))
            free_key(keys, fill, more, VARIANT)
            x, m = last_scores(s, scale, top * BLOCK_N, num_keys, S_ROW)
            shrink = gl.full([ROWS], 1.0, gl.float32, S_ROW)
            wait_fill(values, held, True, VARIANT)  # cannot block: for ptxas
            acc = wait_output(acc, VARIANT)
            free_value(values, held, VARIANT)
            finish_tile(result, row, rows, head, part, acc, m_done, total, W, STORE, VARIANT)
            acc = empty_output(VARIANT)
            sums = lane_sum(zero)
            row = next_row
            rows = next_rows
            head = next_head
