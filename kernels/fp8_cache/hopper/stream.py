"""Copies by TMA and the arithmetic of `gluon.decode.fp8.hopper`; shares and cursors are those of 16 bits.

Keys and values travel and lie as units of 16 bits, two dims in each, so that TMA, `ldmatrix` and its transposed form,
which knows nothing smaller, take them. In registers a unit is taken apart, its lower byte an even dim, its upper byte
an odd one, each widened to fp16, which is exact. So a matmul over dims is two over units: of even dims, of odd ones.

Queries become fp16 times a power of two of their column, so that its largest lies in [256, 512): exact for bf16 down to
2**-25 of the largest. A key's scale multiplies its scores. A value's scale multiplies its weight, in units of the
largest scale so far (of which the accumulator is kept): weights are at most 4096 in fp16, whatever the scales are.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
# The signatures of jitted functions are Triton's: only their constexpr parameters are annotated.

from triton.experimental.gluon import jit
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from kernels.hopper.decode.stream import (
    NO_SCORE,
    first_visible,
    heads_of_row,
    mask_scores,
    next_tile,
    positions_of,
    tanh,
    zero_values,
)

LARGEST_WEIGHT = gl.constexpr(4096.0)
LEAST_UNIT = gl.constexpr(1e-32)  # below every scale: 2**-100 / 448


@jit
def make_ring(dtype: gl.constexpr, VARIANT: gl.constexpr):
    """Stages of (queries, keys, values) by chunks, barriers of both, scales of keys and of values.

    dtype: of queries. Keys and values are units, called fp16.
    """
    STAGES: gl.constexpr = VARIANT.stages
    Q_ROWS: gl.constexpr = VARIANT.heads * VARIANT.columns
    KV_ROWS: gl.constexpr = VARIANT.heads * VARIANT.block_n
    CHUNKS: gl.constexpr = VARIANT.chunks
    Q_LAYOUT: gl.constexpr = gl.NVMMASharedLayout.get_default_for([Q_ROWS, VARIANT.chunk_d], dtype)
    KV_LAYOUT: gl.constexpr = gl.NVMMASharedLayout.get_default_for([KV_ROWS, VARIANT.units], gl.float16)
    S_LAYOUT: gl.constexpr = gl.NVMMASharedLayout.get_default_for([VARIANT.heads, VARIANT.block_n], gl.float32)
    queries = gl.allocate_shared_memory(dtype, [STAGES * CHUNKS, Q_ROWS, VARIANT.chunk_d], Q_LAYOUT)
    keys = gl.allocate_shared_memory(gl.float16, [STAGES * CHUNKS, KV_ROWS, VARIANT.units], KV_LAYOUT)
    values = gl.allocate_shared_memory(gl.float16, [STAGES * CHUNKS, KV_ROWS, VARIANT.units], KV_LAYOUT)
    k_scales = gl.allocate_shared_memory(gl.float32, [STAGES, VARIANT.heads, VARIANT.block_n], S_LAYOUT)
    v_scales = gl.allocate_shared_memory(gl.float32, [STAGES, VARIANT.heads, VARIANT.block_n], S_LAYOUT)
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(k_full.index(i), count=1)
        mbarrier.init(v_full.index(i), count=1)
    return queries, keys, values, k_full, v_full, k_scales, v_scales


@jit
def start_state(HEADS: gl.constexpr, MMA: gl.constexpr, VARIANT: gl.constexpr):
    """Return the state of `attend_tile` before the first tile."""
    CHUNKS: gl.constexpr = VARIANT.chunks
    acc = ()
    for _c in gl.static_range(2 * CHUNKS):
        acc = acc + (gl.full([HEADS, VARIANT.units, VARIANT.columns], 0.0, gl.float32, MMA),)  # type: ignore[assignment]  # noqa: RUF005
    largest = gl.full([HEADS, VARIANT.columns], NO_SCORE, gl.float32, gl.SliceLayout(1, MMA))
    sums = gl.full([HEADS, VARIANT.columns], 0.0, gl.float32, gl.SliceLayout(1, MMA))
    unit = gl.full([HEADS], LEAST_UNIT, gl.float32, gl.SliceLayout(1, gl.SliceLayout(2, MMA)))
    return acc, largest, sums, unit


@jit
def fetch(cursor, tile, first_tile, end, stage, maps, table, ring, lengths, window, VARIANT: gl.constexpr):
    """Start the copies of a tile of this program, if there is one, as `kernels.hopper.decode.stream.fetch` does."""
    CHUNKS: gl.constexpr = VARIANT.chunks
    q_desc, k_desc, v_desc, k_scales_desc, v_scales_desc = maps
    KV_BYTES: gl.constexpr = CHUNKS * k_desc.block_type.nbytes + k_scales_desc.block_type.nbytes
    page_table, stride_table = table
    queries, keys_ring, values, k_full, v_full, k_scales, v_scales = ring
    if tile < end:
        sequence, query, _rows, keys, _tiles, first, row, block = cursor
        head, first_member = heads_of_row(row, VARIANT)
        key = (first + block) * VARIANT.block_n
        has_keys = keys > 0
        brings_queries = has_keys & ((block == 0) | (tile == first_tile))
        entry = page_table + sequence.to(gl.int64) * stride_table + key // VARIANT.page_size
        page = gl.load(entry, mask=has_keys, other=0)
        slot = key % VARIANT.page_size
        k_bar, v_bar = k_full.index(stage), v_full.index(stage)
        mbarrier.expect(k_bar, KV_BYTES, pred=has_keys & (brings_queries == 0))
        mbarrier.expect(k_bar, KV_BYTES + CHUNKS * q_desc.block_type.nbytes, pred=brings_queries)
        mbarrier.expect(v_bar, KV_BYTES, pred=has_keys)
        mbarrier.arrive(k_bar, count=1, pred=has_keys == 0)
        mbarrier.arrive(v_bar, count=1, pred=has_keys == 0)
        for c in gl.static_range(CHUNKS):
            k_box = keys_ring.index(stage * CHUNKS + c).reshape([1, VARIANT.heads, VARIANT.block_n, VARIANT.units])
            tma.async_copy_global_to_shared(k_desc, [page, head, slot, c * VARIANT.units], k_bar, k_box, pred=has_keys)
        s_box = k_scales.index(stage).reshape([1, VARIANT.heads, VARIANT.block_n])
        tma.async_copy_global_to_shared(k_scales_desc, [page, head, slot], k_bar, s_box, pred=has_keys)
        for c in gl.static_range(CHUNKS):
            q_box = queries.index(stage * CHUNKS + c).reshape(
                [VARIANT.heads, VARIANT.queries, VARIANT.members, VARIANT.chunk_d]
            )
            at = [head, query, first_member, c * VARIANT.chunk_d]
            tma.async_copy_global_to_shared(q_desc, at, k_bar, q_box, pred=brings_queries)
        for c in gl.static_range(CHUNKS):
            v_box = values.index(stage * CHUNKS + c).reshape([1, VARIANT.heads, VARIANT.block_n, VARIANT.units])
            tma.async_copy_global_to_shared(v_desc, [page, head, slot, c * VARIANT.units], v_bar, v_box, pred=has_keys)
        s_box = v_scales.index(stage).reshape([1, VARIANT.heads, VARIANT.block_n])
        tma.async_copy_global_to_shared(v_scales_desc, [page, head, slot], v_bar, s_box, pred=has_keys)
        cursor = next_tile(cursor, lengths, window, VARIANT)
    return cursor


@jit
def load_queries(ring, stage, HEADS: gl.constexpr, MMA: gl.constexpr, VARIANT: gl.constexpr):
    """Q^T of a stage in fp16: (chunks of even dims and of odd ones in turns, the power of two of each column)."""
    CHUNKS: gl.constexpr = VARIANT.chunks
    RIGHT: gl.constexpr = gl.DotOperandLayout(1, MMA, 2)
    Q_ROWS: gl.constexpr = HEADS * VARIANT.columns
    dtype: gl.constexpr = ring[0].dtype
    LAYOUT: gl.constexpr = gl.NVMMASharedLayout.get_default_for([Q_ROWS, VARIANT.units], gl.int32)
    evens, odds = (), ()
    largest = gl.full([HEADS, VARIANT.columns], 0.0, gl.float32, gl.SliceLayout(1, RIGHT))
    for c in gl.static_range(CHUNKS):
        words = ring[0].index(stage * CHUNKS + c)._reinterpret(gl.int32, [Q_ROWS, VARIANT.units], LAYOUT)
        word = words.reshape([HEADS, VARIANT.columns, VARIANT.units]).permute([0, 2, 1]).load(RIGHT)
        even, odd = halves(word, dtype)
        evens, odds = evens + (even,), odds + (odd,)  # type: ignore[assignment]  # noqa: RUF005
        largest = gl.maximum(largest, gl.max(gl.maximum(gl.abs(even), gl.abs(odd)), axis=1))
    # The power of two below the largest, and its inverse, by their exponents: both normal.
    exponent = gl.minimum(gl.maximum(largest.to(gl.int32, bitcast=True) >> 23, 16), 240)
    power = ((exponent - 8) << 23).to(gl.float32, bitcast=True)
    inverse = ((262 - exponent) << 23).to(gl.float32, bitcast=True)
    x = ()
    for c in gl.static_range(CHUNKS):
        x = x + ((evens[c] * inverse[:, None, :]).to(gl.float16), (odds[c] * inverse[:, None, :]).to(gl.float16))  # type: ignore[assignment]  # noqa: RUF005
    return x, gl.convert_layout(power, gl.SliceLayout(1, MMA))


@jit
def halves(word, dtype: gl.constexpr):
    """The lower and the upper number of 16 bits of a word, in fp32."""
    if dtype == gl.bfloat16:
        even = (word << 16).to(gl.float32, bitcast=True)
        odd = (word & -65536).to(gl.float32, bitcast=True)
    else:
        even = (word & 65535).to(gl.int16).to(gl.float16, bitcast=True).to(gl.float32)
        odd = (word >> 16).to(gl.int16).to(gl.float16, bitcast=True).to(gl.float32)
    return even, odd


@jit
def widen(units):
    """Even and odd dims of units, two e4m3 in each, in fp16: of the lower bytes, and of the upper ones."""
    return gl.inline_asm_elementwise(
        """
        {
        .reg .b32 sorted;
        .reg .b16 even, odd;
        prmt.b32 sorted, $2, 0, 0x3120;
        mov.b32 {even, odd}, sorted;
        cvt.rn.f16x2.e4m3x2 $0, even;
        cvt.rn.f16x2.e4m3x2 $1, odd;
        }
        """,
        "=r,=r,r", [units], dtype=(gl.float16, gl.float16), is_pure=True, pack=2,
    )  # fmt: skip


@jit
def attend_tile(x, powers, state, key, keys, rows, stage, phase, ring, scales, window, VARIANT: gl.constexpr):
    """One more tile of the online softmax, whose keys have arrived.

    x, powers   as `load_queries` has them
    state       O^T as chunks of even and odd dims in turns, unnormalised, in units of `unit` over 4096; maxima in log2
                and sums [heads, columns]; the largest scale of values so far [heads]
    """
    acc, largest, sums, unit = state
    scale, softcap_scale = scales
    MMA: gl.constexpr = acc[0].type.layout
    LEFT: gl.constexpr = gl.DotOperandLayout(0, MMA, 2)
    BY_KEY: gl.constexpr = gl.SliceLayout(2, MMA)
    BY_COLUMN: gl.constexpr = gl.SliceLayout(1, MMA)
    HEADS: gl.constexpr = VARIANT.heads
    N: gl.constexpr = VARIANT.block_n
    CHUNKS: gl.constexpr = VARIANT.chunks
    TILE: gl.constexpr = [HEADS, N, VARIANT.units]
    low = first_visible(rows, keys, window, VARIANT)
    s = gl.full([HEADS, N, VARIANT.columns], 0.0, gl.float32, MMA)
    for c in gl.static_range(CHUNKS):
        even, odd = widen(ring[1].index(stage * CHUNKS + c).reshape(TILE).load(LEFT))
        s = mma_v2(even, x[2 * c], s)
        s = mma_v2(odd, x[2 * c + 1], s)
    s = s * ring[5].index(stage).load(BY_KEY)[:, :, None]
    if VARIANT.softcap:
        s = tanh(s * (powers * softcap_scale)[:, None, :])
        factor = powers * 0.0 + scale
    else:
        factor = powers * scale
    is_masked = key + N > keys - rows + 1  # beyond what the first query sees
    if VARIANT.window:
        is_masked = is_masked | (key <= keys - 1 - window)
    if is_masked:
        s = mask_scores(s, key, keys, rows, window, VARIANT)
    new_largest = gl.maximum(largest, gl.max(s, axis=1) * factor)
    weights = gl.exp2(s * factor[:, None, :] - new_largest[:, None, :])
    decay = gl.exp2(largest - new_largest)
    sums = sums * decay + gl.sum(weights, axis=1)
    mbarrier.wait(ring[4].index(stage), phase)
    is_partial = (key + N > keys) | (key < low)
    v_scales = ring[6].index(stage).load(BY_KEY)
    if is_partial:
        n = key + gl.arange(0, N, layout=gl.SliceLayout(0, BY_KEY))[None, :]
        v_scales = gl.where((n >= low) & (n < keys), v_scales, gl.zeros_like(v_scales))
    new_unit = gl.maximum(unit, gl.max(v_scales, axis=1))
    weights = weights * (v_scales * (LARGEST_WEIGHT / new_unit)[:, None])[:, :, None]
    p = gl.convert_layout(weights.to(gl.float16), gl.DotOperandLayout(1, MMA, 2))
    decay = decay * gl.convert_layout(unit / new_unit, gl.SliceLayout(1, BY_COLUMN))[:, None]
    new_acc = ()
    for c in gl.static_range(CHUNKS):
        v = ring[2].index(stage * CHUNKS + c).reshape(TILE).permute([0, 2, 1]).load(LEFT)
        if is_partial:
            v = zero_values(v, key, low, keys, VARIANT)
        even, odd = widen(v)
        new_acc = new_acc + (  # type: ignore[assignment]  # noqa: RUF005
            mma_v2(even, p, acc[2 * c] * decay[:, None, :]),
            mma_v2(odd, p, acc[2 * c + 1] * decay[:, None, :]),
        )
    return new_acc, new_largest, sums, new_unit


@jit
def finished(state, VARIANT: gl.constexpr):
    """The state as `kernels.hopper.decode.kernel.store_result` takes it: chunks of neighbouring dims, in true units."""
    acc, largest, sums, unit = state
    LANES: gl.constexpr = VARIANT.units // 2
    WARPS: gl.constexpr = VARIANT.column_warps
    # Of neighbouring dims a thread has four, as where they are stored.
    EACH: gl.constexpr = gl.BlockedLayout([1, 2, 1], [1, LANES, 32 // LANES], [VARIANT.heads, 1, WARPS], [1, 2, 0])
    factor = (unit * (1.0 / LARGEST_WEIGHT))[:, None, None]
    out = ()
    CHUNKS: gl.constexpr = VARIANT.chunks
    for c in gl.static_range(CHUNKS):
        even, odd = gl.convert_layout(acc[2 * c] * factor, EACH), gl.convert_layout(acc[2 * c + 1] * factor, EACH)
        both = gl.join(even, odd).permute([0, 1, 3, 2])
        out = out + (both.reshape([VARIANT.heads, VARIANT.chunk_d, VARIANT.columns]),)  # type: ignore[assignment]  # noqa: RUF005
    return out, largest, sums


__all__ = ["attend_tile", "fetch", "finished", "load_queries", "make_ring", "positions_of", "start_state"]
