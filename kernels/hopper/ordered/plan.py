"""The plan of `gluon.ordered.hopper` over pages, and the sum of the parts that it gives to programs of their own.

Row blocks are those of extend's plan. A block whose keys lie in several parts may be one tile, whose consumers fold the
parts as they go, or a tile for each part, whose results the last kernel folds. Both give the same bits, so what is
split may depend on the batch: blocks are split, in their order, as long as the scratch has room.

The plan holds two lists as in schedule.py, HEADER integers before each: row blocks, then tiles. Then come four integers
a row block that is split: first query row, rows, place of its first part and number of its parts; the first header's 3
says how many there are. Parts of a block have places one after another, from its last keys to its first. Then come
two integers a place, the first place and the number of its block's parts, and a ticket a place and head, 0 at first.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
# The signatures of jitted functions are Triton's: only their constexpr parameters are annotated.

import triton
import triton.language as tl

from kernels.hopper.extend.plan import store_item

_LOG2E: tl.constexpr = tl.constexpr(1.4426950408889634)
_UNSEEN: tl.constexpr = tl.constexpr(-1e30)  # as in fold.py


@triton.jit(do_not_specialize=["max_blocks", "max_parts", "num_heads"])
def hallmark_gluon_ordered_split(
    plan_ptr, max_blocks, max_parts, num_heads,
    PLAN_HEADER: tl.constexpr, PLAN_ITEM: tl.constexpr, PART_KEYS: tl.constexpr, WIDTH: tl.constexpr,
    PARTS: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """One program: the tiles of one row block. It reads WIDTH blocks at a time, and writes PARTS parts at a time."""
    if OVERLAPS:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    block = tl.program_id(0)
    num_blocks = tl.load(plan_ptr + 2)
    num_parts = 0  # of all blocks that would be split had the scratch no end
    num_tiles = 0
    num_split = 0
    place = 0  # of this block: the same numbers of the blocks before it
    tile = 0
    split = 0
    for start in range(0, num_blocks, WIDTH):
        others = start + tl.arange(0, WIDTH)
        listed = others < num_blocks
        item_ptr = plan_ptr + PLAN_HEADER + others * PLAN_ITEM
        begins = tl.load(item_ptr + 5, mask=listed, other=0)
        ends = tl.load(item_ptr + 6, mask=listed, other=1)
        counts = tl.where(listed, (ends - 1) // PART_KEYS - begins // PART_KEYS + 1, 0)
        wanted = tl.where(counts > 1, counts, 0)
        is_split = (counts > 1) & (num_parts + tl.cumsum(wanted, axis=0) <= max_parts)
        tiles = tl.where(is_split, counts, listed.to(tl.int32))
        is_before = others < block
        place += tl.sum(tl.where(is_before, wanted, 0), axis=0)
        tile += tl.sum(tl.where(is_before, tiles, 0), axis=0)
        split += tl.sum((is_before & is_split).to(tl.int32), axis=0)
        num_parts += tl.sum(wanted, axis=0)
        num_tiles += tl.sum(tiles, axis=0)
        num_split += tl.sum(is_split.to(tl.int32), axis=0)
    list_ptr = plan_ptr + PLAN_HEADER + max_blocks * PLAN_ITEM
    if block == 0:
        tl.store(list_ptr, 0)
        tl.store(list_ptr + 2, num_tiles)
        tl.store(plan_ptr + 3, num_split)
    if block < num_blocks:
        item_ptr = plan_ptr + PLAN_HEADER + block * PLAN_ITEM
        row = tl.load(item_ptr)
        rows = tl.load(item_ptr + 1)
        position = tl.load(item_ptr + 2)
        keys = tl.load(item_ptr + 3)
        sequence = tl.load(item_ptr + 4)
        begin = tl.load(item_ptr + 5)
        end = tl.load(item_ptr + 6)
        last = (end - 1) // PART_KEYS
        count = last - begin // PART_KEYS + 1
        tile_ptr = list_ptr + PLAN_HEADER + tile * PLAN_ITEM
        if (count > 1) & (place + count <= max_parts):
            split_ptr = list_ptr + PLAN_HEADER + (max_blocks + max_parts) * PLAN_ITEM + split * 4
            tl.store(split_ptr, row)
            tl.store(split_ptr + 1, rows)
            tl.store(split_ptr + 2, place)
            tl.store(split_ptr + 3, count)
            owner_ptr = list_ptr + PLAN_HEADER + (max_blocks + max_parts) * PLAN_ITEM + max_blocks * 4
            for start in range(0, num_heads, PARTS):
                head = start + tl.arange(0, PARTS)
                tl.store(owner_ptr + max_parts * 2 + place * num_heads + head, 0, mask=head < num_heads)
            for start in range(0, count, PARTS):
                owner = owner_ptr + (place + start + tl.arange(0, PARTS)) * 2
                tl.store(owner, place, mask=start + tl.arange(0, PARTS) < count)
                tl.store(owner + 1, count, mask=start + tl.arange(0, PARTS) < count)
                part = start + tl.arange(0, PARTS)
                first = (last - part) * PART_KEYS
                zeros = tl.zeros([PARTS], tl.int32)
                store_item(
                    tile_ptr + part * PLAN_ITEM, zeros + row, zeros + rows, zeros + position, zeros + keys,
                    zeros + sequence, tl.maximum(begin, first), tl.minimum(end, first + PART_KEYS), place + part,
                    part < count,
                )  # fmt: skip
        else:
            store_item(tile_ptr, row, rows, position, keys, sequence, begin, end, -1, count > 0)


@triton.jit
def reciprocal(x, ON_GPU: tl.constexpr):
    """Compute 1 / x as fold.py does; the interpreter, which knows no PTX, divides."""
    if ON_GPU:
        found = tl.inline_asm_elementwise("rcp.approx.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)
    else:
        found = 1.0 / tl.where(x > 0.0, x, 1.0)
    return found


@triton.jit(do_not_specialize=["stride_row", "stride_head", "max_blocks", "max_parts", "num_heads", "part_rows"])
def hallmark_gluon_ordered_combine(
    plan_ptr, parts_ptr, stats_ptr, out_ptr, sinks_ptr, stride_row, stride_head, max_blocks, max_parts, num_heads,
    part_rows,
    PLAN_HEADER: tl.constexpr, PLAN_ITEM: tl.constexpr, ROWS: tl.constexpr, PARTS: tl.constexpr,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, PACK: tl.constexpr, GROUP: tl.constexpr,
    HAS_SINKS: tl.constexpr, IS_ALIGNED: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """One program: ROWS rows of one row block that is split, of one head (PACK > 1: of one KV head).

    The arithmetic is that of fold.py. The loads of PARTS parts depend on nothing: one wait for memory.

    parts_ptr  [parts, num_heads, part_rows, BLOCK_D] fp32; only the first HEAD_DIM columns are read
    stats_ptr  [parts, num_heads, part_rows, 2] fp32: (m, l)
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
    stride_part = num_heads * part_rows
    first = place * stride_part + head * part_rows
    is_dim = (dims < HEAD_DIM)[None, :]
    largest = tl.full([ROWS], _UNSEEN, tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, BLOCK_D], tl.float32)
    for start in range(0, num_parts, PARTS):
        for part in tl.static_range(PARTS):
            is_read = (rows < num_rows) & (start + part < num_parts)
            at = (first + (start + part) * stride_part + rows).to(tl.int64)
            m = tl.load(stats_ptr + at * 2, mask=is_read, other=_UNSEEN)
            found = tl.load(stats_ptr + at * 2 + 1, mask=is_read, other=0.0)
            value_ptr = parts_ptr + at[:, None] * BLOCK_D + dims[None, :]
            value = tl.load(value_ptr, mask=is_read[:, None] & is_dim, other=0.0)
            new_largest = tl.maximum(largest, m)
            decay = tl.exp2(largest - new_largest)
            weight = tl.exp2(m - new_largest)
            total = tl.fma(found, weight, total * decay)
            acc = tl.fma(value, tl.broadcast_to(weight[:, None], [ROWS, BLOCK_D]), acc * decay[:, None])
            largest = new_largest
    factor = tl.full([ROWS], 1.0, tl.float32)
    if HAS_SINKS:
        sink = tl.load(sinks_ptr + head * GROUP + rows % PACK, mask=rows % PACK < GROUP, other=0.0) * _LOG2E
        with_sink = tl.maximum(largest, sink)
        factor = tl.exp2(largest - with_sink)
        total = tl.fma(total, factor, tl.exp2(sink - with_sink))
    factor = tl.where(total > 0.0, reciprocal(total, OVERLAPS), 0.0) * factor
    out = acc * factor[:, None]
    offset = (first_row + rows // PACK).to(tl.int64) * stride_row + (head * GROUP + rows % PACK).to(
        tl.int64
    ) * stride_head
    if IS_ALIGNED:
        offset = tl.multiple_of(offset, [8])
    mask = ((rows < num_rows) & (rows % PACK < GROUP))[:, None] & is_dim
    tl.store(out_ptr + offset[:, None] + dims[None, :], out.to(out_ptr.dtype.element_ty), mask=mask)
