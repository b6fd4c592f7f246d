"""`gluon.decode.hopper` for one sequence: one launch, in which the programs of a cluster share a row.

Program r of a cluster takes the tiles r, r + cluster, ... of a row; its warps take `block_n // key_groups` keys each of
every tile. Who reads which entries of the page table does not follow from the length, so they are read beside it. At
the end every program gets a slice of the head dim of all parts, through shared memory, and puts it together: nothing is
written to memory but the output.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
# The signatures of jitted functions are Triton's: only their constexpr parameters are annotated.

from triton.experimental.gluon import jit
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from kernels.hopper.decode.kernel import (
    LOG2E,
    is_column,
    launch_dependents,
    out_offset,
    query_head,
    wait_for_launch_before,
)
from kernels.hopper.decode.stream import attend_tile, heads_of_row, start_state
from kernels.tma.cluster import expect_parts, meet, received, received_one, send, send_one, wait_for_parts


@jit(do_not_specialize=["table_width"])
def hallmark_gluon_decode_cluster(
    q_desc, k_desc, v_desc, out, sinks, cu_seqlens_q, context_lens, page_table, stride_out_query, stride_out_head,
    table_width, scale, softcap_scale, VARIANT: gl.constexpr,
):  # fmt: skip
    """Program (row, rank) of the only sequence."""
    CLUSTER: gl.constexpr = VARIANT.cluster
    GROUPS: gl.constexpr = VARIANT.key_groups
    STAGES: gl.constexpr = VARIANT.stages
    COLUMNS: gl.constexpr = VARIANT.columns
    D: gl.constexpr = VARIANT.block_d
    N: gl.constexpr = VARIANT.block_n
    MMA: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [GROUPS, 1, 1], [1, 16, 8])
    RIGHT: gl.constexpr = gl.DotOperandLayout(1, MMA, 2)
    rank, row = gl.program_id(0) % CLUSTER, gl.program_id(0) // CLUSTER
    query = gl.load(cu_seqlens_q)
    rows = gl.load(cu_seqlens_q + 1) - query
    keys = gl.load(context_lens)
    ring = make_rings(k_desc.dtype, VARIANT)
    maps = (q_desc, k_desc, v_desc)
    head, first_member = heads_of_row(row, VARIANT)
    wait_for_launch_before()
    pages = ()
    for i in gl.static_range(STAGES + 1):
        pages = pages + (pages_of_tile(page_table, table_width, rank + i * CLUSTER, VARIANT),)  # type: ignore[assignment]  # noqa: RUF005
    end = gl.where(rows > 0, (keys + N - 1) // N, 0)
    mbarrier.expect(ring[5], GROUPS * q_desc.block_type.nbytes, pred=rank < end)
    for i in gl.static_range(STAGES):
        copy_tile(pages[i], rank + i * CLUSTER, keys, end, head, i, maps, ring, VARIANT)
        if i == 0:  # behind the first keys
            for group in gl.static_range(GROUPS):
                box = ring[0].index(0).reshape([GROUPS, VARIANT.queries, VARIANT.members, D]).slice(group, 1)
                tma.async_copy_global_to_shared(q_desc, [head, query, first_member, 0], ring[5], box, pred=rank < end)
    launch_dependents()
    state = start_state(GROUPS, MMA, VARIANT)
    if rank < end:
        mbarrier.wait(ring[5], 0)
        x = (ring[0].index(0).reshape([GROUPS, COLUMNS, D]).permute([0, 2, 1]).load(RIGHT),)
        ahead = pages[STAGES]  # type: ignore[var-annotated]
        for tile in range(rank, end, CLUSTER):
            fill = tile // CLUSTER
            stage, phase = fill % STAGES, (fill // STAGES) & 1
            behind = tile + STAGES * CLUSTER
            next_pages = pages_of_tile(page_table, table_width, behind + CLUSTER, VARIANT)
            mbarrier.wait(ring[3].index(stage), phase)
            state = attend_tile(x, state, tile * N, keys, rows, stage, phase, ring, (scale, softcap_scale), 0, VARIANT)
            copy_tile(ahead, behind, keys, end, head, stage, maps, ring, VARIANT)
            ahead = next_pages
    target = (out, stride_out_query, stride_out_head, query, rows, head, first_member)
    combine_cluster(state, target, sinks, rank, VARIANT)


@jit
def make_rings(dtype: gl.constexpr, VARIANT: gl.constexpr):
    """Queries, once for every group; stages of keys and of values; a barrier a stage for each, and one for queries."""
    STAGES: gl.constexpr = VARIANT.stages
    Q_ROWS: gl.constexpr = VARIANT.key_groups * VARIANT.columns
    Q_LAYOUT: gl.constexpr = gl.NVMMASharedLayout.get_default_for([Q_ROWS, VARIANT.block_d], dtype)
    KV_LAYOUT: gl.constexpr = gl.NVMMASharedLayout.get_default_for([VARIANT.block_n, VARIANT.block_d], dtype)
    queries = gl.allocate_shared_memory(dtype, [1, Q_ROWS, VARIANT.block_d], Q_LAYOUT)
    keys = gl.allocate_shared_memory(dtype, [STAGES, VARIANT.block_n, VARIANT.block_d], KV_LAYOUT)
    values = gl.allocate_shared_memory(dtype, [STAGES, VARIANT.block_n, VARIANT.block_d], KV_LAYOUT)
    q_full = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout())
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    mbarrier.init(q_full.index(0), count=1)
    for i in gl.static_range(STAGES):
        mbarrier.init(k_full.index(i), count=1)
        mbarrier.init(v_full.index(i), count=1)
    return queries, keys, values, k_full, v_full, q_full.index(0)


@jit
def pages_of_tile(page_table, table_width, tile, VARIANT: gl.constexpr):
    """The page of each box of a tile; of one behind the last key the entry means nothing."""
    BOX: gl.constexpr = VARIANT.box_n
    pages = ()
    for i in gl.static_range(VARIANT.block_n // BOX):
        entry = (tile * VARIANT.block_n + i * BOX) // VARIANT.page_size
        pages = pages + (gl.load(page_table + gl.minimum(entry, table_width - 1)),)  # type: ignore[assignment]  # noqa: RUF005
    return pages


@jit
def copy_tile(pages, tile, keys, end, head, stage, maps, ring, VARIANT: gl.constexpr):
    """Start the copies of the boxes of a tile that hold keys."""
    _q_desc, k_desc, v_desc = maps
    _queries, keys_ring, values, k_full, v_full, _q_full = ring
    BOX: gl.constexpr = VARIANT.box_n
    BOXES: gl.constexpr = VARIANT.block_n // BOX
    SHAPE: gl.constexpr = [BOXES, 1, BOX, VARIANT.block_d]
    first = tile * VARIANT.block_n
    count = gl.where(tile < end, gl.minimum((keys - first + BOX - 1) // BOX, BOXES), 0)
    k_bar, v_bar = k_full.index(stage), v_full.index(stage)
    for i in gl.static_range(BOXES):
        mbarrier.expect(k_bar, (i + 1) * k_desc.block_type.nbytes, pred=count == i + 1)
        mbarrier.expect(v_bar, (i + 1) * v_desc.block_type.nbytes, pred=count == i + 1)
    for i in gl.static_range(BOXES):
        at = [pages[i], head, (first + i * BOX) % VARIANT.page_size, 0]
        k_box = keys_ring.index(stage).reshape(SHAPE).slice(i, 1)
        tma.async_copy_global_to_shared(k_desc, at, k_bar, k_box, pred=i < count)
    for i in gl.static_range(BOXES):
        at = [pages[i], head, (first + i * BOX) % VARIANT.page_size, 0]
        v_box = values.index(stage).reshape(SHAPE).slice(i, 1)
        tma.async_copy_global_to_shared(v_desc, at, v_bar, v_box, pred=i < count)


@jit
def combine_cluster(state, target, sinks, rank, VARIANT: gl.constexpr):
    """Program r of a cluster gets the dims from r * block_d / cluster on of all parts, and writes them.

    What it is sent lies where the ring was: its columns of each part, then maxima and sums, then a barrier.
    """
    CLUSTER: gl.constexpr = VARIANT.cluster
    COLUMNS: gl.constexpr = VARIANT.columns
    SLICE: gl.constexpr = VARIANT.block_d // CLUSTER
    PARTS: gl.constexpr = CLUSTER * VARIANT.key_groups
    STATS_AT: gl.constexpr = PARTS * COLUMNS * SLICE * 4
    BAR_AT: gl.constexpr = STATS_AT + PARTS * COLUMNS * 8
    gl.static_assert(VARIANT.stages * 2 * VARIANT.block_n * VARIANT.block_d * 2 >= BAR_AT + 16)
    LANES: gl.constexpr = min(32, VARIANT.block_d // 4)
    GROUPS: gl.constexpr = VARIANT.key_groups
    DIMS: gl.constexpr = gl.BlockedLayout([1, 4, 1], [1, LANES, 32 // LANES], [GROUPS, 1, 1], [1, 2, 0])
    STATS: gl.constexpr = gl.BlockedLayout([1, CLUSTER // 4, COLUMNS // 8], [1, 4, 8], [GROUPS, 1, 1], [2, 1, 0])
    acc, largest, sums = state
    o = gl.convert_layout(acc[0], DIMS)
    largest = gl.expand_dims(gl.convert_layout(largest, gl.SliceLayout(1, STATS)), 1)
    sums = gl.expand_dims(gl.convert_layout(sums, gl.SliceLayout(1, STATS)), 1)
    base = gl.inline_asm_elementwise("mov.u32 $0, global_smem;", "=r", [], dtype=gl.int32, is_pure=True, pack=1)
    bar = base + BAR_AT
    gl.thread_barrier()  # every warp has read what it had there
    expect_parts(bar, BAR_AT)
    meet()
    part, to, column = places(rank, GROUPS, CLUSTER, COLUMNS, STATS)
    at = base + STATS_AT + (part * COLUMNS + column) * 8
    send_one(at + to * 0, to + at * 0, bar + (at + to) * 0, largest + (at + to).to(gl.float32) * 0.0)
    send_one(at + 4 + to * 0, to + at * 0, bar + (at + to) * 0, sums + (at + to).to(gl.float32) * 0.0)
    part, dim, column = places(rank, GROUPS, VARIANT.block_d, COLUMNS, DIMS)
    at = base + ((part * COLUMNS + column) * SLICE + dim % SLICE) * 4
    send(at, dim // SLICE + at * 0, bar + at * 0, o)
    wait_for_parts(bar)
    finish_slice(base, base + STATS_AT, target, sinks, rank, VARIANT)


@jit
def places(rank, GROUPS: gl.constexpr, SECOND: gl.constexpr, THIRD: gl.constexpr, LAYOUT: gl.constexpr):
    """The part, and the places along the last two axes, of the numbers of a tensor [key_groups, ...]."""
    group = gl.arange(0, GROUPS, layout=gl.SliceLayout(1, gl.SliceLayout(2, LAYOUT)))[:, None, None]
    second = gl.arange(0, SECOND, layout=gl.SliceLayout(0, gl.SliceLayout(2, LAYOUT)))[None, :, None]
    third = gl.arange(0, THIRD, layout=gl.SliceLayout(0, gl.SliceLayout(1, LAYOUT)))[None, None, :]
    return rank * GROUPS + group, second, third


@jit
def finish_slice(o_at, stats_at, target, sinks, rank, VARIANT: gl.constexpr):
    """Weigh, sum and write the slice of all parts that this program was sent."""
    COLUMNS: gl.constexpr = VARIANT.columns
    SLICE: gl.constexpr = VARIANT.block_d // VARIANT.cluster
    PARTS: gl.constexpr = VARIANT.cluster * VARIANT.key_groups
    LANES: gl.constexpr = [32 // (SLICE // 4 * (8 // VARIANT.key_groups)), 8 // VARIANT.key_groups, SLICE // 4]
    READ: gl.constexpr = gl.BlockedLayout([1, 1, 4], LANES, [1, VARIANT.key_groups, 1], [2, 1, 0])
    PAIR: gl.constexpr = gl.SliceLayout(2, READ)
    RESULT: gl.constexpr = gl.SliceLayout(0, READ)
    part = gl.arange(0, PARTS, layout=gl.SliceLayout(1, PAIR))[:, None]
    column = gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, PAIR))
    pair = part * COLUMNS + column[None, :]
    largest = received_one(stats_at + pair * 8)
    sums = received_one(stats_at + pair * 8 + 4)
    top = gl.max(largest, axis=0)
    if VARIANT.sinks:
        sink = gl.load(sinks + query_head(target[5], column, target[6], VARIANT)) * LOG2E
        top = gl.maximum(top, sink)
    weights = gl.exp2(largest - top[None, :])
    total = gl.sum(sums * weights, axis=0)
    if VARIANT.sinks:
        total += gl.exp2(sink - top)
    d = gl.arange(0, SLICE, layout=gl.SliceLayout(0, gl.SliceLayout(1, READ)))[None, None, :]
    o = gl.sum(received(o_at + (gl.expand_dims(pair, 2) * SLICE + d) * 4) * gl.expand_dims(weights, 2), axis=0)
    gl.thread_barrier()  # results may be converted in the memory that these occupy
    total = gl.convert_layout(total, gl.SliceLayout(1, RESULT))
    o = o / gl.where(total == 0.0, 1.0, total)[:, None]
    offset = gl.convert_layout(out_offset(target, target[5], column, VARIANT), gl.SliceLayout(1, RESULT))
    is_stored = gl.convert_layout(is_column(column, target[4], target[6], VARIANT), gl.SliceLayout(1, RESULT))
    dims = rank * SLICE + gl.arange(0, SLICE, layout=gl.SliceLayout(0, RESULT))
    inside = is_stored[:, None] & (dims < VARIANT.head_dim)[None, :]
    gl.store(target[0] + offset[:, None] + dims[None, :], o.to(target[0].dtype.element_ty), mask=inside)
