"""The plan of `gluon.extend.hopper`: row blocks in the order of work, and the keys of long ones split into parts.

A chunk of a few hundred tokens makes fewer tiles than the GPU has multiprocessors, and its context may be 100,000 keys
long: then tiles are cut along their keys, so that all multiprocessors end at about the same time. Only the device
knows the contexts, so the device decides; the host's bounds say whether it is asked, and how large the scratch is.

The plan holds two lists as in gluon_schedule.py, HEADER integers before each: row blocks, then what tiles are made of:
row blocks and parts. Items end with a place in the scratch: of a row block's first part, of a part, or -1. Then come
four integers a row block that is split: first query row, rows, place and number of its parts; the first header's 3
says how many there are.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
# The signatures of jitted functions are Triton's: only their constexpr parameters are annotated.

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["num_seqs", "window"])
def hallmark_gluon_extend_plan(
    plan_ptr, cu_seqlens_q_ptr, context_lens_ptr, spans_ptr, num_seqs, window,
    PLAN_HEADER: tl.constexpr, PLAN_ITEM: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCKS: tl.constexpr,
    SEQS: tl.constexpr, HAS_WINDOW: tl.constexpr, HAS_SPANS: tl.constexpr,
):  # fmt: skip
    """One program: BLOCKS row blocks (of BLOCK_Q queries) of one sequence, each written to its place.

    Before a block come those of longer contexts, of earlier sequences as long, and the later ones of its own sequence:
    heavy ones first, and those that share keys side by side.
    """
    sequence = tl.program_id(0)
    blocks = tl.program_id(1) * BLOCKS + tl.arange(0, BLOCKS)
    is_first = (sequence == 0) & (tl.program_id(1) == 0)
    first_row = tl.load(cu_seqlens_q_ptr + sequence)
    num_rows = tl.load(cu_seqlens_q_ptr + sequence + 1) - first_row
    if (tl.program_id(1) * BLOCKS * BLOCK_Q >= num_rows) & (is_first == 0):
        return
    num_keys = tl.load(context_lens_ptr + sequence)
    start_row = blocks * BLOCK_Q
    position = num_keys - num_rows + start_row

    first_place = 0  # of the sequence
    num_blocks = 0
    for start in range(0, num_seqs, SEQS):
        others = start + tl.arange(0, SEQS)
        inside = others < num_seqs
        starts = tl.load(cu_seqlens_q_ptr + others, mask=inside, other=0)
        ends = tl.load(cu_seqlens_q_ptr + others + 1, mask=inside, other=0)
        contexts = tl.load(context_lens_ptr + others, mask=inside, other=0)
        counts = (ends - starts + BLOCK_Q - 1) // BLOCK_Q
        num_blocks += tl.sum(counts)
        is_before = (contexts > num_keys) | ((contexts == num_keys) & (others < sequence))
        first_place += tl.sum(tl.where(is_before, counts, 0))
    place = first_place + (num_rows + BLOCK_Q - 1) // BLOCK_Q - 1 - blocks
    if is_first:
        tl.store(plan_ptr, 0)
        tl.store(plan_ptr + 2, num_blocks)

    end = tl.minimum(position + BLOCK_Q, num_keys)
    begin = tl.maximum(position - window + 1, 0) if HAS_WINDOW else tl.zeros_like(position)
    if HAS_SPANS:  # the union over the tile's rows: a span widens what is read, not only what is seen
        queries = start_row[:, None] + tl.arange(0, BLOCK_Q)[None, :]
        is_row = queries < num_rows
        at_span = spans_ptr + (first_row + queries).to(tl.int64) * 2
        lo = tl.load(at_span, mask=is_row, other=0)
        hi = tl.minimum(tl.load(at_span + 1, mask=is_row, other=0), num_keys)
        end = tl.maximum(end, tl.max(tl.where(lo < hi, hi, 0), axis=1))
        begin = tl.minimum(begin, tl.maximum(tl.min(tl.where(lo < hi, lo, 2147483647), axis=1), 0))
    end = tl.maximum(end, 1)  # a tile without keys still has a block, all of it masked
    begin = tl.minimum(begin, end - 1)

    listed = start_row < num_rows
    item_ptr = plan_ptr + PLAN_HEADER + place * PLAN_ITEM
    tl.store(item_ptr, first_row + start_row, mask=listed)
    tl.store(item_ptr + 1, tl.minimum(num_rows - start_row, BLOCK_Q), mask=listed)
    tl.store(item_ptr + 2, position, mask=listed)
    tl.store(item_ptr + 3, tl.zeros_like(position) + num_keys, mask=listed)
    tl.store(item_ptr + 4, tl.zeros_like(position) + sequence, mask=listed)
    tl.store(item_ptr + 5, begin, mask=listed)
    tl.store(item_ptr + 6, end, mask=listed)
    tl.store(item_ptr + 7, tl.zeros_like(position) - 1, mask=listed)


@triton.jit(do_not_specialize=["max_blocks", "max_parts", "num_heads", "num_processors"])
def hallmark_gluon_extend_split(
    plan_ptr, max_blocks, max_parts, num_heads, num_processors,
    PLAN_HEADER: tl.constexpr, PLAN_ITEM: tl.constexpr, BLOCK_N: tl.constexpr, WIDTH: tl.constexpr,
    CHOICES: tl.constexpr, PART_COST: tl.constexpr, COMBINE_COST: tl.constexpr,
):  # fmt: skip
    """One program: reads the row blocks (at most WIDTH), chooses how long a part is, and writes the list of parts."""
    index = tl.arange(0, WIDTH)
    num_blocks = tl.load(plan_ptr + 2)
    listed = index < num_blocks
    item_ptr = plan_ptr + PLAN_HEADER + index * PLAN_ITEM
    begin = tl.load(item_ptr + 5, mask=listed, other=0)
    end = tl.load(item_ptr + 6, mask=listed, other=0)
    first_block = begin // BLOCK_N
    lengths = tl.where(listed, (end - 1) // BLOCK_N + 1 - first_block, 0)

    # A choice: how many parts the longest tile has, up to 24 one by one. The last quarter leaves whole waves of tiles
    # whole, and splits the rest. Time in blocks of keys.
    choice = tl.arange(0, CHOICES)
    at = choice - 3 * CHOICES // 4
    parts = tl.where(
        at >= 0, at + 2, tl.where(at < -3 * CHOICES // 8, choice + 1, (choice + 1) * 6 - 15 * CHOICES // 8)
    )
    front = tl.where(at >= 0, num_blocks * num_heads // num_processors * num_processors // num_heads, 0)
    limits = tl.maximum((tl.max(lengths, axis=0) + parts - 1) // parts, 1)
    is_tail = index[None, :] >= front[:, None]
    counts = tl.where(
        is_tail, (lengths[None, :] + limits[:, None] - 1) // limits[:, None], listed.to(tl.int32)[None, :]
    )
    num_parts = tl.sum(counts, axis=1)
    num_split = tl.sum(tl.where(counts > 1, counts, 0), axis=1)
    # Parts over half as long as the longest fill whole waves; shorter ones come after them, and fill gaps.
    is_big = is_tail & (lengths[None, :] * 2 > limits[:, None] * counts)
    big_parts = tl.sum(tl.where(is_big, counts, 0), axis=1)
    big_blocks = tl.sum(tl.where(is_big, lengths[None, :], 0), axis=1)
    tail_blocks = tl.sum(tl.where(is_tail, lengths[None, :], 0), axis=1)
    share = num_heads.to(tl.float32) / num_processors
    waves = ((big_parts * num_heads + num_processors - 1) // num_processors).to(tl.float32)
    time = tl.maximum(
        waves * big_blocks / tl.maximum(big_parts, 1), tl.where(tail_blocks > 0, limits, 0).to(tl.float32)
    )
    time = tl.maximum(time, tail_blocks * share) + (tl.sum(lengths, axis=0) - tail_blocks) * share
    time += num_parts * share * PART_COST + tl.where(num_split > 0, COMBINE_COST, 0.0)
    time = tl.where(num_split <= max_parts, time, float("inf"))
    chosen = tl.min(tl.where(time == tl.min(time, axis=0), choice, CHOICES), axis=0)
    limit = tl.sum(tl.where(choice == chosen, limits, 0), axis=0)
    first_tail = tl.sum(tl.where(choice == chosen, front, 0), axis=0)

    count = tl.where(index >= first_tail, (lengths + limit - 1) // limit, listed.to(tl.int32))
    place = tl.cumsum(count, axis=0) - count
    in_scratch = tl.where(count > 1, count, 0)
    slot = tl.cumsum(in_scratch, axis=0) - in_scratch
    tl.store(item_ptr + 7, tl.where(count > 1, slot, -1), mask=listed)
    list_ptr = plan_ptr + PLAN_HEADER + max_blocks * PLAN_ITEM
    tl.store(list_ptr, 0)
    tl.store(list_ptr + 2, tl.sum(count, axis=0))
    most = tl.max(count, axis=0)
    row = tl.load(item_ptr, mask=listed, other=0)
    rows = tl.load(item_ptr + 1, mask=listed, other=0)
    is_split = (count > 1).to(tl.int32)
    split_ptr = list_ptr + PLAN_HEADER + (max_blocks + max_parts) * PLAN_ITEM + (tl.cumsum(is_split, axis=0) - 1) * 4
    tl.store(split_ptr, row, mask=count > 1)
    tl.store(split_ptr + 1, rows, mask=count > 1)
    tl.store(split_ptr + 2, slot, mask=count > 1)
    tl.store(split_ptr + 3, count, mask=count > 1)
    tl.store(plan_ptr + 3, tl.sum(is_split, axis=0))
    position = tl.load(item_ptr + 2, mask=listed, other=0)
    keys = tl.load(item_ptr + 3, mask=listed, other=0)
    sequence = tl.load(item_ptr + 4, mask=listed, other=0)
    for part in range(0, most):
        # part 0 has the last keys; parts of a tile differ by one block
        low = first_block + lengths * (count - 1 - part) // tl.maximum(count, 1)
        high = first_block + lengths * (count - part) // tl.maximum(count, 1)
        mine = listed & (part < count)
        part_ptr = list_ptr + PLAN_HEADER + (place + part) * PLAN_ITEM
        tl.store(part_ptr, row, mask=mine)
        tl.store(part_ptr + 1, rows, mask=mine)
        tl.store(part_ptr + 2, position, mask=mine)
        tl.store(part_ptr + 3, keys, mask=mine)
        tl.store(part_ptr + 4, sequence, mask=mine)
        tl.store(part_ptr + 5, tl.maximum(begin, low * BLOCK_N), mask=mine)
        tl.store(part_ptr + 6, tl.minimum(end, high * BLOCK_N), mask=mine)
        tl.store(part_ptr + 7, tl.where(count > 1, slot + part, -1), mask=mine)
