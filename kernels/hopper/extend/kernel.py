"""`gluon.extend.hopper`: attention of prompt chunks over paged context on sm_90, written in Gluon for Triton 3.6.0.

The roles and consumers of `gluon.prefill.hopper`, with a producer that follows the page table. Where a group of query
heads is a power of two, its heads are packed into the rows of a tile: a short chunk still fills one. Where tiles are
few, or one is much longer than the others, keys are split into parts (plan.py).

How it is launched: launch.py. Sources: Kwon et al. 2023 (pages); Shah et al. 2024 (FA3); Dao et al. 2023
(Flash-Decoding: split keys).
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
# The signatures of jitted functions are Triton's: only their constexpr parameters are annotated.

from triton.experimental.gluon import jit
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from kernels.hopper.consumer import consume
from kernels.hopper.pipeline import FREE, HALF, ROWS, claim_stage, rings
from kernels.hopper.schedule import AHEAD, first_of, schedule, take_tile

LANES = gl.constexpr(gl.BlockedLayout([1], [32], [1], [0]))  # of the one warp that produces


@jit
def load_packed_queries(q_desc, row, head, n, queries, VARIANT: gl.constexpr):
    """The n-th tile's queries, one box a consumer: some tokens under the query heads of one KV head."""
    q_smem, q_full, q_free = queries
    PACK: gl.constexpr = VARIANT.pack
    Q_BUFFERS: gl.constexpr = VARIANT.tiling.q_buffers
    CONSUMERS: gl.constexpr = VARIANT.tiling.consumers
    for w in gl.static_range(CONSUMERS):
        buffer = (n % Q_BUFFERS) * CONSUMERS + w
        mbarrier.wait(q_free.index(buffer), ((n // Q_BUFFERS) & 1) ^ 1)
        bar = q_full.index(buffer)
        mbarrier.expect(bar, ROWS * VARIANT.tiling.block_d * 2)
        for i in gl.static_range(len(VARIANT.copies)):
            part = q_smem[VARIANT.copies[i][0]].index(buffer)
            box = part.reshape([ROWS // PACK, PACK, VARIANT.row_parts[VARIANT.copies[i][0]]])
            to = box.slice(VARIANT.copies[i][1], VARIANT.copied, dim=2)
            at = [row + w * (ROWS // PACK), head * PACK, VARIANT.copies[i][2]]
            tma.async_copy_global_to_shared(q_desc, at, bar, to)


@jit
def block_pages(table, first, begin, num_keys, VARIANT: gl.constexpr):
    """The pages of the block from key `first` on, one a box and lane, to be read by `page_at`.

    A box without a key that is seen takes the page of one that is: an entry behind the window may be another
    sequence's page by now, one past the last key is not even a number. Without keys page 0 stands in.
    """
    box = gl.arange(0, 32, layout=LANES) % (VARIANT.tiling.block_n // VARIANT.box)
    key = gl.maximum(gl.minimum(first + box * VARIANT.box, num_keys - 1), begin)
    return gl.load(table + key // VARIANT.page_size, mask=key < num_keys, other=0)


@jit
def page_at(pages, box):
    """Return a page number loaded by a lane: ptxas waits at once for a scalar load, so that nothing would be ahead."""
    return gl.max(gl.where(gl.arange(0, 32, layout=LANES) == box, pages, -1), axis=0)


@jit
def load_keys(desc, pages, rows_of_page, first, kv_head, keys, stage, VARIANT: gl.constexpr):
    """One key block. Rows past the sequence come along: the mask removes them."""
    BOX: gl.constexpr = VARIANT.box
    BLOCK_N: gl.constexpr = VARIANT.tiling.block_n
    bar = keys[1].index(stage)
    mbarrier.expect(bar, BLOCK_N * VARIANT.tiling.block_d * 2)
    for i in gl.static_range(BLOCK_N // BOX):
        row = page_at(pages, i) * rows_of_page + (first + i * BOX) % VARIANT.page_size
        for j in gl.static_range(len(VARIANT.copies)):
            part = keys[0][VARIANT.copies[j][0]].index(stage)
            box = part.reshape([BLOCK_N, 1, VARIANT.row_parts[VARIANT.copies[j][0]]]).slice(i * BOX, BOX, dim=0)
            to = box.slice(VARIANT.copies[j][1], VARIANT.copied, dim=2)
            tma.async_copy_global_to_shared(desc, [row, kv_head, VARIANT.copies[j][2]], bar, to)


@jit
def load_values(desc, pages, rows_of_page, first, begin, num_keys, kv_head, values, stage, VARIANT: gl.constexpr):
    """One value block; rows past the sequence, and boxes before `begin`, arrive as zeros, since 0 * NaN is NaN."""
    BOX: gl.constexpr = VARIANT.box
    BLOCK_N: gl.constexpr = VARIANT.tiling.block_n
    bar = values[1].index(stage)
    mbarrier.expect(bar, BLOCK_N * VARIANT.tiling.block_d * 2)
    for i in gl.static_range(BLOCK_N // BOX):
        start = first + i * BOX
        rows = gl.minimum(gl.maximum(num_keys - start, 0), BOX)
        if VARIANT.window and BOX < BLOCK_N:
            rows = gl.where(start + BOX <= begin, 0, rows)
        row = page_at(pages, i) * rows_of_page + start % VARIANT.page_size
        for j in gl.static_range(len(VARIANT.copies)):
            part = values[0][VARIANT.copies[j][0]].index(stage)
            width = part.reshape([1, 1, BLOCK_N, 1, VARIANT.row_parts[VARIANT.copies[j][0]]])
            box = width.slice(i * BOX, BOX, dim=2)
            to = box.slice(VARIANT.copies[j][1], VARIANT.copied, dim=4)
            at = [HALF, row + rows, HALF - rows, kv_head, VARIANT.copies[j][2]]
            tma.async_copy_global_to_shared(desc, at, bar, to)


@jit
def produce_pages(maps, pages, group, tiles, queries, keys, values, VARIANT: gl.constexpr):
    """The producer's role, see pipeline.py.

    maps   tensor maps of queries, keys and values
    pages  the page table, its stride, and rows of the map of keys, of values from one page to the next

    Keys are copied one block ahead of values: their stage is free earlier. Pages are looked up one more block ahead.
    """
    q_desc, k_desc, v_desc = maps
    table, stride_table, k_rows, v_rows = pages
    want = tiles[3]
    k_free = keys[2]
    v_free = values[2]
    BLOCK_N: gl.constexpr = VARIANT.tiling.block_n
    STAGES: gl.constexpr = VARIANT.tiling.stages
    Q_BUFFERS: gl.constexpr = VARIANT.tiling.q_buffers
    fill = 0
    n = 0
    row, _rows, _position, num_keys, head, sequence, low, top, _part = take_tile(tiles, 0, VARIANT)
    while row >= 0:
        kv_head = head // group
        entries = table + sequence * stride_table
        begin = low * VARIANT.box
        num_blocks = top - first_of(low, VARIANT) + 1
        key = top * BLOCK_N
        key_pages = block_pages(entries, key, begin, num_keys, VARIANT)
        value_pages = gl.zeros([32], gl.int32, LANES)  # a name that began as the keys' would not be carried by the loop
        for i in range(num_blocks + 1):
            next_pages = block_pages(entries, key - BLOCK_N, begin, num_keys, VARIANT)
            mbarrier.arrive(want, count=1, pred=i == gl.maximum(num_blocks - 1 - AHEAD, 0))
            if Q_BUFFERS > 1 and i == 0:
                load_packed_queries(q_desc, row, head, n, queries, VARIANT)
            if i < num_blocks:
                stage = fill % STAGES
                claim_stage(k_free, fill, FREE, VARIANT)
                load_keys(k_desc, key_pages, k_rows, key, kv_head, keys, stage, VARIANT)
            if Q_BUFFERS == 1 and i == 0:  # the only buffer frees late: keys first
                load_packed_queries(q_desc, row, head, n, queries, VARIANT)
            if i > 0:
                stage = (fill - 1) % STAGES
                claim_stage(v_free, fill - 1, FREE + STAGES, VARIANT)
                load_values(
                    v_desc, value_pages, v_rows, key + BLOCK_N, begin, num_keys, kv_head, values, stage, VARIANT,
                )  # fmt: skip
            fill += 1
            key -= BLOCK_N
            value_pages = key_pages
            key_pages = next_pages
        fill -= 1
        n += 1
        row, _rows, _position, num_keys, head, sequence, low, top, _part = take_tile(tiles, n, VARIANT)


@jit
def wait_for_launch_before():
    """Wait until writes of the previous launch can be read, and let the next launch start."""
    gl.inline_asm_elementwise(
        "griddepcontrol.wait; griddepcontrol.launch_dependents; mov.b32 $0, 0;", "=r,r", [gl.to_tensor(0)],
        dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@jit
def consume_rows(given, W: gl.constexpr, STORE: gl.constexpr, VARIANT: gl.constexpr):
    """The role of consumer W. One name for what all of them are given makes each a line."""
    consume(*given, W, STORE, VARIANT)


@jit(do_not_specialize=["stride_table", "k_rows", "v_rows", "num_heads", "group", "heads_per_group", "window"])
def hallmark_gluon_extend(
    q_desc, k_desc, v_desc, out, stride_row, stride_head, parts, logs, table, stride_table, k_rows, v_rows, plan, sinks,
    spans, num_heads, group, heads_per_group, scale, softcap_scale, window,
    STORE: gl.constexpr, VARIANT: gl.constexpr,
):  # fmt: skip
    """Rings and roles of one program.

    parts, logs      scratch of split keys, see `store_part`
    k_rows, v_rows   rows of the tensor map from one page to the next
    num_heads        heads of tiles; group: those that share a KV head; heads_per_group: those of an L2 group
    """
    tiles, queries, keys, values = rings(q_desc.dtype, VARIANT)
    result = (out, stride_row, stride_head, parts, logs, num_heads)
    given = (result, sinks, spans, scale, softcap_scale, window, tiles, queries, keys, values)
    maps = (q_desc, k_desc, v_desc)
    pages = (table, stride_table, k_rows, v_rows)
    wait_for_launch_before()
    if VARIANT.tiling.consumers == 2:
        gl.warp_specialize([
            (consume_rows, (given, 0, STORE, VARIANT)),
            (consume_rows, (given, 1, STORE, VARIANT)),
            (produce_pages, (maps, pages, group, tiles, queries, keys, values, VARIANT)),
            (schedule, (plan, num_heads, heads_per_group, tiles, VARIANT)),
        ], [4, 1, 1], [240, 32, 32])  # fmt: skip
    else:  # all 65,536 registers
        gl.warp_specialize([
            (consume_rows, (given, 0, STORE, VARIANT)),
            (consume_rows, (given, 1, STORE, VARIANT)),
            (consume_rows, (given, 2, STORE, VARIANT)),
            (produce_pages, (maps, pages, group, tiles, queries, keys, values, VARIANT)),
            (schedule, (plan, num_heads, heads_per_group, tiles, VARIANT)),
        ], [4, 4, 1, 1], [160, 160, 32, 32])  # fmt: skip
