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

from kernels.hopper.decode.exchange import combine_cluster
from kernels.hopper.decode.kernel import launch_dependents, wait_for_launch_before
from kernels.hopper.decode.shares import heads_of_row
from kernels.hopper.decode.stream import attend_tile, start_state


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
