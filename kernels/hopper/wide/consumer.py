"""The consumers of the kernels for heads of 512: two, who share the 64 rows of a tile.

O of 64 rows takes 128 KiB, so each consumer holds half of its columns. Of a key block each computes the scores of half
of the keys, over all 512 dims, and its weights of them; the other one reads these from shared memory. One steady step,
of key block j (blocks run from the last a tile sees down to the first):

    issue S(j), own keys        wait for the other's P(j+1)    issue O += P(j+1) V(j+1), own columns
    wait S(j)   free K(j)       exchange maxima                softmax of S(j)
    wait O      free V(j+1)     store P(j), tell the other     rescale O

Maxima and P need two buffers at most: whoever writes has met the other one after the last read.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
# The signatures of jitted functions are Triton's: only their constexpr parameters are annotated.

from triton.experimental.gluon import jit
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from kernels.hopper.blocks import held_queries
from kernels.hopper.pipeline import (
    PAIR,
    ROWS,
    barriers,
    buffers,
    columns_of,
    free_key,
    free_value,
    hardware_arrive,
    hardware_sync,
    wait_fill,
)
from kernels.hopper.schedule import RING, first_of, take_tile
from kernels.hopper.softmax import (
    add_weights,
    lane_sum,
    larger_max,
    mask,
    needs_mask,
    reciprocal,
    rescale_part,
    row_max,
)
from kernels.hopper.store import store_columns, store_part_columns

READY = gl.constexpr(6)  # hardware barriers 6 and 7: the weights of consumer 0, of consumer 1 can be read
MEET = gl.constexpr(8)  # both consumers are here


@jit
def wide_rings(dtype: gl.constexpr, VARIANT: gl.constexpr):
    """The shared memory of one program: posted tiles, queries, keys and values, and what consumers exchange."""
    TILING: gl.constexpr = VARIANT.tiling
    STAGES: gl.constexpr = TILING.stages
    HALF_N: gl.constexpr = TILING.block_n // 2
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    P_LAYOUT: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, HALF_N], dtype)
    q_full = barriers(1, 1)
    q_free = barriers(1, 2)
    k_full = barriers(STAGES, 1)
    v_full = barriers(STAGES, 1)
    tile_full = barriers(RING, 1)
    tile_free = barriers(RING, 3)
    want = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(want, count=1)
    queries = (buffers(dtype, 1, ROWS, VARIANT), q_full, q_free)
    keys = (buffers(dtype, STAGES, TILING.block_n, VARIANT), k_full, k_full)  # given back by hardware barriers
    values = (buffers(dtype, STAGES, TILING.block_n, VARIANT), v_full, v_full)
    tiles = (gl.allocate_shared_memory(gl.int32, [RING * VARIANT.fields, 1], FLAT), tile_full, tile_free, want)
    p = (
        gl.allocate_shared_memory(dtype, [2, ROWS, HALF_N], P_LAYOUT),
        gl.allocate_shared_memory(dtype, [2, ROWS, HALF_N], P_LAYOUT),
    )
    maxima = (
        gl.allocate_shared_memory(gl.float32, [ROWS], FLAT),
        gl.allocate_shared_memory(gl.float32, [ROWS], FLAT),
    )
    totals = (
        gl.allocate_shared_memory(gl.float32, [ROWS], FLAT),
        gl.allocate_shared_memory(gl.float32, [ROWS], FLAT),
    )
    return tiles, queries, keys, values, (p, maxima, totals)


@jit
def only_stage(fill):
    """0, not known to the compiler: addresses of a constant stage would leave the loop, and spill (ptxas 12.8)."""
    return fill >> 30


@jit
def issue_half_scores(queries, keys, fill, zero, held, W: gl.constexpr, VARIANT: gl.constexpr):
    """S = Q K^T of the consumer's half of a key block."""
    HALF_N: gl.constexpr = VARIANT.tiling.block_n // 2
    stage = only_stage(fill)
    s = zero
    for i in gl.static_range(len(VARIANT.slices)):
        block = columns_of(keys[0], stage, VARIANT.slices[i][0], VARIANT.slices[i][1], VARIANT)
        k = block.slice(W * HALF_N, HALF_N, dim=0).permute((1, 0))
        if VARIANT.tiling.q_columns > 0 and i == 0:
            s = warpgroup_mma(held, k, s, use_acc=False, is_async=True)
        else:
            q = columns_of(queries[0], stage, VARIANT.slices[i][0], VARIANT.slices[i][1], VARIANT)
            s = warpgroup_mma(q, k, s, use_acc=i > 0, is_async=True)
    return s


@jit
def issue_half_output(values, fill, acc, exchange, W: gl.constexpr, VARIANT: gl.constexpr):
    """O += P V of a block whose values have arrived, in the consumer's columns: by both halves of the keys."""
    HALF_N: gl.constexpr = VARIANT.tiling.block_n // 2
    HALF_D: gl.constexpr = VARIANT.tiling.block_d // 2
    OTHER: gl.constexpr = 1 - W
    v = columns_of(values[0], only_stage(fill), W * HALF_D, HALF_D, VARIANT)
    acc = warpgroup_mma(exchange[0][W].index(fill % 2), v.slice(W * HALF_N, HALF_N, dim=0), acc, is_async=True)
    p_other = exchange[0][OTHER].index(fill % 2)
    return warpgroup_mma(p_other, v.slice(OTHER * HALF_N, HALF_N, dim=0), acc, is_async=True)


@jit
def with_other(x, places, COMBINE: gl.constexpr, W: gl.constexpr):
    """A number of each row, joined with the other consumer's: the larger one, or their sum."""
    places[W].store(x)
    hardware_sync(MEET, PAIR)
    other = places[1 - W].load(x.type.layout)
    if COMBINE == "max":
        x = gl.maximum(x, other)
    else:
        x = x + other
    return x


@jit
def hand_over(p16, exchange, fill, W: gl.constexpr):
    """Let the other consumer read these weights."""
    exchange[0][W].index(fill % 2).store(p16)
    fence_async_shared()
    hardware_arrive(READY + W, PAIR)


@jit
def masked(s, position, index, visible, block, MASKED: gl.constexpr, W: gl.constexpr, VARIANT: gl.constexpr):
    """Scores of a block's half; MASKED: 1 where the block asks for it, 2 always."""
    BLOCK_N: gl.constexpr = VARIANT.tiling.block_n
    first_col = block * BLOCK_N + W * (BLOCK_N // 2)
    if MASKED == 2:
        s = mask(s, position + index, visible, 0, first_col, True, VARIANT)
    elif VARIANT.is_masked_inside:  # noqa: SIM102 -- the outer one is decided by the compiler
        if needs_mask(block, position, 0, VARIANT):
            s = mask(s, position + index, visible, 0, first_col, True, VARIANT)
    return s


@jit
def consume_half(result, scale, tiles, queries, keys, values, exchange, W: gl.constexpr, STORE: gl.constexpr,
                 VARIANT: gl.constexpr):  # fmt: skip
    """The role of consumer W: half of the keys of each block, half of the columns of O.

    result  the output, its strides of a row and of a head; with parts: their tensor, that of their logs, heads of tiles
    """
    q_smem, q_full, q_free = queries
    dtype: gl.constexpr = q_smem[0].dtype
    HALF_N: gl.constexpr = VARIANT.tiling.block_n // 2
    HALF_D: gl.constexpr = VARIANT.tiling.block_d // 2
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HALF_N, 16])
    O_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HALF_D, 16])
    S_ROW: gl.constexpr = gl.SliceLayout(1, S_LAYOUT)
    index = gl.arange(0, ROWS, layout=S_ROW) // VARIANT.pack
    zero = gl.zeros([ROWS, HALF_N], gl.float32, S_LAYOUT)
    fill = 0
    n = 0
    row, rows, position, num_keys, head, _first_key, low, top, part = take_tile(tiles, 0, VARIANT)
    while row >= 0:
        low = first_of(low, VARIANT)
        num_more = top - low
        visible = (row, row, rows, num_keys, index)
        mbarrier.wait(q_full.index(0), n & 1)
        wait_fill(keys, fill, True, VARIANT)
        held = held_queries(queries, 0, zero, VARIANT)
        s = issue_half_scores(queries, keys, fill, zero, held, W, VARIANT)
        s = warpgroup_mma_wait(0, deps=(s,))
        free_key(keys, fill, True, VARIANT)
        mbarrier.arrive(q_free.index(0), count=1, pred=num_more == 0)
        s = masked(s, position, index, visible, top, 2, W, VARIANT)
        m = with_other(row_max(s, S_ROW) * scale, exchange[1], "max", W)
        if VARIANT.may_see_nothing:
            m = gl.maximum(m, -1e30)
        p = gl.exp2(s * scale - m[:, None])
        sums = lane_sum(p)
        hand_over(p.to(dtype), exchange, fill, W)
        acc = gl.zeros([ROWS, HALF_D], gl.float32, O_LAYOUT)
        fill += 1
        for i in range(num_more):
            wait_fill(keys, fill, True, VARIANT)
            hardware_sync(READY + 1 - W, PAIR)
            s = issue_half_scores(queries, keys, fill, zero, held, W, VARIANT)
            wait_fill(values, fill - 1, True, VARIANT)
            acc = issue_half_output(values, fill - 1, acc, exchange, W, VARIANT)
            s = warpgroup_mma_wait(2, deps=(s,))
            free_key(keys, fill, True, VARIANT)
            mbarrier.arrive(q_free.index(0), count=1, pred=i + 1 == num_more)
            s = masked(s, position, index, visible, top - 1 - i, 1, W, VARIANT)
            m_new = larger_max(m, with_other(row_max(s, S_ROW) * scale, exchange[1], "max", W), VARIANT)
            p = gl.exp2(s * scale - m_new[:, None])
            shrink = gl.exp2(m - m_new)
            sums = add_weights(sums, shrink, p)
            hand_over(p.to(dtype), exchange, fill, W)
            wait_fill(values, fill - 1, True, VARIANT)  # cannot block: pins the softmax before the wait for O
            acc = warpgroup_mma_wait(0, deps=(acc,))
            free_value(values, fill - 1, VARIANT)
            acc = rescale_part(acc, shrink, VARIANT)
            m = m_new
            fill += 1
        hardware_sync(READY + 1 - W, PAIR)
        wait_fill(values, fill - 1, True, VARIANT)
        acc = issue_half_output(values, fill - 1, acc, exchange, W, VARIANT)
        total = with_other(gl.sum(sums, axis=1), exchange[2], "sum", W)
        acc = warpgroup_mma_wait(0, deps=(acc,))
        free_value(values, fill - 1, VARIANT)
        store_half(result, row, rows, head, part, acc, m, total, W, STORE, VARIANT)
        n += 1
        row, rows, position, num_keys, head, _first_key, low, top, part = take_tile(tiles, n, VARIANT)


@jit
def store_half(
    result, row, rows, head, part, acc, m, total, W: gl.constexpr, STORE: gl.constexpr, VARIANT: gl.constexpr
):
    """The consumer's columns of a tile's rows, over what the weights sum to; 0 in rows that see nothing."""
    HALF_D: gl.constexpr = VARIANT.tiling.block_d // 2
    inverse = reciprocal(total)
    if VARIANT.may_see_nothing:
        inverse = gl.where(total > 0.0, inverse, 0.0)
    o = acc * gl.convert_layout(inverse, gl.SliceLayout(1, acc.type.layout))[:, None]
    if VARIANT.parts:
        if part >= 0:
            logs, num_heads = result[4], result[5]
            first = (part * num_heads + head) * ROWS
            store_part_columns(result, first, o, W * HALF_D, VARIANT)
            if W == 0:
                at = first + gl.arange(0, ROWS, layout=total.type.layout)
                gl.store(logs + at, gl.convert_layout(m, total.type.layout) + gl.log2(total))
        else:
            store_whole(result, row, rows, head, o, W, STORE, VARIANT)
    else:
        store_whole(result, row, rows, head, o, W, STORE, VARIANT)


@jit
def store_whole(result, row, rows, head, o, W: gl.constexpr, STORE: gl.constexpr, VARIANT: gl.constexpr):
    HALF_D: gl.constexpr = VARIANT.tiling.block_d // 2
    o = gl.convert_layout(o.to(result[0].dtype.element_ty), STORE)
    store_columns(result, row, rows, head, o, W * HALF_D, 0, VARIANT)
