"""`gluon.decode.wide.hopper`: attention of one or a few new tokens a sequence, of heads of 512, on sm_90, in Gluon.

The programs, tiles and partial results of `gluon.decode.hopper`, with two changes for tiles of 16 keys, which two warps
have to finish in 2 us each: a page is looked up a tile before it is copied, and S = K Q^T of 512 dims is summed in two
chains of half as many products.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
# The signatures of jitted functions are Triton's: only their constexpr parameters are annotated.

from triton.experimental.gluon import jit
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from kernels.hopper.decode.kernel import launch_dependents, prefetch_table, store_result, wait_for_launch_before
from kernels.hopper.decode.stream import (
    heads_of_row,
    load_queries,
    make_ring,
    mask_scores,
    next_row,
    next_tile,
    start_cursor,
    start_state,
    tiles_of_program,
    zero_values,
)


@jit(do_not_specialize=["stride_table", "num_seqs", "num_rows"])
def hallmark_gluon_wide_decode(
    q_desc, k_desc, v_desc, out, scratch, cu_seqlens_q, context_lens, page_table, stride_out_query, stride_out_head,
    stride_table, num_seqs, num_rows, scale, VARIANT: gl.constexpr,
):  # fmt: skip
    """Compute the tiles of one program, row after row. num_rows: rows of a sequence."""
    HEADS: gl.constexpr = VARIANT.heads
    STAGES: gl.constexpr = VARIANT.stages
    MMA: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [HEADS, 1, VARIANT.column_warps], [1, 16, 8])
    RIGHT: gl.constexpr = gl.DotOperandLayout(1, MMA, 2)
    prefetch_table(page_table, num_seqs * stride_table)
    lengths = (cu_seqlens_q, context_lens, num_seqs, num_rows)
    maps = (q_desc, k_desc, v_desc)
    table = (page_table, stride_table)
    ring = make_ring(k_desc.dtype, VARIANT)
    program = gl.program_id(0)
    tile, end, _per_program, sequence, before = tiles_of_program(lengths, program, gl.num_programs(0), 0, VARIANT)
    first_tile = tile
    cursor = start_cursor(lengths, sequence, tile - before, 0, VARIANT)
    wait_for_launch_before()
    ahead = cursor
    pages = pages_at(ahead, table, VARIANT)
    for stage in range(STAGES):
        ahead, pages = fetch_ahead(
            ahead, pages, tile + stage, first_tile, end, stage, maps, table, ring, lengths, VARIANT
        )
    launch_dependents()  # not before: the next launch's own shares would hold up these copies
    while tile < end:
        _sequence, query, rows, keys, tiles, first, row, block = cursor
        count = gl.minimum(tiles - block, end - tile)
        fill = tile - first_tile
        mbarrier.wait(ring[3].index(fill % STAGES), (fill // STAGES) & 1)
        x = load_queries(ring, fill % STAGES, HEADS, RIGHT, VARIANT)
        state = start_state(HEADS, MMA, VARIANT)
        for i in range(count):
            fill = tile - first_tile + i
            stage = fill % STAGES
            phase = (fill // STAGES) & 1
            mbarrier.wait(ring[3].index(stage), phase)
            key = (first + block + i) * VARIANT.block_n
            state = attend_wide_tile(x, state, key, keys, rows, stage, phase, ring, scale, VARIANT)
            ahead, pages = fetch_ahead(
                ahead, pages, tile + i + STAGES, first_tile, end, stage, maps, table, ring, lengths, VARIANT
            )
        first_head, first_member = heads_of_row(row, VARIANT)
        target = (out, stride_out_query, stride_out_head, query, rows, first_head, first_member)
        slot = 2 * program + (block == 0).to(gl.int32)
        store_result(state, target, None, scratch, slot, count == tiles, VARIANT)
        cursor = next_row(cursor, lengths, 0, VARIANT)
        tile += count


@jit
def pages_at(cursor, table, VARIANT: gl.constexpr):
    """The page of a cursor's tile, in every lane: ptxas waits at once for a scalar load, and nothing would be ahead."""
    sequence, _query, _rows, keys, _tiles, first, _row, block = cursor
    LANES: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    entry = sequence.to(gl.int64) * table[1] + (first + block) * VARIANT.block_n // VARIANT.page_size
    lanes = gl.zeros([32], gl.int64, LANES)
    return gl.load(table[0] + entry + lanes, mask=lanes < keys, other=0)


@jit
def fetch_ahead(cursor, pages, tile, first_tile, end, stage, maps, table, ring, lengths, VARIANT: gl.constexpr):
    """Start the copies of a tile of this program, if there is one, whose page is known. Returns what the next takes.

    As `fetch` of stream.py, but for the page.
    """
    CHUNKS: gl.constexpr = VARIANT.chunks
    D: gl.constexpr = VARIANT.chunk_d
    q_desc, k_desc, v_desc = maps
    KV_BYTES: gl.constexpr = CHUNKS * k_desc.block_type.nbytes
    queries, keys_ring, values, k_full, v_full = ring
    if tile < end:
        _sequence, query, _rows, keys, _tiles, first, row, block = cursor
        head, first_member = heads_of_row(row, VARIANT)
        has_keys = keys > 0
        brings_queries = has_keys & ((block == 0) | (tile == first_tile))
        slot = (first + block) * VARIANT.block_n % VARIANT.page_size
        page = gl.max(pages, axis=0)
        cursor = next_tile(cursor, lengths, 0, VARIANT)
        pages = pages_at(cursor, table, VARIANT)
        k_bar, v_bar = k_full.index(stage), v_full.index(stage)
        mbarrier.expect(k_bar, KV_BYTES, pred=has_keys & (brings_queries == 0))
        mbarrier.expect(k_bar, KV_BYTES + CHUNKS * q_desc.block_type.nbytes, pred=brings_queries)
        mbarrier.expect(v_bar, KV_BYTES, pred=has_keys)
        mbarrier.arrive(k_bar, count=1, pred=has_keys == 0)
        mbarrier.arrive(v_bar, count=1, pred=has_keys == 0)
        for c in gl.static_range(CHUNKS):
            k_box = keys_ring.index(stage * CHUNKS + c).reshape([1, VARIANT.heads, VARIANT.block_n, D])
            tma.async_copy_global_to_shared(k_desc, [page, head, slot, c * D], k_bar, k_box, pred=has_keys)
        if brings_queries:
            for c in gl.static_range(CHUNKS):
                q_box = queries.index(stage * CHUNKS + c).reshape([VARIANT.heads, VARIANT.queries, VARIANT.members, D])
                tma.async_copy_global_to_shared(q_desc, [head, query, first_member, c * D], k_bar, q_box)
        for c in gl.static_range(CHUNKS):
            v_box = values.index(stage * CHUNKS + c).reshape([1, VARIANT.heads, VARIANT.block_n, D])
            tma.async_copy_global_to_shared(v_desc, [page, head, slot, c * D], v_bar, v_box, pred=has_keys)
    return cursor, pages


@jit
def attend_wide_tile(x, state, key, keys, rows, stage, phase, ring, scale, VARIANT: gl.constexpr):
    """One more tile of the online softmax, whose keys have arrived; as `attend_tile` of stream.py."""
    acc, largest, sums = state
    MMA: gl.constexpr = acc[0].type.layout
    LEFT: gl.constexpr = gl.DotOperandLayout(0, MMA, 2)
    HEADS: gl.constexpr = VARIANT.heads
    N: gl.constexpr = VARIANT.block_n
    CHUNKS: gl.constexpr = VARIANT.chunks
    TILE: gl.constexpr = [HEADS, N, VARIANT.chunk_d]
    even = gl.full([HEADS, N, VARIANT.columns], 0.0, gl.float32, MMA)
    odd = even
    for c in gl.static_range(0, CHUNKS, 2):
        even = mma_v2(ring[1].index(stage * CHUNKS + c).reshape(TILE).load(LEFT), x[c], even)
        odd = mma_v2(ring[1].index(stage * CHUNKS + c + 1).reshape(TILE).load(LEFT), x[c + 1], odd)
    s = even + odd
    if key + N > keys - rows + 1:  # beyond what the first query sees
        s = mask_scores(s, key, keys, rows, 0, VARIANT)
    new_largest = gl.maximum(largest, gl.max(s, axis=1) * scale)
    weights = gl.exp2(s * scale - new_largest[:, None, :])
    decay = gl.exp2(largest - new_largest)
    sums = sums * decay + gl.sum(weights, axis=1)
    p = gl.convert_layout(weights.to(x[0].dtype), x[0].type.layout)
    mbarrier.wait(ring[4].index(stage), phase)
    new_acc = ()
    for c in gl.static_range(CHUNKS):
        v = ring[2].index(stage * CHUNKS + c).reshape(TILE).permute([0, 2, 1]).load(LEFT)
        if key + N > keys:
            v = zero_values(v, key, 0, keys, VARIANT)
        new_acc = new_acc + (mma_v2(v, p, acc[c] * decay[:, None, :]),)  # type: ignore[assignment]  # noqa: RUF005
    return new_acc, new_largest, sums
