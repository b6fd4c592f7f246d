"""`gluon.decode.hopper`: attention of one query token (or a few) a sequence over paged context on sm_90, in Gluon.

Two launches a call, whatever the lengths are, so that a CUDA graph may hold them (of one sequence mostly a single one,
`cluster.py`):

  hallmark_gluon_decode          a fixed grid; every program streams an equal number of key tiles through a ring in
                                 shared memory, copied by TMA, and finishes the rows that belong to it alone
  hallmark_gluon_decode_combine  puts together the rows that lie in several

Each may start while the launch before still runs, and waits for it on the device (programmatic dependent launch). Only
the lengths are read before: they must not come from a launch that lets the next one start early.

All memory that a call needs besides its arguments is one scratch tensor, written before it is read: nothing must be
zero before, nothing is left behind. Calls of a step share it: each writes when the launch before, which may have read
it, has ended. `triton.decode` is the specification.
Sources: Dao et al. 2023 (Flash-Decoding); Osama et al. 2023 (stream-K); Kwon et al. 2023 (pages).
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
# The signatures of jitted functions are Triton's: only their constexpr parameters are annotated.

from triton.experimental.gluon import jit
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from kernels.hopper.decode.stream import (
    NO_SCORE,
    attend_tile,
    fetch,
    heads_of_row,
    load_queries,
    make_ring,
    next_row,
    sequence_at,
    sequence_of_tile,
    start_cursor,
    start_state,
    tiles_of_program,
)

LOG2E = gl.constexpr(1.4426950408889634)
FEW = gl.constexpr(8)  # parts of a row that one program puts together in registers


@jit
def launch_dependents():
    """Let the next launch start, if it was made to start early."""
    gl.inline_asm_elementwise(
        "griddepcontrol.launch_dependents; mov.b32 $0, 0;", "=r,r", [gl.to_tensor(0)],
        dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@jit
def wait_for_launch_before():
    """Wait until the previous launch has ended and its writes can be read."""
    gl.inline_asm_elementwise(
        "griddepcontrol.wait; mov.b32 $0, 0;", "=r,r", [gl.to_tensor(0)], dtype=gl.int32, is_pure=False, pack=1
    )  # fmt: skip


@jit
def prefetch_table(page_table, num_entries):
    """Bring the page table into L2 while the shares are found; every program asks for lines of 128 bytes of its own."""
    LANES: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    line = gl.program_id(0) * 32 + gl.arange(0, 32, layout=LANES)
    entry = page_table + gl.minimum(line * 32, num_entries - 1)
    gl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.b32 $0, 0;", "=r,l", [entry.to(gl.int64)], dtype=gl.int32, is_pure=False, pack=1
    )  # fmt: skip


@jit(do_not_specialize=["stride_table", "num_seqs", "num_rows", "window"])
def hallmark_gluon_decode(
    q_desc, k_desc, v_desc, out, scratch, sinks, cu_seqlens_q, context_lens, page_table, stride_out_query,
    stride_out_head, stride_table, num_seqs, num_rows, scale, softcap_scale, window, VARIANT: gl.constexpr,
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
    tile, end, _per_program, sequence, before = tiles_of_program(lengths, program, gl.num_programs(0), window, VARIANT)
    first_tile = tile
    cursor = start_cursor(lengths, sequence, tile - before, window, VARIANT)
    wait_for_launch_before()
    ahead = cursor
    for stage in range(STAGES):
        ahead = fetch(ahead, tile + stage, first_tile, end, stage, maps, table, ring, lengths, window, VARIANT)
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
            state = attend_tile(x, state, key, keys, rows, stage, phase, ring, (scale, softcap_scale), window, VARIANT)
            ahead = fetch(ahead, tile + i + STAGES, first_tile, end, stage, maps, table, ring, lengths, window, VARIANT)
        first_head, first_member = heads_of_row(row, VARIANT)
        target = (out, stride_out_query, stride_out_head, query, rows, first_head, first_member)
        slot = 2 * program + (block == 0).to(gl.int32)
        store_result(state, target, sinks, scratch, slot, count == tiles, VARIANT)
        cursor = next_row(cursor, lengths, window, VARIANT)
        tile += count


@jit
def is_column(column, rows, first_member, VARIANT: gl.constexpr):
    """Return whether a column holds a query of a sequence with `rows` of them."""
    return (column // VARIANT.members < rows) & (first_member + column % VARIANT.members < VARIANT.group)


@jit
def query_head(head, column, first_member, VARIANT: gl.constexpr):
    """The query head of a KV head's column; of one that holds no query, another one of the group."""
    return head * VARIANT.group + gl.minimum(first_member + column % VARIANT.members, VARIANT.group - 1)


@jit
def out_offset(target, head, column, VARIANT: gl.constexpr):
    """Element offset in the output."""
    _out, stride_query, stride_head, query, _rows, _first_head, first_member = target
    row = (query + column // VARIANT.members).to(gl.int64) * stride_query
    return row + query_head(head, column, first_member, VARIANT).to(gl.int64) * stride_head


@jit
def store_result(state, target, sinks, scratch, slot, is_whole, VARIANT: gl.constexpr):
    """Store a whole row in the output, a partial one in its slot: O^T, unnormalised; maxima and sums follow all O."""
    D: gl.constexpr = VARIANT.block_d
    HEADS: gl.constexpr = VARIANT.heads
    COLUMNS: gl.constexpr = VARIANT.columns
    LANES: gl.constexpr = VARIANT.chunk_d // 4
    WARPS: gl.constexpr = VARIANT.column_warps
    WIDTH: gl.constexpr = 1 if WARPS == 1 else COLUMNS * LANES // (32 * WARPS)  # a warp keeps its columns
    STORE: gl.constexpr = gl.BlockedLayout([1, 4, WIDTH], [1, LANES, 32 // LANES], [HEADS, 1, WARPS], [1, 2, 0])
    STATS: gl.constexpr = gl.SliceLayout(1, STORE)
    acc, largest, sums = state
    largest = gl.convert_layout(largest, STATS)
    sums = gl.convert_layout(sums, STATS)
    h = gl.arange(0, HEADS, layout=gl.SliceLayout(1, STATS))[:, None]
    c = gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, STATS))[None, :]
    head = target[5] + h
    is_stored = is_column(c, target[4], target[6], VARIANT) & (h >= 0)
    factor = gl.full([HEADS, COLUMNS], 1.0, gl.float32, STATS)
    if is_whole:
        if VARIANT.sinks:
            sink = gl.load(sinks + query_head(head, c, target[6], VARIANT)) * LOG2E
            with_sink = gl.maximum(largest, sink)
            factor = gl.exp2(largest - with_sink)
            sums = sums * factor + gl.exp2(sink - with_sink)
        factor = factor / gl.where(sums == 0.0, 1.0, sums)
        store_chunks(acc, factor, target[0], out_offset(target, head, c, VARIANT), is_stored, STORE, VARIANT)
    else:
        part = (slot * HEADS + h) * COLUMNS + c
        stats = scratch + 2 * gl.num_programs(0) * HEADS * COLUMNS * D + part * 2
        store_chunks(acc, factor, scratch, part * D, is_stored, STORE, VARIANT)
        gl.store(stats, largest, mask=is_stored)
        gl.store(stats + 1, sums, mask=is_stored)


@jit
def store_chunks(acc, factor, to, offset, is_stored, STORE: gl.constexpr, VARIANT: gl.constexpr):
    """O^T times a factor of each column, from the column's offset [heads, columns] on."""
    CHUNK: gl.constexpr = VARIANT.chunk_d
    CHUNKS: gl.constexpr = VARIANT.chunks
    d = gl.arange(0, CHUNK, layout=gl.SliceLayout(0, gl.SliceLayout(2, STORE)))[None, :, None]
    offset = gl.expand_dims(offset, 1) + d
    for i in gl.static_range(CHUNKS):
        o = gl.convert_layout(acc[i], STORE) * gl.expand_dims(factor, 1)
        inside = gl.expand_dims(is_stored, 1) & (i * CHUNK + d < VARIANT.head_dim)
        gl.store(to + offset + i * CHUNK, o.to(to.dtype.element_ty), mask=inside)


@jit
def split_row(tile, before, tiles, per_program):
    """The row of a tile: (the shares of its first and of its last tile, its number in the sequence, its first tile)."""
    row = (tile - before) // gl.maximum(tiles, 1)
    begin = before + row * tiles
    return begin // per_program, (begin + tiles - 1) // per_program, row, begin


@jit(do_not_specialize=["num_seqs", "num_rows", "window"])
def hallmark_gluon_decode_combine(
    out, scratch, sinks, cu_seqlens_q, context_lens, stride_out_query, stride_out_head, num_seqs, num_rows, window,
    PARTS: gl.constexpr, VARIANT: gl.constexpr,
):  # fmt: skip
    """Combine head h of the rows that program p shares with others, in program (p, h). PARTS: read at once.

    Those are the row of the program's last tile, if it begins here and goes on, and that of the first one, if it began
    before: no row is both. A row of a few parts is put together where it begins; the columns of one of many are shared
    by all programs that it lies in.
    """
    launch_dependents()
    lengths = (cu_seqlens_q, context_lens, num_seqs, num_rows)
    program = gl.program_id(0)
    tile, end, per_program, sequence, before = tiles_of_program(lengths, program, gl.num_programs(0), window, VARIANT)
    next_query, next_rows, _keys, tiles, _first = sequence_at(lengths, sequence, window, VARIANT)
    next_first_program, next_last_program, next_row_number, begin = split_row(tile, before, tiles, per_program)
    next_found = (tile < end) & (begin < tile) & (next_last_program - next_first_program >= FEW)
    query, rows = next_query, next_rows
    if tile < end:
        before, query, rows, _keys, tiles, _first = sequence_of_tile(
            end - 1, sequence, before, lengths, window, VARIANT
        )
    first_program, last_program, row, begin = split_row(end - 1, before, tiles, per_program)
    found = (tile < end) & (begin >= tile) & (begin + tiles > end)
    wait_for_launch_before()  # every program, those too that have nothing to do: else this launch could end first
    for _job in range(2):
        if found:
            first_head, first_member = heads_of_row(row, VARIANT)
            target = (out, stride_out_query, stride_out_head, query, rows, first_head, first_member)
            if last_program - first_program < FEW:
                combine_few(target, scratch, sinks, first_program, last_program, VARIANT)
            else:
                combine_many(
                    target, scratch, sinks, program - first_program, first_program, last_program, PARTS, VARIANT
                )
        found, first_program, last_program, row = next_found, next_first_program, next_last_program, next_row_number
        query, rows = next_query, next_rows


@jit
def combine_few(target, scratch, sinks, first_program, last_program, VARIANT: gl.constexpr):
    """All columns of one head of a row of at most FEW parts; no thread needs what another one has."""
    LANES: gl.constexpr = min(32, VARIANT.block_d // 4)
    WIDTH: gl.constexpr = gl.num_warps() * (32 // LANES)
    LAYOUT: gl.constexpr = gl.BlockedLayout([FEW, 1, 4], [1, 32 // LANES, LANES], [1, gl.num_warps(), 1], [2, 1, 0])
    for block in range(0, (VARIANT.columns_used + WIDTH - 1) // WIDTH):
        combine_columns(target, scratch, sinks, block, first_program, last_program, FEW, WIDTH, LAYOUT, VARIANT)


@jit
def combine_many(
    target, scratch, sinks, worker, first_program, last_program, PARTS: gl.constexpr, VARIANT: gl.constexpr
):  # fmt: skip
    """The columns of one head that fall to one of a row's shares, one at a time."""
    LANES: gl.constexpr = min(32, VARIANT.block_d // 4)
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 1, 4], [32 // LANES, 1, LANES], [gl.num_warps(), 1, 1], [2, 1, 0])
    for block in range(
        worker, VARIANT.columns_used, gl.minimum(last_program - first_program + 1, VARIANT.columns_used)
    ):
        combine_columns(target, scratch, sinks, block, first_program, last_program, PARTS, 1, LAYOUT, VARIANT)


@jit
def combine_columns(
    target, scratch, sinks, block, first_program, last_program, PARTS: gl.constexpr, WIDTH: gl.constexpr,
    LAYOUT: gl.constexpr, VARIANT: gl.constexpr,
):  # fmt: skip
    """WIDTH columns of one head of a row, PARTS partial results at a time."""
    D: gl.constexpr = VARIANT.block_d
    USED: gl.constexpr = min(VARIANT.members, VARIANT.group)  # members that hold a query in some row
    STATS: gl.constexpr = gl.SliceLayout(2, LAYOUT)
    ROW: gl.constexpr = gl.SliceLayout(0, STATS)
    RESULT: gl.constexpr = gl.SliceLayout(0, LAYOUT)
    _out, _stride_query, _stride_head, _query, rows, first_head, first_member = target
    h = gl.program_id(1)
    n = gl.arange(0, PARTS, layout=gl.SliceLayout(1, STATS))[:, None]
    d = gl.arange(0, D, layout=gl.SliceLayout(0, gl.SliceLayout(1, LAYOUT)))[None, None, :]
    used = block * WIDTH + gl.arange(0, WIDTH, layout=ROW)
    column = used // USED * VARIANT.members + used % USED
    is_stored = is_column(column, rows, first_member, VARIANT) & (used < VARIANT.columns_used)
    largest = gl.full([WIDTH], NO_SCORE, gl.float32, ROW)
    sums = gl.full([WIDTH], 0.0, gl.float32, ROW)
    if VARIANT.sinks:
        largest = gl.load(sinks + query_head(first_head + h, column, first_member, VARIANT)) * LOG2E
        sums += 1.0
    acc = gl.full([WIDTH, D], 0.0, gl.float32, RESULT)
    for start in range(first_program, last_program + 1, PARTS):
        part = start + n
        is_part = (part <= last_program) & is_stored[None, :]
        slot = 2 * part + (part == first_program).to(gl.int32)
        at = (slot * VARIANT.heads + h) * VARIANT.columns + column[None, :]
        stats = scratch + 2 * gl.num_programs(0) * VARIANT.heads * VARIANT.columns * D + at * 2
        part_largest = gl.load(stats, mask=is_part, other=NO_SCORE)
        part_sums = gl.load(stats + 1, mask=is_part, other=0.0)
        inside = gl.expand_dims(is_part, 2) & (d < VARIANT.head_dim)
        o = gl.load(scratch + gl.expand_dims(at * D, 2) + d, mask=inside, other=0.0)
        new_largest = gl.maximum(largest, gl.max(part_largest, axis=0))
        weights = gl.exp2(part_largest - new_largest[None, :])
        decay = gl.exp2(largest - new_largest)
        sums = sums * decay + gl.sum(part_sums * weights, axis=0)
        decay = gl.convert_layout(decay, gl.SliceLayout(1, RESULT))
        acc = acc * decay[:, None] + gl.sum(o * gl.expand_dims(weights, 2), axis=0)
        largest = new_largest
    sums = gl.convert_layout(sums, gl.SliceLayout(1, RESULT))
    o = acc / gl.where(sums == 0.0, 1.0, sums)[:, None]
    offset = out_offset(target, first_head + h, column, VARIANT)
    offset = gl.convert_layout(offset, gl.SliceLayout(1, RESULT))
    is_stored = gl.convert_layout(is_stored, gl.SliceLayout(1, RESULT))
    dims = gl.arange(0, D, layout=gl.SliceLayout(0, RESULT))
    inside = is_stored[:, None] & (dims < VARIANT.head_dim)[None, :]
    gl.store(target[0] + offset[:, None] + dims[None, :], o.to(target[0].dtype.element_ty), mask=inside)
