"""`gluon.prefill.window.hopper`: attention of packed prompts under a window of at most 128 keys on sm_90, in Gluon.

A tile is a few tokens under all query heads of one KV head. All keys that they see fit in shared memory at once: the
SPAN keys before the tile's first token, and those of the tile itself. So a row meets its keys in one pass, and its
softmax is no online one.

  scheduler  1 warp        finds this program's tiles and posts them in a small shared ring
  producer   1 warp        copies keys and values of a tile, and its queries, 64 rows at a time, by TMA
  consumers  4 warps each  64 rows at a time: tokens under PACK heads each, both matmuls by wgmma

64 rows of one head would see 64 + 127 keys; those of 32 tokens under 2 heads see 32 + 127, and what one KV head's
queries share is copied once for all of them.

How it is launched: launch.py. Sources: Shah et al. 2024 (FA3); Beltagy et al. 2020 (attention under a window).
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
# The signatures of jitted functions are Triton's: only their constexpr parameters are annotated.

from triton import constexpr_function
from triton.experimental.gluon import jit
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma, warpgroup_mma_wait

from kernels.hopper import variants
from kernels.hopper.blocks import head_sink
from kernels.hopper.pipeline import HALF, barriers
from kernels.hopper.schedule import RING, post, read
from kernels.hopper.softmax import lane_sum, reciprocal, row_totals
from kernels.hopper.store import store_rows

ROWS = gl.constexpr(variants.ROWS)
SPAN = gl.constexpr(128)  # keys before a tile's first token: the widest window
SEQS = gl.constexpr(256)  # sequences that the scheduler looks at at once
LANES = gl.constexpr(gl.BlockedLayout([SEQS.value // 32], [32], [1], [0]))  # of its one warp


@jit
def window_rings(dtype: gl.constexpr, VARIANT: gl.constexpr):
    """The shared memory of one program: posted tiles, and rings of queries, keys and values with their barriers."""
    TILING: gl.constexpr = VARIANT.tiling
    CONSUMERS: gl.constexpr = TILING.consumers
    TOKENS: gl.constexpr = ROWS // VARIANT.pack
    BLOCK_D: gl.constexpr = TILING.block_d
    TILES_LAYOUT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    Q_LAYOUT: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, BLOCK_D], dtype)
    LAYOUT: gl.constexpr = gl.NVMMASharedLayout.get_default_for([SPAN, BLOCK_D], dtype)
    OWN_LAYOUT: gl.constexpr = gl.NVMMASharedLayout.get_default_for([TOKENS, BLOCK_D], dtype)
    q_full = barriers(TILING.q_buffers, 1)
    q_free = barriers(TILING.q_buffers, 1)
    k_full = barriers(TILING.stages, 1)
    v_full = barriers(TILING.stages, 1)
    free = barriers(TILING.stages, CONSUMERS)
    tile_full = barriers(RING, 1)
    tile_free = barriers(RING, CONSUMERS + 1)
    queries = (gl.allocate_shared_memory(dtype, [TILING.q_buffers, ROWS, BLOCK_D], Q_LAYOUT), q_full, q_free)
    k_before = gl.allocate_shared_memory(dtype, [TILING.stages, SPAN, BLOCK_D], LAYOUT)
    v_before = gl.allocate_shared_memory(dtype, [TILING.stages, SPAN, BLOCK_D], LAYOUT)
    k_own = gl.allocate_shared_memory(dtype, [TILING.stages, TOKENS, BLOCK_D], OWN_LAYOUT)
    v_own = gl.allocate_shared_memory(dtype, [TILING.stages, TOKENS, BLOCK_D], OWN_LAYOUT)
    keys = (k_before, k_own, k_full, free)
    values = (v_before, v_own, v_full)
    tiles = (gl.allocate_shared_memory(gl.int32, [RING * VARIANT.fields, 1], TILES_LAYOUT), tile_full, tile_free)
    return tiles, queries, keys, values


@jit
def add(a, b):
    return a + b


@jit
def num_blocks(starts_q, first, num_seqs, TOKENS: gl.constexpr):
    """Row blocks of the SEQS sequences from `first` on: up to each, itself included, and of all of them."""
    sequence = first + gl.arange(0, SEQS, layout=LANES)
    inside = sequence < num_seqs
    start = gl.load(starts_q + sequence, mask=inside, other=0)
    end = gl.load(starts_q + sequence + 1, mask=inside, other=0)
    counts = (end - start + TOKENS - 1) // TOKENS
    return gl.associative_scan(counts, 0, add), gl.sum(counts, axis=0)


@jit
def hand_out(starts_q, starts_k, num_seqs, num_heads, tiles, VARIANT: gl.constexpr):
    """The scheduler's role: posts every num_programs-th tile; a first row of -1 ends every role.

    Under a short window all tiles take as long: nothing is planned, and none is taken from another program. The heads
    of a row block are neighbours, so that the rows that they lie in are read together.
    """
    ring, ring_full, ring_free = tiles
    TOKENS: gl.constexpr = ROWS // VARIANT.pack
    first = 0  # of the sequences that are looked at
    before = 0  # row blocks of those before
    up_to, total = num_blocks(starts_q, first, num_seqs, TOKENS)
    tile = gl.program_id(0)
    known = -1  # the sequence that the numbers below are of
    row = 0
    num_rows = 0
    first_key = 0
    num_keys = 0
    n = 0
    go = True
    while go:
        block = tile // num_heads
        while (block >= before + total) & (first + SEQS < num_seqs):
            before += total
            first += SEQS
            up_to, total = num_blocks(starts_q, first, num_seqs, TOKENS)
        go = block < before + total
        passed = up_to <= block - before  # sequences that end before it
        sequence = first + gl.sum(passed.to(gl.int32), axis=0)
        start = (block - before - gl.max(gl.where(passed, up_to, 0), axis=0)) * TOKENS
        if go & (sequence != known):
            row = gl.load(starts_q + sequence)
            num_rows = gl.load(starts_q + sequence + 1) - row
            first_key = gl.load(starts_k + sequence)
            num_keys = gl.load(starts_k + sequence + 1) - first_key
            known = sequence
        slot = n % RING
        mbarrier.wait(ring_free.index(slot), ((n // RING) & 1) ^ 1)
        post(ring, slot * VARIANT.fields, gl.where(go, row + start, -1))
        post(ring, slot * VARIANT.fields + 1, gl.minimum(num_rows - start, TOKENS))
        post(ring, slot * VARIANT.fields + 2, num_keys - num_rows + start)
        post(ring, slot * VARIANT.fields + 3, num_keys)
        post(ring, slot * VARIANT.fields + 4, tile - block * num_heads)
        post(ring, slot * VARIANT.fields + 5, first_key)
        mbarrier.arrive(ring_full.index(slot), count=1)
        tile += gl.num_programs(0)
        n += 1


@jit
def next_tile(tiles, n, VARIANT: gl.constexpr):
    """The n-th tile: first query row (-1: no more), rows, position of the first, keys, KV head, first key row."""
    ring, ring_full, ring_free = tiles
    slot = n % RING
    mbarrier.wait(ring_full.index(slot), (n // RING) & 1)
    row = read(ring, slot * VARIANT.fields)
    rows = read(ring, slot * VARIANT.fields + 1)
    position = read(ring, slot * VARIANT.fields + 2)
    num_keys = read(ring, slot * VARIANT.fields + 3)
    head = read(ring, slot * VARIANT.fields + 4)
    first_key = read(ring, slot * VARIANT.fields + 5)
    mbarrier.arrive(ring_free.index(slot), count=1)
    return row, rows, position, num_keys, head, first_key


@jit
def load_window_keys(desc, row, head, keys, stage, VARIANT: gl.constexpr):
    """The SPAN keys before key row `row`, and those from it on. What is of another sequence the mask removes."""
    TOKENS: gl.constexpr = ROWS // VARIANT.pack
    BLOCK_D: gl.constexpr = VARIANT.tiling.block_d
    bar = keys[2].index(stage)
    mbarrier.expect(bar, (SPAN + TOKENS) * BLOCK_D * 2)
    before = keys[0].index(stage).reshape([SPAN, 1, BLOCK_D])
    for i in gl.static_range(SPAN // TOKENS):
        at = [row - SPAN + i * TOKENS, head, 0]
        tma.async_copy_global_to_shared(desc, at, bar, before.slice(i * TOKENS, TOKENS, dim=0))
    own = keys[1].index(stage).reshape([TOKENS, 1, BLOCK_D])
    tma.async_copy_global_to_shared(desc, [row, head, 0], bar, own)


@jit
def load_window_values(desc, row, num_before, num_own, head, values, stage, VARIANT: gl.constexpr):
    """The values of those keys; of other sequences arrive zeros, since 0 * NaN is NaN.

    num_before, num_own  keys of the sequence before `row` and from it on

    The map of `value_dims` reads zeros from some row on (pipeline.py). With the third index below 0, by as many rows as
    the second one is ahead, what would be before that row is outside of the tensor too.
    """
    TOKENS: gl.constexpr = ROWS // VARIANT.pack
    BLOCK_D: gl.constexpr = VARIANT.tiling.block_d
    bar = values[2].index(stage)
    mbarrier.expect(bar, (SPAN + TOKENS) * BLOCK_D * 2)
    before = values[0].index(stage).reshape([1, 1, SPAN, 1, BLOCK_D])
    for i in gl.static_range(SPAN // TOKENS):
        hidden = gl.minimum(gl.maximum(SPAN - i * TOKENS - num_before, 0), TOKENS)
        at = [0, row - SPAN + i * TOKENS + hidden, 0 - hidden, head, 0]
        tma.async_copy_global_to_shared(desc, at, bar, before.slice(i * TOKENS, TOKENS, dim=2))
    rows = gl.minimum(gl.maximum(num_own, 0), TOKENS)
    own = values[1].index(stage).reshape([1, 1, TOKENS, 1, BLOCK_D])
    tma.async_copy_global_to_shared(desc, [HALF, row + rows, HALF - rows, head, 0], bar, own)


@jit
def produce_window(q_desc, k_desc, v_desc, num_parts, tiles, queries, keys, values, VARIANT: gl.constexpr):
    """The producer's role. num_parts: of a tile, PACK query heads each."""
    q_smem, q_full, q_free = queries
    PACK: gl.constexpr = VARIANT.pack
    TOKENS: gl.constexpr = ROWS // PACK
    BLOCK_D: gl.constexpr = VARIANT.tiling.block_d
    STAGES: gl.constexpr = VARIANT.tiling.stages
    Q_BUFFERS: gl.constexpr = VARIANT.tiling.q_buffers
    n = 0
    part = 0
    row, _rows, position, num_keys, head, first_key = next_tile(tiles, 0, VARIANT)
    while row >= 0:
        stage = n % STAGES
        begin = gl.maximum(position, 0)
        mbarrier.wait(keys[3].index(stage), ((n // STAGES) & 1) ^ 1)
        load_window_keys(k_desc, first_key + begin, head, keys, stage, VARIANT)
        for i in range(num_parts):
            buffer = part % Q_BUFFERS
            mbarrier.wait(q_free.index(buffer), ((part // Q_BUFFERS) & 1) ^ 1)
            bar = q_full.index(buffer)
            mbarrier.expect(bar, ROWS * BLOCK_D * 2)
            box = q_smem.index(buffer).reshape([TOKENS, PACK, BLOCK_D])
            tma.async_copy_global_to_shared(q_desc, [row, (head * num_parts + i) * PACK, 0], bar, box)
            if i == 0:
                load_window_values(v_desc, first_key + begin, begin, num_keys - begin, head, values, stage, VARIANT)
            part += 1
        n += 1
        row, _rows, position, num_keys, head, first_key = next_tile(tiles, n, VARIANT)


@constexpr_function
def _hide(count: int, columns: int, compare: str) -> str:
    """PTX: of one thread's `count` scores those of the first `columns` become -inf whose bound compares so with them.

    A thread's columns are 2 (lane % 4) + {0, 1, 8, 9, 16 ...}, each of two rows in turn: bounds 0 and 2 stand for all.
    As immediates the columns take no registers, and as PTX no comparison is kept from one tile to the next: LLVM would
    pack those of all columns into bits, 200 instructions a tile.
    """
    lines = ["mov.u32 lane, %laneid;", "and.b32 lane, lane, 3;", "shl.b32 lane, lane, 1;"]
    lines += [f"sub.s32 bound{row}, ${2 * count + 2 * row}, lane;" for row in (0, 1)]
    for i in range(count):
        column = i // 4 * 8 + i % 2
        if column < columns:
            lines.append(f"setp.{compare}.s32 hidden, bound{i // 2 % 2}, {column};")
            lines.append(f"selp.f32 ${i}, 0fFF800000, ${i}, hidden;")
    return " ".join(["{ .reg .pred hidden; .reg .b32 lane, bound0, bound1;", *lines, "}"])


@constexpr_function
def _hide_constraints(count: int) -> str:
    return ",".join(["=f"] * count + [str(i) for i in range(count)] + ["r"] * count)


@jit
def hide(s, bound, COLUMNS: gl.constexpr, COMPARE: gl.constexpr):
    """Scores of the first COLUMNS columns become -inf where the bound of their row COMPAREs so with their column."""
    COUNT: gl.constexpr = s.shape[1] // 2
    bound, _ = gl.broadcast(gl.convert_layout(bound, gl.SliceLayout(1, s.type.layout))[:, None], s)
    return gl.inline_asm_elementwise(
        _hide(COUNT, COLUMNS, COMPARE), _hide_constraints(COUNT), [s, bound], dtype=gl.float32, is_pure=True, pack=COUNT
    )


@jit
def hide_unseen(s, own, token, position, begin, window, VARIANT: gl.constexpr, WHOLE: gl.constexpr):
    """Scores become -inf of keys that a row does not see: in `s` of those before key `begin`, in `own` of the others.

    token     of each row, counted from the tile's first one, which stands at `position`
    position  `begin`, but below 0 where queries are before the first key
    WHOLE     the window is SPAN: of `s` only the first columns may be before it
    """
    TOKENS: gl.constexpr = ROWS // VARIANT.pack
    last = token + (position - begin)  # column of `own` at which a row stands
    if WHOLE:
        s = hide(s, last, TOKENS, "ge")
    else:
        s = hide(s, last + (SPAN - window), SPAN, "ge")
        own = hide(own, last - window, TOKENS, "ge")
    own = hide(own, last, TOKENS, "lt")
    if begin < SPAN:  # what is before the sequence
        s = hide(s, token * 0 + (SPAN - begin), SPAN, "gt")
    return s, own


@jit
def lane_max(s):
    """Row maxima kept apart by lane ([64, 8]), as `lane_sum`."""
    return gl.max(s.reshape([s.shape[0], s.shape[1] // 8, 8]), axis=1)


@jit
def consume_window(
    result, sinks, scale, window, num_parts, tiles, queries, keys, values,
    W: gl.constexpr, STORE: gl.constexpr, VARIANT: gl.constexpr, WHOLE: gl.constexpr,
):  # fmt: skip
    """The role of consumer W: one part of a tile, 64 rows, after the other, each CONSUMERS-th of all."""
    q_smem, q_full, q_free = queries
    dtype: gl.constexpr = q_smem.dtype
    PACK: gl.constexpr = VARIANT.pack
    TOKENS: gl.constexpr = ROWS // PACK
    BLOCK_D: gl.constexpr = VARIANT.tiling.block_d
    STAGES: gl.constexpr = VARIANT.tiling.stages
    Q_BUFFERS: gl.constexpr = VARIANT.tiling.q_buffers
    CONSUMERS: gl.constexpr = VARIANT.tiling.consumers
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, SPAN, 16])
    OWN_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TOKENS, 16])
    O_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_D, 16])
    P_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, O_LAYOUT, 2)
    ROW: gl.constexpr = gl.SliceLayout(1, S_LAYOUT)
    OWN_ROW: gl.constexpr = gl.SliceLayout(1, OWN_LAYOUT)
    token = gl.arange(0, ROWS, layout=ROW) // PACK
    zero = gl.zeros([ROWS, SPAN], gl.float32, S_LAYOUT)
    zero_own = gl.zeros([ROWS, TOKENS], gl.float32, OWN_LAYOUT)
    zero_out = gl.zeros([ROWS, BLOCK_D], gl.float32, O_LAYOUT)

    n = 0
    part = W
    first = 0  # part of the tile
    row, rows, position, _num_keys, head, _first_key = next_tile(tiles, 0, VARIANT)
    while row >= 0:
        stage = n % STAGES
        phase = (n // STAGES) & 1
        begin = gl.maximum(position, 0)
        mbarrier.wait(keys[2].index(stage), phase)
        while part - first < num_parts:
            heads = head * num_parts + part - first
            buffer = part % Q_BUFFERS
            mbarrier.wait(q_full.index(buffer), (part // Q_BUFFERS) & 1)
            q = q_smem.index(buffer)
            s = warpgroup_mma(q, keys[0].index(stage).permute((1, 0)), zero, use_acc=False, is_async=True)
            own = warpgroup_mma(q, keys[1].index(stage).permute((1, 0)), zero_own, use_acc=False, is_async=True)
            sink = head_sink(sinks, heads, ROW, VARIANT)
            s, own = warpgroup_mma_wait(0, deps=(s, own))
            mbarrier.arrive(q_free.index(buffer), count=1)

            s, own = hide_unseen(s, own, token, position, begin, window, VARIANT, WHOLE)
            largest = lane_max(s)
            largest = gl.maximum(largest, gl.convert_layout(lane_max(own), largest.type.layout))
            m = gl.maximum(gl.convert_layout(gl.max(largest, axis=1), ROW) * scale, -1e30)
            p = gl.exp2(s * scale - m[:, None])
            p_own = gl.exp2(own * scale - gl.convert_layout(m, OWN_ROW)[:, None])
            sums = lane_sum(p)
            sums += gl.convert_layout(lane_sum(p_own), sums.type.layout)
            p16 = gl.convert_layout(p.to(dtype), P_LAYOUT)
            p16_own = gl.convert_layout(p_own.to(dtype), P_LAYOUT)

            mbarrier.wait(values[2].index(stage), phase)
            o = warpgroup_mma(p16, values[0].index(stage), zero_out, use_acc=False, is_async=True)
            o = warpgroup_mma(p16_own, values[1].index(stage), o, is_async=True)
            total = row_totals(sums, m, sink, 0, VARIANT)
            inverse = gl.where(total > 0.0, reciprocal(total), 0.0)
            inverse = gl.convert_layout(inverse, gl.SliceLayout(1, O_LAYOUT))
            o = warpgroup_mma_wait(0, deps=(o,))
            store_rows(result, row, rows, heads, (o * inverse[:, None],), 0, STORE, VARIANT)
            part += CONSUMERS
        mbarrier.arrive(keys[3].index(stage), count=1)
        first += num_parts
        n += 1
        row, rows, position, _num_keys, head, _first_key = next_tile(tiles, n, VARIANT)


@jit(do_not_specialize=["num_seqs", "num_heads", "num_parts", "window"])
def hallmark_gluon_window_prefill(
    q_desc, k_desc, v_desc, out, stride_row, stride_head, starts_q, starts_k, sinks, num_seqs, num_heads, num_parts,
    scale, window,
    STORE: gl.constexpr, VARIANT: gl.constexpr, WHOLE: gl.constexpr,
):  # fmt: skip
    """Rings, barriers and roles of one program. num_heads: KV heads; num_parts: of PACK query heads in each."""
    tiles, queries, keys, values = window_rings(q_desc.dtype, VARIANT)
    given = ((out, stride_row, stride_head), sinks, scale, window, num_parts, tiles, queries, keys, values)
    if VARIANT.tiling.consumers == 2:
        gl.warp_specialize([
            (consume_rows, (given, 0, STORE, VARIANT, WHOLE)),
            (consume_rows, (given, 1, STORE, VARIANT, WHOLE)),
            (produce_window, (q_desc, k_desc, v_desc, num_parts, tiles, queries, keys, values, VARIANT)),
            (hand_out, (starts_q, starts_k, num_seqs, num_heads, tiles, VARIANT)),
        ], [4, 1, 1], [240, 24, 24])  # fmt: skip
    else:
        gl.warp_specialize([
            (consume_rows, (given, 0, STORE, VARIANT, WHOLE)),
            (consume_rows, (given, 1, STORE, VARIANT, WHOLE)),
            (consume_rows, (given, 2, STORE, VARIANT, WHOLE)),
            (produce_window, (q_desc, k_desc, v_desc, num_parts, tiles, queries, keys, values, VARIANT)),
            (hand_out, (starts_q, starts_k, num_seqs, num_heads, tiles, VARIANT)),
        ], [4, 4, 1, 1], [160, 160, 32, 32])  # fmt: skip


@jit
def consume_rows(given, W: gl.constexpr, STORE: gl.constexpr, VARIANT: gl.constexpr, WHOLE: gl.constexpr):
    """The role of consumer W. One name for what all of them are given makes each a line."""
    consume_window(*given, W, STORE, VARIANT, WHOLE)
