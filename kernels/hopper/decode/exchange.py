"""How the programs of a cluster put together the parts of a row, through their shared memory."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
# The signatures of jitted functions are Triton's: only their constexpr parameters are annotated.

from triton.experimental.gluon import jit
from triton.experimental.gluon import language as gl

from kernels.hopper.decode.kernel import LOG2E, is_column, out_offset, query_head
from kernels.tma.cluster import expect_parts, meet, received, received_one, send, send_one, wait_for_parts


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
    gl.thread_barrier()  # whoever converts may do so where these lie
    total = gl.convert_layout(total, gl.SliceLayout(1, RESULT))
    o = o / gl.where(total == 0.0, 1.0, total)[:, None]
    offset = gl.convert_layout(out_offset(target, target[5], column, VARIANT), gl.SliceLayout(1, RESULT))
    is_stored = gl.convert_layout(is_column(column, target[4], target[6], VARIANT), gl.SliceLayout(1, RESULT))
    dims = rank * SLICE + gl.arange(0, SLICE, layout=gl.SliceLayout(0, RESULT))
    inside = is_stored[:, None] & (dims < VARIANT.head_dim)[None, :]
    gl.store(target[0] + offset[:, None] + dims[None, :], o.to(target[0].dtype.element_ty), mask=inside)
