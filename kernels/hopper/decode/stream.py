"""Key splits of `gluon.decode.hopper`, and the stream of one program's tiles: copies by TMA ahead of the arithmetic.

A row is the queries of one sequence under a set of neighbouring KV heads (`heads` of them); where a group of query
heads is too large for the registers, each part of it is a row of its own. A tile is `block_n` keys of a row. All tiles
of a batch form one sequence: by sequence, then by row, then by position, from the first that a window leaves to the
last. Program p of G takes the tiles

    [p * per_program, (p + 1) * per_program),  per_program = ceil(tiles / G)

so that the programs have equal work however uneven the lengths are, and the grid is the same for every batch. A
sequence that has a query but no key has one tile a row, all of it masked: its output is written too.

A row whose tiles all belong to one program is finished there. The others leave partial results in slots: 2 p for a row
that began before program p, 2 p + 1 for one that begins in it and continues after it. There is at most one of each, so
that the size of the scratch memory depends on the grid alone. Source: Osama et al. 2023 (stream-K).

Every warp has a KV head, alone or beside others that have other queries of it; neighbouring heads are copied together:
their keys lie side by side in memory. Keys are the rows of the first matmul and of what it gives: S^T = K Q^T, then
O^T += V^T P^T. The queries of a KV head are the columns, 8 of them where the tensor cores would pad rows to 16: half
the instructions, half the registers. The head dim comes in chunks of 64, none of them behind it.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
# The signatures of jitted functions are Triton's: only their constexpr parameters are annotated.

from triton.experimental.gluon import jit
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

FEW_SEQS = gl.constexpr(32)  # looked at by one load a lane: half a microsecond less than
SOME_SEQS = gl.constexpr(64)  # by two, 0.4 us less than
SEQS = gl.constexpr(256)  # sequences looked at together; batches of more take turns


@jit
def add(a, b):
    return a + b


@jit
def first_visible(rows, keys, window, VARIANT: gl.constexpr):
    """The first key that the first of a sequence's queries sees."""
    first = keys * 0
    if VARIANT.window:
        first = gl.maximum(keys - rows - window + 1, 0)
    return first


@jit
def count_tiles(rows, keys, window, VARIANT: gl.constexpr):
    """(tiles of a row, number of the first one) of a sequence with `rows` queries at the end of `keys` keys."""
    first = first_visible(rows, keys, window, VARIANT) // VARIANT.block_n
    tiles = gl.maximum((keys + VARIANT.block_n - 1) // VARIANT.block_n - first, 1)
    return gl.where(rows > 0, tiles, 0), first


@jit
def tiles_of_some(lengths, begin, window, COUNT: gl.constexpr, VARIANT: gl.constexpr):
    """(numbers of COUNT sequences from `begin` on, tiles of all rows of each); every warp holds all of them."""
    cu_seqlens_q, context_lens, num_seqs, num_rows = lengths
    FLAT: gl.constexpr = gl.BlockedLayout([COUNT // 32], [32], [gl.num_warps()], [0])
    index = begin + gl.arange(0, COUNT, layout=FLAT)
    inside = index < num_seqs
    start = gl.load(cu_seqlens_q + index, mask=inside, other=0)
    rows = gl.load(cu_seqlens_q + index + 1, mask=inside, other=0) - start
    keys = gl.load(context_lens + index, mask=inside, other=0)
    tiles, _first = count_tiles(rows, keys, window, VARIANT)
    return index, gl.where(inside, tiles * num_rows, 0)


@jit
def tiles_of_program(lengths, program, num_programs, window, VARIANT: gl.constexpr):
    """Return (first tile, end, tiles per program, sequence of the first tile, tiles before that sequence)."""
    if lengths[2] <= FEW_SEQS:
        tile, end, per_program, sequence, before = tiles_of_program_among(
            lengths, program, num_programs, window, FEW_SEQS, VARIANT
        )
    elif lengths[2] <= SOME_SEQS:
        tile, end, per_program, sequence, before = tiles_of_program_among(
            lengths, program, num_programs, window, SOME_SEQS, VARIANT
        )
    else:
        tile, end, per_program, sequence, before = tiles_of_program_among(
            lengths, program, num_programs, window, SEQS, VARIANT
        )
    return tile, end, per_program, sequence, before


@jit
def tiles_of_program_among(lengths, program, num_programs, window, COUNT: gl.constexpr, VARIANT: gl.constexpr):
    """Compute `tiles_of_program` with COUNT sequences at a time."""
    num_seqs = lengths[2]
    index, tiles = tiles_of_some(lengths, num_seqs * 0, window, COUNT, VARIANT)
    base = gl.sum(tiles, axis=0)
    ends = gl.associative_scan(tiles, 0, add)
    total = base
    for begin in range(COUNT, num_seqs, COUNT):
        _others, more = tiles_of_some(lengths, begin, window, COUNT, VARIANT)
        total += gl.sum(more, axis=0)
    per_program = gl.maximum((total + num_programs - 1) // num_programs, 1)
    tile = program * per_program
    passed = (index < num_seqs) & (ends <= tile)
    sequence = gl.sum(passed.to(gl.int32), axis=0)
    before = gl.sum(gl.where(passed, tiles, 0), axis=0)
    for begin in range(COUNT, num_seqs, COUNT):
        others, more = tiles_of_some(lengths, begin, window, COUNT, VARIANT)
        passed = (others < num_seqs) & (base + gl.associative_scan(more, 0, add) <= tile)
        sequence += gl.sum(passed.to(gl.int32), axis=0)
        before += gl.sum(gl.where(passed, more, 0), axis=0)
        base += gl.sum(more, axis=0)
    return tile, gl.minimum(tile + per_program, total), per_program, sequence, before


@jit
def sequence_at(lengths, sequence, window, VARIANT: gl.constexpr):
    """(first query, number of queries, keys, tiles of a row, number of the first one); no query past the last one."""
    cu_seqlens_q, context_lens, num_seqs, _num_rows = lengths
    inside = sequence < num_seqs
    query = gl.load(cu_seqlens_q + sequence, mask=inside, other=0)
    rows = gl.load(cu_seqlens_q + sequence + 1, mask=inside, other=0) - query
    keys = gl.load(context_lens + sequence, mask=inside, other=0)
    tiles, first = count_tiles(rows, keys, window, VARIANT)
    return query, rows, keys, tiles, first


@jit
def heads_of_row(row, VARIANT: gl.constexpr):
    """(first KV head, first member of the groups of query heads) of a row of a sequence."""
    return row // VARIANT.parts * VARIANT.heads, row % VARIANT.parts * VARIANT.members


@jit
def start_cursor(lengths, sequence, offset, window, VARIANT: gl.constexpr):
    """Return the cursor of a sequence's tile: the sequence, then as `sequence_at`, the row, the index in the row."""
    query, rows, keys, tiles, first = sequence_at(lengths, sequence, window, VARIANT)
    row = offset // gl.maximum(tiles, 1)
    return sequence, query, rows, keys, tiles, first, row, offset - row * tiles


@jit
def next_row(cursor, lengths, window, VARIANT: gl.constexpr):
    """Return the cursor of the next row's first tile; after the last row it has no tiles."""
    sequence, query, rows, keys, tiles, first, row, _block = cursor
    row += 1
    if row == lengths[3]:
        row = row * 0
        sequence += 1
        query, rows, keys, tiles, first = sequence_at(lengths, sequence, window, VARIANT)
        while (tiles == 0) & (sequence < lengths[2]):
            sequence += 1
            query, rows, keys, tiles, first = sequence_at(lengths, sequence, window, VARIANT)
    return sequence, query, rows, keys, tiles, first, row, row * 0


@jit
def next_tile(cursor, lengths, window, VARIANT: gl.constexpr):
    sequence, query, rows, keys, tiles, first, row, block = cursor
    block += 1
    if block == tiles:
        cursor = next_row(cursor, lengths, window, VARIANT)
        sequence, query, rows, keys, tiles, first, row, block = cursor
    return sequence, query, rows, keys, tiles, first, row, block


@jit
def sequence_of_tile(tile, sequence, before, lengths, window, VARIANT: gl.constexpr):
    """(tiles before it, then as `sequence_at`) of the sequence that has a tile, from an earlier one on."""
    query, rows, keys, tiles, first = sequence_at(lengths, sequence, window, VARIANT)
    while tile >= before + tiles * lengths[3]:
        before += tiles * lengths[3]
        sequence += 1
        query, rows, keys, tiles, first = sequence_at(lengths, sequence, window, VARIANT)
    return before, query, rows, keys, tiles, first


# The maximum of a row that has seen no key: finite, so that no difference of two is NaN, and below every score.
NO_SCORE = gl.constexpr(-1e30)


@jit
def tanh(x):
    """One MUFU instruction: relative error 2**-11, a quarter of what rounding a score to bf16 costs."""
    return gl.inline_asm_elementwise("tanh.approx.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1)


@jit
def make_ring(dtype: gl.constexpr, VARIANT: gl.constexpr):
    """Stages of (queries, keys, values) by chunks; barriers a stage for what comes with the keys and for the values."""
    STAGES: gl.constexpr = VARIANT.stages
    Q_ROWS: gl.constexpr = VARIANT.heads * VARIANT.columns
    KV_ROWS: gl.constexpr = VARIANT.heads * VARIANT.block_n
    CHUNKS: gl.constexpr = VARIANT.chunks
    D: gl.constexpr = VARIANT.chunk_d
    Q_LAYOUT: gl.constexpr = gl.NVMMASharedLayout.get_default_for([Q_ROWS, D], dtype)
    KV_LAYOUT: gl.constexpr = gl.NVMMASharedLayout.get_default_for([KV_ROWS, D], dtype)
    queries = gl.allocate_shared_memory(dtype, [STAGES * CHUNKS, Q_ROWS, D], Q_LAYOUT)
    keys = gl.allocate_shared_memory(dtype, [STAGES * CHUNKS, KV_ROWS, D], KV_LAYOUT)
    values = gl.allocate_shared_memory(dtype, [STAGES * CHUNKS, KV_ROWS, D], KV_LAYOUT)
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(k_full.index(i), count=1)
        mbarrier.init(v_full.index(i), count=1)
    return queries, keys, values, k_full, v_full


@jit
def start_state(HEADS: gl.constexpr, MMA: gl.constexpr, VARIANT: gl.constexpr):
    """Return the state of `attend_tile` before the first tile."""
    CHUNKS: gl.constexpr = VARIANT.chunks
    acc = ()
    for _c in gl.static_range(CHUNKS):
        acc = acc + (gl.full([HEADS, VARIANT.chunk_d, VARIANT.columns], 0.0, gl.float32, MMA),)  # type: ignore[assignment]  # noqa: RUF005
    largest = gl.full([HEADS, VARIANT.columns], NO_SCORE, gl.float32, gl.SliceLayout(1, MMA))
    sums = gl.full([HEADS, VARIANT.columns], 0.0, gl.float32, gl.SliceLayout(1, MMA))
    return acc, largest, sums


@jit
def fetch(cursor, tile, first_tile, end, stage, maps, table, ring, lengths, window, VARIANT: gl.constexpr):
    """Start the copies of a tile of this program, if there is one. Returns the cursor of the next.

    The first tile of a row brings the queries. A tile lies in one page; page-table entries past a sequence's last page
    are not read. Where a sequence has no key, nothing is copied and the barriers open at once.
    """
    CHUNKS: gl.constexpr = VARIANT.chunks
    D: gl.constexpr = VARIANT.chunk_d
    q_desc, k_desc, v_desc = maps
    KV_BYTES: gl.constexpr = CHUNKS * k_desc.block_type.nbytes
    page_table, stride_table = table
    queries, keys_ring, values, k_full, v_full = ring
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
            k_box = keys_ring.index(stage * CHUNKS + c).reshape([1, VARIANT.heads, VARIANT.block_n, D])
            tma.async_copy_global_to_shared(k_desc, [page, head, slot, c * D], k_bar, k_box, pred=has_keys)
        for c in gl.static_range(CHUNKS):
            q_box = queries.index(stage * CHUNKS + c).reshape([VARIANT.heads, VARIANT.queries, VARIANT.members, D])
            at = [head, query, first_member, c * D]
            tma.async_copy_global_to_shared(q_desc, at, k_bar, q_box, pred=brings_queries)
        for c in gl.static_range(CHUNKS):
            v_box = values.index(stage * CHUNKS + c).reshape([1, VARIANT.heads, VARIANT.block_n, D])
            tma.async_copy_global_to_shared(v_desc, [page, head, slot, c * D], v_bar, v_box, pred=has_keys)
        cursor = next_tile(cursor, lengths, window, VARIANT)
    return cursor


@jit
def load_queries(ring, stage, HEADS: gl.constexpr, LAYOUT: gl.constexpr, VARIANT: gl.constexpr):
    """Q^T of a stage, by chunks."""
    CHUNKS: gl.constexpr = VARIANT.chunks
    x = ()
    for c in gl.static_range(CHUNKS):
        q = ring[0].index(stage * CHUNKS + c).reshape([HEADS, VARIANT.columns, VARIANT.chunk_d])
        x = x + (q.permute([0, 2, 1]).load(LAYOUT),)  # type: ignore[assignment]  # noqa: RUF005
    return x


@jit
def positions_of(key, x, KEYS: gl.constexpr, VARIANT: gl.constexpr):
    """Return positions of the keys of a tile from `key` on, along axis KEYS (1 or 2) of x; heads may share them."""
    LAYOUT: gl.constexpr = x.type.layout
    n = gl.arange(0, x.shape[KEYS], layout=gl.SliceLayout(0, gl.SliceLayout(3 - KEYS, LAYOUT)))
    n = key + gl.expand_dims(gl.expand_dims(n, 0), 3 - KEYS)
    if VARIANT.key_groups > 1:
        group = gl.arange(0, VARIANT.key_groups, layout=gl.SliceLayout(1, gl.SliceLayout(2, LAYOUT)))
        n += group[:, None, None] * x.shape[KEYS]
    return n


@jit
def mask_scores(s, key, keys, rows, window, VARIANT: gl.constexpr):
    """Scores [heads, keys, columns] of keys from `key` on that a column's query does not see become -inf."""
    LAYOUT: gl.constexpr = s.type.layout
    c = gl.arange(0, VARIANT.columns, layout=gl.SliceLayout(0, gl.SliceLayout(1, LAYOUT)))
    n = positions_of(key, s, 1, VARIANT)
    position = keys - rows + c // VARIANT.members
    seen = n <= position[None, None, :]
    if VARIANT.window:
        seen = seen & (n > (position - window)[None, None, :])
    return gl.where(seen, s, float("-inf"))


@jit
def zero_values(v, key, low, keys, VARIANT: gl.constexpr):
    """V^T [heads, chunk_d, keys], zeros for keys outside [low, keys): what lies there may be NaN, and 0 * NaN is."""
    n = positions_of(key, v, 2, VARIANT)
    return gl.where((n >= low) & (n < keys), v, gl.zeros_like(v))


@jit
def attend_tile(x, state, key, keys, rows, stage, phase, ring, scales, window, VARIANT: gl.constexpr):
    """One more tile of the online softmax, whose keys have arrived.

    x      Q^T, chunks [heads, chunk_d, columns]; where `heads` are the groups of one head's keys, here and below too
    state  O^T as such chunks, unnormalised; maxima in log2 and sums [heads, columns]
    ring   keys, values and the barriers of values are its second, third and fifth
    """
    acc, largest, sums = state
    scale, softcap_scale = scales
    MMA: gl.constexpr = acc[0].type.layout
    LEFT: gl.constexpr = gl.DotOperandLayout(0, MMA, 2)
    HEADS: gl.constexpr = VARIANT.heads * VARIANT.key_groups
    N: gl.constexpr = VARIANT.block_n
    CHUNKS: gl.constexpr = VARIANT.chunks
    TILE: gl.constexpr = [HEADS, N // VARIANT.key_groups, VARIANT.chunk_d]
    low = first_visible(rows, keys, window, VARIANT)
    s = gl.full([HEADS, TILE[1], VARIANT.columns], 0.0, gl.float32, MMA)
    for c in gl.static_range(CHUNKS):
        k = ring[1].index(stage * CHUNKS + c).reshape(TILE).load(LEFT)
        s = mma_v2(k, x[c], s)
    if VARIANT.softcap:
        s = tanh(s * softcap_scale)
    is_masked = key + N > keys - rows + 1  # beyond what the first query sees
    if VARIANT.window:
        is_masked = is_masked | (key <= keys - 1 - window)
    if is_masked:
        s = mask_scores(s, key, keys, rows, window, VARIANT)
    new_largest = gl.maximum(largest, gl.max(s, axis=1) * scale)
    weights = gl.exp2(s * scale - new_largest[:, None, :])
    decay = gl.exp2(largest - new_largest)
    sums = sums * decay + gl.sum(weights, axis=1)
    p = gl.convert_layout(weights.to(x[0].dtype), x[0].type.layout)
    mbarrier.wait(ring[4].index(stage), phase)
    new_acc = ()
    for c in gl.static_range(CHUNKS):
        v = ring[2].index(stage * CHUNKS + c).reshape(TILE).permute([0, 2, 1]).load(LEFT)
        if (key + N > keys) | (key < low):
            v = zero_values(v, key, low, keys, VARIANT)
        new_acc = new_acc + (mma_v2(v, p, acc[c] * decay[:, None, :]),)  # type: ignore[assignment]  # noqa: RUF005
    return new_acc, new_largest, sums
