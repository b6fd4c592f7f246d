"""`gluon.ordered.hopper`: the roles of one program; producers and scheduler are those of prefill and extend."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
# The signatures of jitted functions are Triton's: only their constexpr parameters are annotated.

from triton.experimental.gluon import jit
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from kernels.hopper.extend.kernel import LANES, block_pages, load_keys, load_values, wait_for_launch_before
from kernels.hopper.ordered.consumer import consume_parts
from kernels.hopper.ordered.fold import totals_memory
from kernels.hopper.pipeline import FREE, ROWS, claim_stage, produce, rings
from kernels.hopper.schedule import AHEAD, HEADER, ITEM, RING, first_of, post, schedule, take_tile


@jit
def consume_rows(given, W: gl.constexpr, STORE: gl.constexpr, VARIANT: gl.constexpr):
    """The role of consumer W. One name for what all of them are given makes each a line."""
    consume_parts(*given, W, STORE, VARIANT)


@jit
def load_packed_queries(q_desc, row, head, n, queries, VARIANT: gl.constexpr):
    """The n-th tile's queries, one box a consumer: some tokens under the query heads of one KV head.

    Where a group is no power of two, heads of the next one come along: they are never stored.
    """
    FORM: gl.constexpr = VARIANT.form
    q_smem, q_full, q_free = queries
    PACK: gl.constexpr = FORM.pack
    Q_BUFFERS: gl.constexpr = FORM.tiling.q_buffers
    CONSUMERS: gl.constexpr = FORM.tiling.consumers
    for w in gl.static_range(CONSUMERS):
        buffer = (n % Q_BUFFERS) * CONSUMERS + w
        mbarrier.wait(q_free.index(buffer), ((n // Q_BUFFERS) & 1) ^ 1)
        bar = q_full.index(buffer)
        mbarrier.expect(bar, ROWS * FORM.tiling.block_d * 2)
        for i in gl.static_range(len(FORM.copies)):
            part = q_smem[FORM.copies[i][0]].index(buffer)
            box = part.reshape([ROWS // PACK, PACK, FORM.row_parts[FORM.copies[i][0]]])
            to = box.slice(FORM.copies[i][1], FORM.copied, dim=2)
            at = [row + w * (ROWS // PACK), head * VARIANT.group, FORM.copies[i][2]]
            tma.async_copy_global_to_shared(q_desc, at, bar, to)


@jit
def produce_parts(maps, pages, group, tiles, queries, keys, values, VARIANT: gl.constexpr):
    """The producer's role over pages, as `produce_pages` of extend/kernel.py has it, with queries of any group."""
    FORM: gl.constexpr = VARIANT.form
    q_desc, k_desc, v_desc = maps
    table, stride_table, k_rows, v_rows = pages
    want = tiles[3]
    k_free = keys[2]
    v_free = values[2]
    BLOCK_N: gl.constexpr = FORM.tiling.block_n
    STAGES: gl.constexpr = FORM.tiling.stages
    Q_BUFFERS: gl.constexpr = FORM.tiling.q_buffers
    fill = 0
    n = 0
    row, _rows, _position, num_keys, head, sequence, low, top, _part = take_tile(tiles, 0, FORM)
    while row >= 0:
        kv_head = head // group
        entries = table + sequence * stride_table
        begin = low * FORM.box
        num_blocks = top - first_of(low, FORM) + 1
        key = top * BLOCK_N
        key_pages = block_pages(entries, key, begin, num_keys, FORM)
        value_pages = gl.full([32], 0, gl.int32, LANES)  # a name that began as the keys' would not be carried
        for i in range(num_blocks + 1):
            next_pages = block_pages(entries, key - BLOCK_N, begin, num_keys, FORM)
            mbarrier.arrive(want, count=1, pred=i == gl.maximum(num_blocks - 1 - AHEAD, 0))
            if Q_BUFFERS > 1 and i == 0:
                load_packed_queries(q_desc, row, head, n, queries, VARIANT)
            if i < num_blocks:
                stage = fill % STAGES
                claim_stage(k_free, fill, FREE, FORM)
                load_keys(k_desc, key_pages, k_rows, key, kv_head, keys, stage, FORM)
            if Q_BUFFERS == 1 and i == 0:  # the only buffer frees late: keys first
                load_packed_queries(q_desc, row, head, n, queries, VARIANT)
            if i > 0:
                stage = (fill - 1) % STAGES
                claim_stage(v_free, fill - 1, FREE + STAGES, FORM)
                load_values(v_desc, value_pages, v_rows, key + BLOCK_N, begin, num_keys, kv_head, values, stage, FORM)
            fill += 1
            key -= BLOCK_N
            value_pages = key_pages
            key_pages = next_pages
        fill -= 1
        n += 1
        row, _rows, _position, num_keys, head, sequence, low, top, _part = take_tile(tiles, n, FORM)


@jit
def produce_any(maps, pages, group, tiles, queries, keys, values, VARIANT: gl.constexpr):
    """The producer's role, of pages or of packed keys."""
    FORM: gl.constexpr = VARIANT.form
    if FORM.page_size > 0:
        produce_parts(maps, pages, group, tiles, queries, keys, values, VARIANT)
    else:
        produce(maps[0], maps[1], maps[2], group, tiles, queries, keys, values, FORM)


@jit
def schedule_parts(plan, num_heads, tiles, VARIANT: gl.constexpr):
    """The scheduler's role, as `schedule` of schedule.py has it for one group of heads.

    A tile's item is asked for beside the number of tiles, not behind it: for a token most of a launch is waiting.
    """
    ring, ring_full, ring_free, want = tiles
    BLOCK_N: gl.constexpr = VARIANT.tiling.block_n
    num_tiles = gl.load(plan + 2) * num_heads
    tile = gl.program_id(0)
    block = tile // num_heads  # the host starts no more programs than the list has room for
    n = 0
    go = True
    while go:
        if n > 0:
            mbarrier.wait(want, (n - 1) & 1)
            tile = gl.atomic_add(plan, 1) + gl.num_programs(0)
            # Of num_tiles asked for in all the last: leaves the counter as the next launch of this plan wants it.
            gl.store(plan, 0, mask=tile == num_tiles + gl.num_programs(0) - 1)
            block = gl.minimum(tile, num_tiles) // num_heads
        entry = plan + HEADER + block * ITEM
        row = gl.load(entry)
        rows = gl.load(entry + 1)
        position = gl.load(entry + 2)
        keys = gl.load(entry + 3)
        first_key = gl.load(entry + 4)
        begin = gl.load(entry + 5)
        end = gl.load(entry + 6)
        place = gl.load(entry + 7)
        go = tile < num_tiles
        slot = n % RING
        mbarrier.wait(ring_free.index(slot), ((n // RING) & 1) ^ 1)
        post(ring, slot * VARIANT.fields, gl.where(go, row, -1))
        post(ring, slot * VARIANT.fields + 1, gl.where(go, rows, 0))
        post(ring, slot * VARIANT.fields + 2, gl.where(go, position, 0))
        post(ring, slot * VARIANT.fields + 3, keys)
        post(ring, slot * VARIANT.fields + 4, gl.where(go, tile - block * num_heads, 0))
        post(ring, slot * VARIANT.fields + 5, first_key)
        post(ring, slot * VARIANT.fields + 6, (gl.where(go, end, 1) - 1) // BLOCK_N)
        post(ring, slot * VARIANT.fields + 7, gl.where(go, begin, 0) // VARIANT.box)
        post(ring, slot * VARIANT.fields + 8, place)
        mbarrier.arrive(ring_full.index(slot), count=1)
        n += 1


@jit(do_not_specialize=[
    "part_rows", "stride_table", "k_rows", "v_rows", "num_heads", "group", "heads_per_group", "window"
])  # fmt: skip
def hallmark_gluon_ordered(
    q_desc, k_desc, v_desc, out, stride_row, stride_head, parts, stats, part_rows, owners, tickets, totals, table,
    stride_table, k_rows, v_rows, plan, sinks, spans, num_heads, group, heads_per_group, scale, softcap_scale, window,
    STORE: gl.constexpr, VARIANT: gl.constexpr,
):  # fmt: skip
    """Rings and roles of one program.

    parts, stats     scratch of parts, see `store_part`; part_rows: rows of a tile that it has room for
    owners, tickets  first place and number of the parts of each part's row block; how many are stored so far
    totals           scratch of what is folded so far, where it does not lie in shared memory
    k_rows, v_rows   rows of the tensor map from one page to the next
    num_heads        heads of tiles; group: those that share a KV head; heads_per_group: those of an L2 group
    """
    FORM: gl.constexpr = VARIANT.form
    CONSUMERS: gl.constexpr = FORM.tiling.consumers
    tiles, queries, keys, values = rings(q_desc.dtype, FORM)
    memory = totals
    if VARIANT.totals_shared:
        memory = totals_memory(FORM, CONSUMERS)
    result = (out, stride_row, stride_head, parts, stats, num_heads, part_rows, owners, tickets)
    given = (result, sinks, spans, scale, softcap_scale, window, tiles, queries, keys, values, memory)
    maps = (q_desc, k_desc, v_desc)
    pages = (table, stride_table, k_rows, v_rows)
    wait_for_launch_before()
    if CONSUMERS == 2:
        gl.warp_specialize([
            (consume_rows, (given, 0, STORE, VARIANT)),
            (consume_rows, (given, 1, STORE, VARIANT)),
            (produce_any, (maps, pages, group, tiles, queries, keys, values, VARIANT)),
            (schedule, (plan, num_heads, heads_per_group, tiles, FORM)),
        ], [4, 1, 1], [240, 32, 32])  # fmt: skip
    else:
        gl.warp_specialize([
            (consume_rows, (given, 0, STORE, VARIANT)),
            (produce_any, (maps, pages, group, tiles, queries, keys, values, VARIANT)),
            (schedule_parts, (plan, num_heads, tiles, FORM)),
        ], [1, 1], [32, 32])  # fmt: skip
