"""How the work of a decode batch is shared: equal runs of key tiles, found by every program for itself.

A row is the queries of one sequence under a set of neighbouring KV heads (`heads` of them); where a group of query
heads is too large for the registers, each part of it is a row of its own. A tile is `block_n` keys of a row. All tiles
of a batch stand in one line: by sequence, then by row, then by position, from the first that a window leaves to the
last. Program p of G takes the tiles

    [p * share, (p + 1) * share),  share = ceil(tiles / G)

so that no program has more work than another however uneven the lengths are, and the grid is the same for every batch.
A sequence that has a query but no key has one tile a row, all of it masked: its output is written too.

A row whose tiles all lie in one share is finished there. The others leave partial results in slots: 2 p for a row that
began before program p, 2 p + 1 for one that begins in it and goes on behind it. There is at most one of each, so the
scratch memory is a function of the grid alone. Source: Osama et al. 2023 (stream-K).
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
# The signatures of jitted functions are Triton's: only their constexpr parameters are annotated.

from triton.experimental.gluon import jit
from triton.experimental.gluon import language as gl

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
def share_of(lengths, program, num_programs, window, VARIANT: gl.constexpr):
    """(first tile, end, tiles of a share, sequence of the first tile, tiles before that sequence)."""
    if lengths[2] <= FEW_SEQS:
        tile, end, share, sequence, before = share_of_some(lengths, program, num_programs, window, FEW_SEQS, VARIANT)
    elif lengths[2] <= SOME_SEQS:
        tile, end, share, sequence, before = share_of_some(lengths, program, num_programs, window, SOME_SEQS, VARIANT)
    else:
        tile, end, share, sequence, before = share_of_some(lengths, program, num_programs, window, SEQS, VARIANT)
    return tile, end, share, sequence, before


@jit
def share_of_some(lengths, program, num_programs, window, COUNT: gl.constexpr, VARIANT: gl.constexpr):
    """As `share_of`, by COUNT sequences at a time."""
    num_seqs = lengths[2]
    index, tiles = tiles_of_some(lengths, num_seqs * 0, window, COUNT, VARIANT)
    base = gl.sum(tiles, axis=0)
    ends = gl.associative_scan(tiles, 0, add)
    total = base
    for begin in range(COUNT, num_seqs, COUNT):
        _others, more = tiles_of_some(lengths, begin, window, COUNT, VARIANT)
        total += gl.sum(more, axis=0)
    share = gl.maximum((total + num_programs - 1) // num_programs, 1)
    tile = program * share
    passed = (index < num_seqs) & (ends <= tile)
    sequence = gl.sum(passed.to(gl.int32), axis=0)
    before = gl.sum(gl.where(passed, tiles, 0), axis=0)
    for begin in range(COUNT, num_seqs, COUNT):
        others, more = tiles_of_some(lengths, begin, window, COUNT, VARIANT)
        passed = (others < num_seqs) & (base + gl.associative_scan(more, 0, add) <= tile)
        sequence += gl.sum(passed.to(gl.int32), axis=0)
        before += gl.sum(gl.where(passed, more, 0), axis=0)
        base += gl.sum(more, axis=0)
    return tile, gl.minimum(tile + share, total), share, sequence, before


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
def start_place(lengths, sequence, offset, window, VARIANT: gl.constexpr):
    """The place of a sequence's tile: the sequence, then as `sequence_at`, row and number of the tile in the row."""
    query, rows, keys, tiles, first = sequence_at(lengths, sequence, window, VARIANT)
    row = offset // gl.maximum(tiles, 1)
    return sequence, query, rows, keys, tiles, first, row, offset - row * tiles


@jit
def next_row(place, lengths, window, VARIANT: gl.constexpr):
    """The place of the first tile of the next row; behind the last one it has no tiles."""
    sequence, query, rows, keys, tiles, first, row, _block = place
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
def next_tile(place, lengths, window, VARIANT: gl.constexpr):
    sequence, query, rows, keys, tiles, first, row, block = place
    block += 1
    if block == tiles:
        place = next_row(place, lengths, window, VARIANT)
        sequence, query, rows, keys, tiles, first, row, block = place
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
