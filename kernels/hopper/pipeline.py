"""Stages of keys and values in shared memory: how consumers give them back, and the producer that fills them by TMA."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
# The signatures of jitted functions are Triton's: only their constexpr parameters are annotated.

from triton.experimental.gluon import jit
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from kernels.hopper import variants
from kernels.hopper.schedule import AHEAD, RING, take_tile

ROWS = gl.constexpr(variants.ROWS)
# Hardware barriers, 16 in all. Triton 3.6 uses 0, 1 and one for each further partition of 4 warps: up to 3 here.
TURN = gl.constexpr(6)  # 6..8: whose turn it is to issue wgmma
FREE = gl.constexpr(9)  # from 9: stages of K, then of V, given back; up to 3 of each
PAIR = gl.constexpr(256)  # threads of two consumers: the one that passes a turn, and the one that takes it
HALF = gl.constexpr(1 << 30)  # row bound of V's descriptor, see `value_descriptor`


@jit
def barriers(COUNT: gl.constexpr, ARRIVALS: gl.constexpr):
    bars = gl.allocate_shared_memory(gl.int64, [COUNT, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(COUNT):
        mbarrier.init(bars.index(i), count=ARRIVALS)
    return bars


@jit
def buffers(dtype: gl.constexpr, COUNT: gl.constexpr, HEIGHT: gl.constexpr, VARIANT: gl.constexpr):
    """Shared memory for COUNT boxes of HEIGHT rows: a tensor for each part of a row."""
    MAIN: gl.constexpr = VARIANT.row_parts[0]
    MAIN_LAYOUT: gl.constexpr = gl.NVMMASharedLayout.get_default_for([HEIGHT, MAIN], dtype)
    smem = (gl.allocate_shared_memory(dtype, [COUNT, HEIGHT, MAIN], MAIN_LAYOUT),)
    if len(VARIANT.row_parts) == 2:
        TAIL: gl.constexpr = VARIANT.row_parts[1]
        TAIL_LAYOUT: gl.constexpr = gl.NVMMASharedLayout.get_default_for([HEIGHT, TAIL], dtype)
        smem = (smem[0], gl.allocate_shared_memory(dtype, [COUNT, HEIGHT, TAIL], TAIL_LAYOUT))  # type: ignore[assignment]
    return smem


@jit
def columns_of(smem, box, FIRST: gl.constexpr, WIDTH: gl.constexpr, VARIANT: gl.constexpr):
    """Columns of one box; none are of two parts."""
    MAIN: gl.constexpr = VARIANT.row_parts[0]
    if FIRST >= MAIN:
        part = smem[1].index(box).slice(FIRST - MAIN, WIDTH, dim=1)
    else:
        part = smem[0].index(box).slice(FIRST, WIDTH, dim=1)
    return part


@jit
def rings(dtype: gl.constexpr, VARIANT: gl.constexpr):
    """The shared memory of one program: posted tiles, and rings of queries, keys and values with their barriers."""
    TILING: gl.constexpr = VARIANT.tiling
    CONSUMERS: gl.constexpr = TILING.consumers
    TILES_LAYOUT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    q_full = barriers(TILING.q_buffers * CONSUMERS, 1)
    q_free = barriers(TILING.q_buffers * CONSUMERS, 1)
    k_full = barriers(TILING.stages, 1)
    v_full = barriers(TILING.stages, 1)
    tile_full = barriers(RING, 1)
    tile_free = barriers(RING, CONSUMERS + 1)
    want = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(want, count=1)
    if TILING.named_barriers:  # never allocate what no role uses: Triton would lay it over the queries
        k_free = k_full
        v_free = v_full
    else:
        k_free = barriers(TILING.stages, CONSUMERS)
        v_free = barriers(TILING.stages, CONSUMERS)
    queries = (buffers(dtype, TILING.q_buffers * CONSUMERS, ROWS, VARIANT), q_full, q_free)
    keys = (buffers(dtype, TILING.stages, TILING.block_n, VARIANT), k_full, k_free)
    values = (buffers(dtype, TILING.stages, TILING.block_n, VARIANT), v_full, v_free)
    tiles = (gl.allocate_shared_memory(gl.int32, [RING * VARIANT.fields, 1], TILES_LAYOUT), tile_full, tile_free, want)
    return tiles, queries, keys, values


# Gluon 3.6 has no hardware barriers. An mbarrier's arrive costs its partition a bar.sync; bar.arrive does not block.
@jit
def hardware_sync(index, threads):
    gl.inline_asm_elementwise(
        "bar.sync $1, $2; mov.b32 $0, 0;", "=r,r,r", [index, threads], dtype=gl.int32, is_pure=False, pack=1
    )


@jit
def hardware_arrive(index, threads):
    gl.inline_asm_elementwise(
        "bar.arrive $1, $2; mov.b32 $0, 0;", "=r,r,r", [index, threads], dtype=gl.int32, is_pure=False, pack=1
    )


@jit
def take_turn(W: gl.constexpr, VARIANT: gl.constexpr):
    """Wait until the other consumers have issued theirs. A key block is one turn, also when it is skipped."""
    if VARIANT.tiling.named_barriers:
        hardware_sync(TURN + W, PAIR)


@jit
def pass_turn(W: gl.constexpr, VARIANT: gl.constexpr):
    NEXT: gl.constexpr = (W + 1) % VARIANT.tiling.consumers
    if VARIANT.tiling.named_barriers:
        hardware_arrive(TURN + NEXT, PAIR)


@jit
def free_stage(free, stage, FIRST: gl.constexpr, pred, VARIANT: gl.constexpr):
    """A consumer gives a stage back. Only after its fill: else the arrival would count for the fill before."""
    THREADS: gl.constexpr = VARIANT.tiling.consumers * 128 + 32
    if VARIANT.tiling.named_barriers:
        if pred:
            hardware_arrive(FIRST + stage, THREADS)
    else:
        mbarrier.arrive(free.index(stage), count=1, pred=pred)


@jit
def free_key(keys, fill, pred, VARIANT: gl.constexpr):
    free_stage(keys[2], fill % VARIANT.tiling.stages, FREE, pred, VARIANT)


@jit
def free_value(values, fill, VARIANT: gl.constexpr):
    FIRST: gl.constexpr = FREE + VARIANT.tiling.stages
    free_stage(values[2], fill % VARIANT.tiling.stages, FIRST, True, VARIANT)


@jit
def wait_fill(ring, fill, pred, VARIANT: gl.constexpr):
    STAGES: gl.constexpr = VARIANT.tiling.stages
    mbarrier.wait(ring[1].index(fill % STAGES), (fill // STAGES) & 1, pred=pred)


@jit
def claim_stage(free, fill, FIRST: gl.constexpr, VARIANT: gl.constexpr):
    """The producer waits until every consumer has given back what the stage held."""
    STAGES: gl.constexpr = VARIANT.tiling.stages
    THREADS: gl.constexpr = VARIANT.tiling.consumers * 128 + 32
    if VARIANT.tiling.named_barriers:
        if fill >= STAGES:
            hardware_sync(FIRST + fill % STAGES, THREADS)
    else:
        mbarrier.wait(free.index(fill % STAGES), ((fill // STAGES) & 1) ^ 1)


@jit
def copy_rows(desc, row, head, bar, smem, box, VARIANT: gl.constexpr):
    """Rows of one head, `copied` columns at a time."""
    HEIGHT: gl.constexpr = smem[0].shape[1]
    mbarrier.expect(bar, HEIGHT * VARIANT.tiling.block_d * 2)
    for i in gl.static_range(len(VARIANT.copies)):
        part = smem[VARIANT.copies[i][0]].index(box).reshape([HEIGHT, 1, VARIANT.row_parts[VARIANT.copies[i][0]]])
        to = part.slice(VARIANT.copies[i][1], VARIANT.copied, dim=2)
        tma.async_copy_global_to_shared(desc, [row, head, VARIANT.copies[i][2]], bar, to)


@jit
def load_queries(q_desc, row, head, n, queries, VARIANT: gl.constexpr):
    """The n-th tile's queries, one box a consumer. Rows past the tile are loaded too and never stored."""
    q_smem, q_full, q_free = queries
    Q_BUFFERS: gl.constexpr = VARIANT.tiling.q_buffers
    CONSUMERS: gl.constexpr = VARIANT.tiling.consumers
    for w in gl.static_range(CONSUMERS):
        buffer = (n % Q_BUFFERS) * CONSUMERS + w
        mbarrier.wait(q_free.index(buffer), ((n // Q_BUFFERS) & 1) ^ 1)
        copy_rows(q_desc, row + w * ROWS, head, q_full.index(buffer), q_smem, buffer, VARIANT)


@jit
def load_keys(desc, row, head, keys, stage, VARIANT: gl.constexpr):
    """One key block. Rows past the sequence come along: the mask removes them."""
    copy_rows(desc, row, head, keys[1].index(stage), keys[0], stage, VARIANT)


@jit
def load_values(desc, row, num_rows, head, values, stage, VARIANT: gl.constexpr):
    """One value block; rows from `num_rows` on arrive as zeros, since 0 * NaN is NaN."""
    BLOCK_N: gl.constexpr = VARIANT.tiling.block_n
    rows = gl.minimum(gl.maximum(num_rows, 0), BLOCK_N)
    bar = values[1].index(stage)
    mbarrier.expect(bar, BLOCK_N * VARIANT.tiling.block_d * 2)
    for i in gl.static_range(len(VARIANT.copies)):
        smem = values[0][VARIANT.copies[i][0]]
        part = smem.index(stage).reshape([1, 1, BLOCK_N, 1, VARIANT.row_parts[VARIANT.copies[i][0]]])
        to = part.slice(VARIANT.copies[i][1], VARIANT.copied, dim=4)
        tma.async_copy_global_to_shared(desc, [HALF, row + rows, HALF - rows, head, VARIANT.copies[i][2]], bar, to)


@jit
def produce(q_desc, k_desc, v_desc, group, tiles, queries, keys, values, VARIANT: gl.constexpr):
    """The producer's role: queries, keys and values of one tile after the other, ahead of the consumers.

    Key blocks go from the last one a tile sees down to the first, so that the masked ones come first. Keys are copied
    one block ahead of values, also into the next tile: consumers give them back half a step earlier.
    """
    want = tiles[3]
    k_free = keys[2]
    v_free = values[2]
    BLOCK_N: gl.constexpr = VARIANT.tiling.block_n
    STAGES: gl.constexpr = VARIANT.tiling.stages
    Q_BUFFERS: gl.constexpr = VARIANT.tiling.q_buffers
    fill = 0
    n = 0
    row, _rows, _position, num_keys, head, first_key, low, top, _part = take_tile(tiles, 0, VARIANT)
    value_row = row  # where the values of the block before are, how many of its sequence, and of which head
    num_values = num_keys
    value_head = head
    while row >= 0:
        kv_head = head // group
        for i in range(top - low + 1):
            stage = fill % STAGES
            first = (top - i) * BLOCK_N
            mbarrier.arrive(want, count=1, pred=i == gl.maximum(top - low - AHEAD, 0))
            if Q_BUFFERS > 1 and i == 0:
                load_queries(q_desc, row, head, n, queries, VARIANT)
            claim_stage(k_free, fill, FREE, VARIANT)
            load_keys(k_desc, first_key + first, kv_head, keys, stage, VARIANT)
            if fill > 0:
                before = (fill - 1) % STAGES
                claim_stage(v_free, fill - 1, FREE + STAGES, VARIANT)
                load_values(v_desc, value_row, num_values, value_head, values, before, VARIANT)
            if Q_BUFFERS == 1 and i == 0:  # the only buffer frees late
                load_queries(q_desc, row, head, n, queries, VARIANT)
            value_row = first_key + first
            num_values = num_keys - first
            value_head = kv_head
            fill += 1
        n += 1
        row, _rows, _position, num_keys, head, first_key, low, top, _part = take_tile(tiles, n, VARIANT)
    if fill > 0:
        before = (fill - 1) % STAGES
        claim_stage(v_free, fill - 1, FREE + STAGES, VARIANT)
        load_values(v_desc, value_row, num_values, value_head, values, before, VARIANT)
