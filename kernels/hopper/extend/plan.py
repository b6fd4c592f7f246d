"""The plan of `gluon.extend.hopper`: row blocks in the order of work, and the keys of long ones split into parts.

A chunk of a few hundred tokens makes fewer tiles than the GPU has multiprocessors, and its context may be 100,000 keys
long: then tiles are cut along their keys, so that all multiprocessors end at about the same time. Only the device
has the contexts, so the device decides; the host's bounds say whether it is asked, and how large the scratch is.

The plan holds two lists as in schedule.py, HEADER integers before each: row blocks, then what tiles are made of:
row blocks and parts. Items end with a place in the scratch: of a row block's first part, of a part, or -1. Then come
four integers a row block that is split: first query row, rows, place and number of its parts; the first header's 3
says how many there are.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
# The signatures of jitted functions are Triton's: only their constexpr parameters are annotated.

import triton
import triton.language as tl

MOST_TO_GIVE = tl.constexpr(2)  # parts of a tile that gives: over 8 parts gifts cost 1-3 % (H200)


@triton.jit
def store_item(item_ptr, row, rows, position, keys, sequence, begin, end, place, mask):
    """One item of a list for each element, see schedule.py."""
    tl.store(item_ptr, row, mask=mask)
    tl.store(item_ptr + 1, rows, mask=mask)
    tl.store(item_ptr + 2, position, mask=mask)
    tl.store(item_ptr + 3, keys, mask=mask)
    tl.store(item_ptr + 4, sequence, mask=mask)
    tl.store(item_ptr + 5, begin, mask=mask)
    tl.store(item_ptr + 6, end, mask=mask)
    tl.store(item_ptr + 7, place, mask=mask)


@triton.jit
def place_blocks(
    plan_ptr, cu_seqlens_q_ptr, context_lens_ptr, spans_ptr, num_seqs, window, sequence, chunk,
    PLAN_HEADER: tl.constexpr, PLAN_ITEM: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCKS: tl.constexpr,
    SEQS: tl.constexpr, HAS_WINDOW: tl.constexpr, HAS_SPANS: tl.constexpr,
):  # fmt: skip
    """BLOCKS row blocks (of BLOCK_Q queries) of one sequence, each written to its place.

    Before a block come those of longer contexts, of earlier sequences as long, and the later ones of its own sequence:
    heavy ones first, and those that share keys side by side.
    """
    blocks = chunk * BLOCKS + tl.arange(0, BLOCKS)
    first_row = tl.load(cu_seqlens_q_ptr + sequence)
    num_rows = tl.load(cu_seqlens_q_ptr + sequence + 1) - first_row
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
    if (sequence == 0) & (chunk == 0):
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
    zeros = tl.zeros_like(position)
    store_item(
        plan_ptr + PLAN_HEADER + place * PLAN_ITEM, first_row + start_row, tl.minimum(num_rows - start_row, BLOCK_Q),
        position, zeros + num_keys, zeros + sequence, begin, end, zeros - 1, start_row < num_rows,
    )  # fmt: skip


@triton.jit
def choose_parts(
    lengths, listed, index, num_blocks, max_parts, num_heads, num_processors,
    CHOICES: tl.constexpr, PART_COST: tl.constexpr, COMBINE_COST: tl.constexpr,
):  # fmt: skip
    """Choose how row blocks of these lengths (in key blocks) are split.

    Returns the first block that is split, the keys of a part, and the fraction of its keys that each gives away.

    A choice: how many parts the longest tile has, up to 24 one by one. The last quarter leaves whole waves of tiles
    whole, and splits the rest. A gift is the first keys of each tile of the last wave, for the processors that would
    have no tile in it. Time in blocks of keys.
    """
    choice = tl.arange(0, CHOICES)
    at = choice - 3 * CHOICES // 4
    # Below 3/8 of the choices 1, 2, 3 ... parts; up to 3/4 six more each time; then 1, 2, 3 ... of what waves leave.
    parts = tl.where(
        at >= 0, at + 1, tl.where(at < -3 * CHOICES // 8, choice + 1, (choice + 1) * 6 - 15 * CHOICES // 8)
    )
    front = tl.where(at >= 0, num_blocks * num_heads // num_processors * num_processors // num_heads, 0)
    limits = tl.maximum((tl.max(lengths, axis=0) + parts - 1) // parts, 1)
    is_tail = (index[None, :] >= front[:, None]) & listed[None, :]
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
    big = big_blocks.to(tl.float32) / tl.maximum(big_parts, 1)
    least = tail_blocks * share
    rest = (tl.sum(lengths, axis=0) - tail_blocks) * share + num_parts * share * PART_COST
    time = tl.maximum(waves * big, tl.where(tail_blocks > 0, limits, 0).to(tl.float32))
    time = tl.maximum(time, least) + rest + tl.where(num_split > 0, COMBINE_COST, 0.0)
    time = tl.where(num_split <= max_parts, time, float("inf"))

    tail_tiles = tl.sum(is_tail.to(tl.int32), axis=1)
    tail_parts = tl.sum(tl.where(is_tail, counts, 0), axis=1)
    taken = (front + big_parts) * num_heads
    idle = (taken + num_processors - 1) // num_processors * num_processors - taken
    queue = (tail_tiles * num_heads + idle - 1) // tl.maximum(idle, 1)  # gifts, one after another
    length = tail_blocks.to(tl.float32) / tl.maximum(tail_tiles, 1)
    gift = tl.floor((length + parts * PART_COST * (1.0 - queue)) / (parts * queue + 1.0))
    given = gift / tl.maximum(length, 1.0)
    big = big * (1.0 - given)
    gift_time = tl.maximum(waves * big, (waves - 1.0) * big + queue * (gift + PART_COST) - PART_COST)
    gift_time = tl.maximum(gift_time, least) + rest + COMBINE_COST
    can_give = (
        (parts <= MOST_TO_GIVE)
        & (idle > 0)
        & (gift >= 1.0)
        & (tail_parts == big_parts)
        & (tail_parts + tail_tiles <= max_parts)
    )
    gift_time = tl.where(can_give, gift_time, float("inf"))

    best = tl.min(tl.minimum(time, gift_time), axis=0)
    chosen = tl.min(tl.where(tl.minimum(time, gift_time) == best, choice, CHOICES), axis=0)
    is_chosen = choice == chosen
    limit = tl.sum(tl.where(is_chosen, limits, 0), axis=0)
    first_tail = tl.sum(tl.where(is_chosen, front, 0), axis=0)
    share_given = tl.sum(tl.where(is_chosen & (gift_time < time), given, 0.0), axis=0)
    return first_tail, limit, share_given


@triton.jit
def split_blocks(
    plan_ptr, max_blocks, max_parts, num_heads, num_processors,
    PLAN_HEADER: tl.constexpr, PLAN_ITEM: tl.constexpr, BLOCK_N: tl.constexpr, WIDTH: tl.constexpr,
    CHOICES: tl.constexpr, PART_COST: tl.constexpr, COMBINE_COST: tl.constexpr,
):  # fmt: skip
    """Reads the row blocks (at most WIDTH), chooses how they are split, and writes the list of parts, gifts last."""
    index = tl.arange(0, WIDTH)
    num_blocks = tl.load(plan_ptr + 2)
    listed = index < num_blocks
    item_ptr = plan_ptr + PLAN_HEADER + index * PLAN_ITEM
    row = tl.load(item_ptr, mask=listed, other=0)
    rows = tl.load(item_ptr + 1, mask=listed, other=0)
    position = tl.load(item_ptr + 2, mask=listed, other=0)
    keys = tl.load(item_ptr + 3, mask=listed, other=0)
    sequence = tl.load(item_ptr + 4, mask=listed, other=0)
    begin = tl.load(item_ptr + 5, mask=listed, other=0)
    end = tl.load(item_ptr + 6, mask=listed, other=0)
    first_block = begin // BLOCK_N
    lengths = tl.where(listed, (end - 1) // BLOCK_N + 1 - first_block, 0)
    first_tail, limit, share_given = choose_parts(
        lengths, listed, index, num_blocks, max_parts, num_heads, num_processors, CHOICES, PART_COST, COMBINE_COST
    )

    is_tail = index >= first_tail
    gift = tl.where(is_tail, (lengths * share_given).to(tl.int32), 0)
    has_gift = (gift > 0).to(tl.int32)
    kept = tl.where(is_tail, (lengths + limit - 1) // limit, listed.to(tl.int32))  # parts that are no gift
    count = kept + has_gift
    place = tl.cumsum(kept, axis=0) - kept
    gift_place = tl.sum(kept, axis=0) + tl.cumsum(has_gift, axis=0) - has_gift
    in_scratch = tl.where(count > 1, count, 0)
    slot = tl.where(count > 1, tl.cumsum(in_scratch, axis=0) - in_scratch, -1)
    is_split = (count > 1).to(tl.int32)
    list_ptr = plan_ptr + PLAN_HEADER + max_blocks * PLAN_ITEM
    split_ptr = list_ptr + PLAN_HEADER + (max_blocks + max_parts) * PLAN_ITEM + (tl.cumsum(is_split, axis=0) - 1) * 4
    tl.store(item_ptr + 7, slot, mask=listed)
    tl.store(plan_ptr + 3, tl.sum(is_split, axis=0))
    tl.store(split_ptr, row, mask=count > 1)
    tl.store(split_ptr + 1, rows, mask=count > 1)
    tl.store(split_ptr + 2, slot, mask=count > 1)
    tl.store(split_ptr + 3, count, mask=count > 1)

    tl.store(list_ptr, 0)
    tl.store(list_ptr + 2, tl.sum(count, axis=0))
    part_ptr = list_ptr + PLAN_HEADER + place * PLAN_ITEM
    most = tl.max(kept, axis=0)
    blocks = lengths - gift
    for part in range(0, most):
        # part 0 has the last keys; parts of a tile differ by one block
        low = first_block + gift + blocks * (kept - 1 - part) // tl.maximum(kept, 1)
        high = first_block + gift + blocks * (kept - part) // tl.maximum(kept, 1)
        store_item(
            part_ptr + part * PLAN_ITEM, row, rows, position, keys, sequence, tl.maximum(begin, low * BLOCK_N),
            tl.minimum(end, high * BLOCK_N), tl.where(slot < 0, -1, slot + part), listed & (part < kept),
        )  # fmt: skip
    store_item(
        list_ptr + PLAN_HEADER + gift_place * PLAN_ITEM, row, rows, position, keys, sequence, begin,
        tl.minimum(end, (first_block + gift) * BLOCK_N), slot + kept, gift > 0,
    )  # fmt: skip


@triton.jit(do_not_specialize=["num_seqs", "window"])
def hallmark_gluon_extend_plan(
    plan_ptr, cu_seqlens_q_ptr, context_lens_ptr, spans_ptr, num_seqs, window,
    PLAN_HEADER: tl.constexpr, PLAN_ITEM: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCKS: tl.constexpr,
    SEQS: tl.constexpr, HAS_WINDOW: tl.constexpr, HAS_SPANS: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """One program: BLOCKS row blocks (of BLOCK_Q queries) of one sequence, each written to its place."""
    if OVERLAPS:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    sequence = tl.program_id(0)
    chunk = tl.program_id(1)
    num_rows = tl.load(cu_seqlens_q_ptr + sequence + 1) - tl.load(cu_seqlens_q_ptr + sequence)
    if (chunk * BLOCKS * BLOCK_Q < num_rows) | ((sequence == 0) & (chunk == 0)):
        place_blocks(
            plan_ptr, cu_seqlens_q_ptr, context_lens_ptr, spans_ptr, num_seqs, window, sequence, chunk,
            PLAN_HEADER, PLAN_ITEM, BLOCK_Q, BLOCKS, SEQS, HAS_WINDOW, HAS_SPANS,
        )  # fmt: skip


@triton.jit(do_not_specialize=["num_seqs", "window", "max_blocks", "max_parts", "num_heads", "num_processors"])
def hallmark_gluon_extend_split(
    plan_ptr, cu_seqlens_q_ptr, context_lens_ptr, spans_ptr, num_seqs, window, max_blocks, max_parts, num_heads,
    num_processors,
    PLAN_HEADER: tl.constexpr, PLAN_ITEM: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCKS: tl.constexpr,
    SEQS: tl.constexpr, HAS_WINDOW: tl.constexpr, HAS_SPANS: tl.constexpr, BLOCK_N: tl.constexpr, WIDTH: tl.constexpr,
    CHOICES: tl.constexpr, PART_COST: tl.constexpr, COMBINE_COST: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """One program: `split_blocks`, after it has listed the row blocks of num_seqs sequences: 0 where the plan has."""
    if OVERLAPS:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    for sequence in range(num_seqs):
        num_rows = tl.load(cu_seqlens_q_ptr + sequence + 1) - tl.load(cu_seqlens_q_ptr + sequence)
        for chunk in range(tl.maximum(tl.cdiv(num_rows, BLOCKS * BLOCK_Q), 1)):
            place_blocks(
                plan_ptr, cu_seqlens_q_ptr, context_lens_ptr, spans_ptr, num_seqs, window, sequence, chunk,
                PLAN_HEADER, PLAN_ITEM, BLOCK_Q, BLOCKS, SEQS, HAS_WINDOW, HAS_SPANS,
            )  # fmt: skip
    tl.debug_barrier()  # what this program has written it may now read
    split_blocks(
        plan_ptr, max_blocks, max_parts, num_heads, num_processors,
        PLAN_HEADER, PLAN_ITEM, BLOCK_N, WIDTH, CHOICES, PART_COST, COMBINE_COST,
    )  # fmt: skip


_LOG2E: tl.constexpr = tl.constexpr(1.4426950408889634)


@triton.jit(do_not_specialize=["stride_row", "stride_head", "max_blocks", "max_parts", "num_heads"])
def hallmark_gluon_extend_combine(
    plan_ptr, parts_ptr, logs_ptr, out_ptr, sinks_ptr, stride_row, stride_head, max_blocks, max_parts, num_heads,
    PLAN_HEADER: tl.constexpr, PLAN_ITEM: tl.constexpr, TILE_ROWS: tl.constexpr, ROWS: tl.constexpr,
    PARTS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, PACK: tl.constexpr, HAS_SINKS: tl.constexpr,
    IS_ALIGNED: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """One program: ROWS rows of one row block that is split, of one head (PACK > 1: of one KV head).

    The loads of PARTS parts depend on nothing: one wait for memory. IS_ALIGNED: strides of out are multiples of 8.

    parts_ptr  [parts, num_heads, TILE_ROWS, BLOCK_D] fp32, each row divided by its own sum of weights; only the first
               HEAD_DIM columns are read
    logs_ptr   [parts, num_heads, TILE_ROWS] fp32: log2 of that sum; -inf for a row that saw no key
    """
    if OVERLAPS:
        tl.extra.cuda.gdc_launch_dependents()
    # Not from L1. The plan may be read before the wait: the launch before this one had waited for it when it let this
    # one start. Some programs wait even if nothing is split: this launch must not end before the one before.
    head = tl.program_id(2)
    num_split = tl.load(plan_ptr + 3, cache_modifier=".cg")
    is_split = tl.program_id(0) < num_split
    split_ptr = plan_ptr + 2 * PLAN_HEADER + (2 * max_blocks + max_parts) * PLAN_ITEM + tl.program_id(0) * 4
    first_row = tl.load(split_ptr, mask=is_split, other=0, cache_modifier=".cg")
    num_rows = tl.load(split_ptr + 1, mask=is_split, other=0, cache_modifier=".cg") * PACK
    place = tl.load(split_ptr + 2, mask=is_split, other=0, cache_modifier=".cg")
    num_parts = tl.load(split_ptr + 3, mask=is_split, other=0, cache_modifier=".cg")
    if OVERLAPS:  # noqa: SIM102 -- the outer one is decided by the compiler
        if tl.program_id(0) < tl.maximum(num_split, 1):
            tl.extra.cuda.gdc_wait()
    if tl.program_id(1) * ROWS >= num_rows:
        return
    rows = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    dims = tl.arange(0, BLOCK_D)
    stride_part = num_heads * TILE_ROWS
    first = place * stride_part + head * TILE_ROWS

    largest = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    if HAS_SINKS:
        largest = tl.load(sinks_ptr + head * PACK + rows % PACK) * _LOG2E
        total = tl.where(largest > float("-inf"), 1.0, 0.0)
    is_dim = (dims < HEAD_DIM)[None, :]
    acc = tl.zeros([ROWS, BLOCK_D], tl.float32)
    for start in range(0, num_parts, PARTS):
        for part in tl.static_range(PARTS):
            is_read = (rows < num_rows) & (start + part < num_parts)
            at = first + (start + part) * stride_part + rows
            log = tl.load(logs_ptr + at, mask=is_read, other=float("-inf"))
            value_ptr = parts_ptr + at[:, None] * BLOCK_D + dims[None, :]
            value = tl.load(value_ptr, mask=is_read[:, None] & is_dim, other=0.0)
            new_largest = tl.maximum(largest, log)
            # A row that has seen no key yet stays at -inf: 0 in its place keeps exp2(-inf + inf) from being NaN.
            reference = tl.where(new_largest == float("-inf"), 0.0, new_largest)
            weight = tl.exp2(log - reference)
            decay = tl.exp2(largest - reference)
            total = total * decay + weight
            acc = acc * decay[:, None] + weight[:, None] * value
            largest = new_largest
    out = acc / tl.where(total == 0.0, 1.0, total)[:, None]
    offset = (first_row + rows // PACK).to(tl.int64) * stride_row + (head * PACK + rows % PACK).to(
        tl.int64
    ) * stride_head
    if IS_ALIGNED:
        offset = tl.multiple_of(offset, [8])
    mask = (rows < num_rows)[:, None] & is_dim
    tl.store(out_ptr + offset[:, None] + dims[None, :], out.to(out_ptr.dtype.element_ty), mask=mask)
