"""The consumers of `gluon.ordered.hopper`: those of consumer_ahead.py, which begin anew at every part's last block.

A row's bits depend on its query and on the keys that it sees, because everything else in its tile changes nothing:

  masks          blocks begin at absolute multiples of block_n. A block of which a row sees no key has weights of 0. As
                 a row's first it leaves a maximum of -1e30, from which the next one goes on as from nothing:
                 2**(-1e30 - m) is 0, and 0 times 0 is added. Later ones, under a window, leave maximum, sums and O as
                 they were: the factor is 1, and wgmma adds zeros. Values past the last key arrive as zeros.
  lazy maxima    a maximum follows the scores of its row from its first block on; so rescaling is alike in all
                 phases, and in a warp of which another row asks for it the factor of this row is 1.
  masked loops   where a row sees a whole block, the loop with masks and the one without compute the same.
  sums           each lane adds its own columns, lanes are added when a part ends: an order of registers.
  parts          begin at absolute multiples of a part's keys, and are folded from the last to the first (fold.py), by
                 the tile itself or from the scratch. A part without a key of a row leaves T and A to the bit. Even a
                 row's only part is folded, into M = -1e30, T = 0 and A = 0.
  sinks          join the sum once, behind the last fold.
  the plan       decides who folds, never where a part begins.
  the tile       of one consumer or two, packed or not: each row has its own lanes, and every variant of a head dim has
                 the same block_n, widths and rescaling.

That both products give a row the same bits wherever it stands in a tile was measured (H200).
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
# The signatures of jitted functions are Triton's: only their constexpr parameters are annotated.

from triton.experimental.gluon import jit
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma_wait

from kernels.hopper.blocks import (
    empty_output,
    first_product,
    held_queries,
    issue_scores,
    num_masked,
    own_blocks,
    skip_keys,
    skip_values,
    wait_output,
)
from kernels.hopper.consumer_ahead import add_block
from kernels.hopper.ordered.fold import UNSEEN, fold, fold_if_last, sink_of, store_part, store_whole
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
from kernels.hopper.softmax import first_scores, lane_sum, next_scores


@jit
def begins_part(block, last, VARIANT: gl.constexpr):
    """Return whether a block is the last of a part, so the first that is met of it, and not of the tile."""
    return (block % VARIANT.part_blocks == VARIANT.part_blocks - 1) & (block < last)


@jit
def step(
    queries, buffer, held_q, keys, values, fill, i, num_more, last, x, shrink, m, acc, sums, zero, scale,
    softcap_scale, position, index, visible, window, dtype: gl.constexpr, MASKED: gl.constexpr, W: gl.constexpr,
    VARIANT: gl.constexpr,
):  # fmt: skip
    """One steady step, see the head of consumer_ahead.py. MASKED: 0 never, 1 where the block asks for it, 2 always."""
    FORM: gl.constexpr = VARIANT.form
    take_turn(W, FORM)
    s = issue_scores(queries, buffer, keys, fill + 1, zero, held_q, FORM)
    pass_turn(W, FORM)
    acc, sums = add_block(x, shrink, sums, acc, values, fill, dtype, FORM)
    if FORM.tiling.early_waits:
        wait_fill(keys, fill + 2, i + 1 < num_more, FORM)
    s = warpgroup_mma_wait(FORM.behind, deps=(s,))
    free_key(keys, fill + 1, True, FORM)
    next_block = last - 1 - i
    begins = begins_part(next_block, last, VARIANT)
    reference = gl.where(gl.full(m.shape, 0, gl.int32, m.type.layout) + begins.to(gl.int32) > 0, UNSEEN, m)
    x, m_new = next_scores(
        s, reference, scale, softcap_scale, position, W * ROWS // FORM.pack, index, visible, window, next_block,
        MASKED, FORM,
    )  # fmt: skip
    shrink = gl.exp2(reference - m_new)
    if not FORM.tiling.early_waits:  # ptxas moves no maximum across a spin loop
        wait_fill(keys, fill + 2, i + 1 < num_more, FORM)
    acc = wait_output(acc, FORM)
    free_value(values, fill, FORM)
    return x, shrink, m_new, m, acc, sums


@jit
def fold_where_one_ends(block, last, acc, sums, m, running, memory, W: gl.constexpr, VARIANT: gl.constexpr):
    """Where a part begins with `block`, fold the one before, of maxima m: O and sums are zeros then."""
    FORM: gl.constexpr = VARIANT.form
    largest, total = running
    if begins_part(block, last, VARIANT):
        has_total = block // VARIANT.part_blocks + 1 < last // VARIANT.part_blocks
        _, largest, total = fold(acc, m, sums, largest, total, has_total, True, memory, W, FORM, VARIANT.totals_shared)
        acc = empty_output(FORM)
        sums = gl.full(sums.shape, 0.0, gl.float32, sums.type.layout)
    return acc, sums, (largest, total)


@jit
def steps(
    queries, buffer, held_q, keys, values, fill, start, stop, num_more, last, x, shrink, m, running, acc, sums, zero,
    scale, softcap_scale, position, index, visible, window, memory, dtype: gl.constexpr, MASKED: gl.constexpr,
    W: gl.constexpr, VARIANT: gl.constexpr,
):  # fmt: skip
    """The steps from `start` to `stop` of a tile, and what they end of parts folded.

    Over pages each part has a loop of its own: chunks of 2048 over 8k are 2 % faster than with a branch in every step.
    Prompts are faster with the branch, 8k by 13 % (H200).
    """
    FORM: gl.constexpr = VARIANT.form
    if FORM.page_size == 0:
        for i in range(start, stop):
            x, shrink, m, m_before, acc, sums = step(
                queries, buffer, held_q, keys, values, fill, i, num_more, last, x, shrink, m, acc, sums, zero, scale,
                softcap_scale, position, index, visible, window, dtype, MASKED, W, VARIANT,
            )  # fmt: skip
            acc, sums, running = fold_where_one_ends(
                last - 1 - i, last, acc, sums, m_before, running, memory, W, VARIANT
            )
            fill += 1
    else:
        i = start
        while i < stop:
            end = gl.minimum(stop, i + (last - i) % VARIANT.part_blocks + 1)
            m_before = m
            for j in range(i, end):
                x, shrink, m, m_before, acc, sums = step(
                    queries, buffer, held_q, keys, values, fill, j, num_more, last, x, shrink, m, acc, sums, zero,
                    scale, softcap_scale, position, index, visible, window, dtype, MASKED, W, VARIANT,
                )  # fmt: skip
                fill += 1
            i = end
            acc, sums, running = fold_where_one_ends(last - i, last, acc, sums, m_before, running, memory, W, VARIANT)
    return fill, x, shrink, m, running, acc, sums


@jit
def nothing(ROW: gl.constexpr):
    """M and T before the first part."""
    return gl.full([ROWS], UNSEEN, gl.float32, ROW), gl.full([ROWS], 0.0, gl.float32, ROW)


@jit
def finish(
    result, row, rows, head, part, acc, m, sums, running, has_total, sinks, sink, memory, W: gl.constexpr,
    STORE: gl.constexpr, VARIANT: gl.constexpr,
):  # fmt: skip
    """The tile's last part: stored as it is, or folded with what was before and stored as O."""
    FORM: gl.constexpr = VARIANT.form
    largest, total = running
    if FORM.parts:
        if part >= 0:
            store_part(result, rows, head, part, acc, m, sums, W, FORM)
            if VARIANT.folds_last:
                fold_if_last(result, sinks, row, rows, head, part, VARIANT)
        else:
            acc, largest, total = fold(
                acc, m, sums, largest, total, has_total, False, memory, W, FORM, VARIANT.totals_shared
            )
            store_whole(result, row, rows, head, acc, largest, total, sink, W, STORE, VARIANT)
    else:
        acc, largest, total = fold(
            acc, m, sums, largest, total, has_total, False, memory, W, FORM, VARIANT.totals_shared
        )
        store_whole(result, row, rows, head, acc, largest, total, sink, W, STORE, VARIANT)


@jit
def consume_parts(
    result, sinks, spans, scale, softcap_scale, window, tiles, queries, keys, values, memory,
    W: gl.constexpr, STORE: gl.constexpr, VARIANT: gl.constexpr,
):  # fmt: skip
    """The role of consumer W: ROWS query rows of every tile.

    result  the output, its strides of a row and of a head; scratch of parts and of their (m, l), heads of tiles, rows
            of a part
    """
    FORM: gl.constexpr = VARIANT.form
    q_smem, q_full, q_free = queries
    dtype: gl.constexpr = q_smem[0].dtype
    BLOCK_N: gl.constexpr = FORM.tiling.block_n
    PART_BLOCKS: gl.constexpr = VARIANT.part_blocks
    Q_BUFFERS: gl.constexpr = FORM.tiling.q_buffers
    CONSUMERS: gl.constexpr = FORM.tiling.consumers
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    S_ROW: gl.constexpr = gl.SliceLayout(1, S_LAYOUT)
    index = (W * ROWS + gl.arange(0, ROWS, layout=S_ROW)) // FORM.pack
    zero = gl.zeros([ROWS, BLOCK_N], gl.float32, S_LAYOUT)
    if FORM.tiling.named_barriers and W == CONSUMERS - 1:
        hardware_arrive(TURN, PAIR)  # consumer 0 begins

    row, rows, position, num_keys, head, _first_key, low, top, part = take_tile(tiles, 0, FORM)
    low = first_of(low, FORM)
    if row >= 0:
        last, lowest = own_blocks(position, low, top, window, W, FORM)
        num_more = last - lowest  # blocks after the first
        num_below = lowest - low
        visible = (spans, row, rows, num_keys, index)
        sink = sink_of(sinks, head, S_ROW, FORM, VARIANT.group)
        s, held_q, fill = first_product(queries, keys, values, top - last, zero, W, FORM)  # fill: of what x holds
        n = 0
        first_col = last * BLOCK_N
        x, m = first_scores(s, scale, softcap_scale, position + index, visible, window, first_col, S_ROW, FORM)
        shrink = gl.full([ROWS], 1.0, gl.float32, S_ROW)
        acc = empty_output(FORM)
        sums = lane_sum(zero)
        running = nothing(S_ROW)

        more = True
        while more:
            buffer = (n % Q_BUFFERS) * CONSUMERS + W
            wait_fill(keys, fill + 1, num_more > 0, FORM)
            first_whole = 0  # of the steps below: the first of a block that needs no mask
            if FORM.masks_apart:
                first_whole = num_masked(position, last, num_more, W, FORM)
                fill, x, shrink, m, running, acc, sums = steps(
                    queries, buffer, held_q, keys, values, fill, 0, first_whole, num_more, last, x, shrink, m, running,
                    acc, sums, zero, scale, softcap_scale, position, index, visible, window, memory, dtype, 2, W,
                    VARIANT,
                )  # fmt: skip
            fill, x, shrink, m, running, acc, sums = steps(
                queries, buffer, held_q, keys, values, fill, first_whole, num_more, num_more, last, x, shrink, m,
                running, acc, sums, zero, scale, softcap_scale, position, index, visible, window, memory, dtype,
                0 if FORM.masks_apart else 1, W, VARIANT,
            )  # fmt: skip

            # tile border: the last P V of this tile beside S of the next tile's first block
            mbarrier.arrive(q_free.index(buffer), count=1)
            n += 1
            last_done = last
            lowest_done = lowest
            taken = take_tile(tiles, n, FORM)
            next_row, next_rows, position, num_keys, next_head, _first_key, low, top, next_part = taken
            low = first_of(low, FORM)
            # If there is none, S is computed from stale shared memory and dropped: cheaper than a branch around wgmma.
            more = next_row >= 0
            last, lowest = own_blocks(position, low, top, window, W, FORM)
            num_more = last - lowest
            visible = (spans, next_row, next_rows, num_keys, index)
            held = fill
            fill += 1
            if FORM.skips:
                fill = skip_keys(keys, fill, num_below + gl.where(more, top - last, 0), W, FORM)
            num_below = lowest - low
            buffer = (n % Q_BUFFERS) * CONSUMERS + W
            mbarrier.wait(q_full.index(buffer), (n // Q_BUFFERS) & 1, pred=more)
            wait_fill(keys, fill, more, FORM)
            held_q = held_queries(queries, buffer, zero, FORM)
            take_turn(W, FORM)
            s = issue_scores(queries, buffer, keys, fill, zero, held_q, FORM)
            pass_turn(W, FORM)
            acc, sums = add_block(x, shrink, sums, acc, values, held, dtype, FORM)
            m_done = m
            s = warpgroup_mma_wait(FORM.behind, deps=(s,))
            free_key(keys, fill, more, FORM)
            first_col = last * BLOCK_N
            x, m = first_scores(s, scale, softcap_scale, position + index, visible, window, first_col, S_ROW, FORM)
            shrink = gl.full([ROWS], 1.0, gl.float32, S_ROW)
            wait_fill(values, held, True, FORM)  # cannot block: for ptxas
            acc = wait_output(acc, FORM)
            free_value(values, held, FORM)
            has_total = lowest_done // PART_BLOCKS < last_done // PART_BLOCKS
            finish(
                result,
                row,
                rows,
                head,
                part,
                acc,
                m_done,
                sums,
                running,
                has_total,
                sinks,
                sink,
                memory,
                W,
                STORE,
                VARIANT,
            )
            if FORM.skips:  # only now: freed before the P V above, skipped values could deadlock a two-stage ring
                skip_values(values, held + 1, fill, FORM)
            acc = empty_output(FORM)
            sums = lane_sum(zero)
            running = nothing(S_ROW)
            sink = sink_of(sinks, next_head, S_ROW, FORM, VARIANT.group)
            row = next_row
            rows = next_rows
            head = next_head
            part = next_part
