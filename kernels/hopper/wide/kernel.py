"""`gluon.prefill.wide.hopper` and `gluon.extend.wide.hopper`: attention of heads of 512 on sm_90, in Gluon.

The scheduler and the copies of prefill and extend, and consumers that share a tile's rows (consumer.py). Between the
two kernels only the producers differ: keys are packed, or lie in pages.

How they are launched: prefill.py, extend.py. Sources: Shah et al. 2024 (FA3); DeepSeek's FlashMLA (2025): halves of O.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
# The signatures of jitted functions are Triton's: only their constexpr parameters are annotated.

from triton.experimental.gluon import jit
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from kernels.hopper.extend.kernel import LANES, block_pages, wait_for_launch_before
from kernels.hopper.extend.kernel import load_keys as load_keys_of_pages
from kernels.hopper.extend.kernel import load_values as load_values_of_pages
from kernels.hopper.pipeline import FREE, ROWS, claim_stage, copy_rows, load_keys, load_values
from kernels.hopper.schedule import AHEAD, first_of, schedule, take_tile
from kernels.hopper.wide.consumer import consume_half, wide_rings


@jit
def load_shared_queries(q_desc, row, head, n, queries, VARIANT: gl.constexpr):
    """The n-th tile's queries, which both consumers read: packed, some tokens under the heads of one KV head."""
    PACK: gl.constexpr = VARIANT.pack
    bar = queries[1].index(0)
    mbarrier.wait(queries[2].index(0), (n & 1) ^ 1)
    if PACK > 1:
        mbarrier.expect(bar, ROWS * VARIANT.tiling.block_d * 2)
        to = queries[0][0].index(0).reshape([ROWS // PACK, PACK, VARIANT.tiling.block_d])
        tma.async_copy_global_to_shared(q_desc, [row, head * PACK, 0], bar, to)
    else:
        copy_rows(q_desc, row, head, bar, queries[0], 0, VARIANT)


@jit
def produce_wide(maps, group, tiles, queries, keys, values, VARIANT: gl.constexpr):
    """The producer's role over packed keys: as that of pipeline.py, with one box of queries a tile."""
    q_desc, k_desc, v_desc = maps
    want = tiles[3]
    BLOCK_N: gl.constexpr = VARIANT.tiling.block_n
    STAGES: gl.constexpr = VARIANT.tiling.stages
    fill = 0
    n = 0
    row, _rows, _position, num_keys, head, first_key, low, top, _part = take_tile(tiles, 0, VARIANT)
    value_row = row  # where the values of the block before are, how many of its sequence, and of which head
    num_values = num_keys
    value_head = head
    while row >= 0:
        kv_head = head // group
        for i in range(top - low + 1):
            first = (top - i) * BLOCK_N
            mbarrier.arrive(want, count=1, pred=i == gl.maximum(top - low - AHEAD, 0))
            claim_stage(keys[2], fill, FREE, VARIANT)
            load_keys(k_desc, first_key + first, kv_head, keys, fill % STAGES, VARIANT)
            if i == 0:
                load_shared_queries(q_desc, row, head, n, queries, VARIANT)
            if fill > 0:
                claim_stage(values[2], fill - 1, FREE + STAGES, VARIANT)
                load_values(v_desc, value_row, num_values, value_head, values, (fill - 1) % STAGES, VARIANT)
            value_row = first_key + first
            num_values = num_keys - first
            value_head = kv_head
            fill += 1
        n += 1
        row, _rows, _position, num_keys, head, first_key, low, top, _part = take_tile(tiles, n, VARIANT)
    if fill > 0:
        claim_stage(values[2], fill - 1, FREE + STAGES, VARIANT)
        load_values(v_desc, value_row, num_values, value_head, values, (fill - 1) % STAGES, VARIANT)


@jit
def produce_wide_pages(maps, pages, group, tiles, queries, keys, values, VARIANT: gl.constexpr):
    """The producer's role over pages: as that of extend, with one box of queries a tile."""
    q_desc, k_desc, v_desc = maps
    table, stride_table, k_rows, v_rows = pages
    want = tiles[3]
    BLOCK_N: gl.constexpr = VARIANT.tiling.block_n
    STAGES: gl.constexpr = VARIANT.tiling.stages
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
            if i < num_blocks:
                claim_stage(keys[2], fill, FREE, VARIANT)
                load_keys_of_pages(k_desc, key_pages, k_rows, key, kv_head, keys, fill % STAGES, VARIANT)
            if i == 0:
                load_shared_queries(q_desc, row, head, n, queries, VARIANT)
            else:
                claim_stage(values[2], fill - 1, FREE + STAGES, VARIANT)
                load_values_of_pages(
                    v_desc, value_pages, v_rows, key + BLOCK_N, begin, num_keys, kv_head, values, (fill - 1) % STAGES,
                    VARIANT,
                )  # fmt: skip
            fill += 1
            key -= BLOCK_N
            value_pages = key_pages
            key_pages = next_pages
        fill -= 1
        n += 1
        row, _rows, _position, num_keys, head, sequence, low, top, _part = take_tile(tiles, n, VARIANT)


@jit(do_not_specialize=["num_heads", "group", "heads_per_group"])
def hallmark_gluon_wide_prefill(
    q_desc, k_desc, v_desc, out, stride_row, stride_head, plan, num_heads, group, heads_per_group, scale,
    STORE: gl.constexpr, VARIANT: gl.constexpr,
):  # fmt: skip
    """Roles of one program. group: query heads a KV head; heads_per_group: those of an L2 group."""
    tiles, queries, keys, values, exchange = wide_rings(q_desc.dtype, VARIANT)
    result = (out, stride_row, stride_head)
    gl.warp_specialize([
        (consume_half, (result, scale, tiles, queries, keys, values, exchange, 0, STORE, VARIANT)),
        (consume_half, (result, scale, tiles, queries, keys, values, exchange, 1, STORE, VARIANT)),
        (produce_wide, ((q_desc, k_desc, v_desc), group, tiles, queries, keys, values, VARIANT)),
        (schedule, (plan, num_heads, heads_per_group, tiles, VARIANT)),
    ], [4, 1, 1], [240, 24, 24])  # fmt: skip


@jit(do_not_specialize=["stride_table", "k_rows", "v_rows", "num_heads", "group", "heads_per_group"])
def hallmark_gluon_wide_extend(
    q_desc, k_desc, v_desc, out, stride_row, stride_head, parts, logs, table, stride_table, k_rows, v_rows, plan,
    num_heads, group, heads_per_group, scale, STORE: gl.constexpr, VARIANT: gl.constexpr,
):  # fmt: skip
    """Roles of one program.

    parts, logs      scratch of split keys, see `store_half`
    k_rows, v_rows   rows of the tensor map from one page to the next
    num_heads        heads of tiles; group: those that share a KV head; heads_per_group: those of an L2 group
    """
    tiles, queries, keys, values, exchange = wide_rings(q_desc.dtype, VARIANT)
    result = (out, stride_row, stride_head, parts, logs, num_heads)
    maps = (q_desc, k_desc, v_desc)
    pages = (table, stride_table, k_rows, v_rows)
    wait_for_launch_before()
    gl.warp_specialize([
        (consume_half, (result, scale, tiles, queries, keys, values, exchange, 0, STORE, VARIANT)),
        (consume_half, (result, scale, tiles, queries, keys, values, exchange, 1, STORE, VARIANT)),
        (produce_wide_pages, (maps, pages, group, tiles, queries, keys, values, VARIANT)),
        (schedule, (plan, num_heads, heads_per_group, tiles, VARIANT)),
    ], [4, 1, 1], [240, 32, 32])  # fmt: skip
