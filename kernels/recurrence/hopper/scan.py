"""The scan of portable/scan.py for sm_90: the same chains of products, so the same bits, by three roles.

One program: 64 value columns of a head of a row. Value columns are rows of the matrix units.

  solver    4 warps  has the state in registers; finds what each block of a chunk adds, and adds it to the state
  reader    4 warps  the results: reads the state by queries, then adds what the chunk's tokens add
  producer  1 warp   copies what stands ready of a chunk by TMA, ahead of both

The solver waits for little: it multiplies by the state's two parts in registers while it writes them to shared memory
for the reader, and what a block adds to the state is multiplied while the next block is solved.
Written in Gluon for Triton 3.6.0.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
# The signatures of jitted functions are Triton's: only their constexpr parameters are annotated.

from triton.experimental.gluon import jit
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from kernels.hopper.pipeline import hardware_arrive, hardware_sync

CHUNK = gl.constexpr(64)
COLUMNS = gl.constexpr(64)  # of a value head, of a program
HALF = gl.constexpr(64)  # of the 128 numbers of a key
BLOCK = gl.constexpr(16)
SQUARE = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16]))  # [64, 64] fp32
NARROW = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 16, 16]))  # [64, 16] fp32
LEFT = gl.constexpr(gl.DotOperandLayout(0, SQUARE, 2))
LEFT_NARROW = gl.constexpr(gl.DotOperandLayout(0, NARROW, 2))
OF_COLUMNS = gl.constexpr(gl.SliceLayout(0, SQUARE))
OF_ROWS = gl.constexpr(gl.SliceLayout(1, SQUARE))
TILE = gl.constexpr(gl.NVMMASharedLayout(128, 16, rank=2))
HALF_TILE = gl.constexpr(gl.NVMMASharedLayout(64, 16, rank=2))
FLAT = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))
QUADS = gl.constexpr(gl.BlockedLayout([4], [32], [1], [0]))
# Hardware barriers; Triton 3.6 uses 0, 1 and one for each further role.
READY, READ = gl.constexpr(6), gl.constexpr(7)  # the state's parts
ADDED, TAKEN = gl.constexpr(8), gl.constexpr(9)  # what a chunk's tokens add
FREE, READ_FREE = gl.constexpr(10), gl.constexpr(13)  # stages given back, of the solver and of the reader
BOTH, RING = gl.constexpr(256), gl.constexpr(160)  # threads of solver and reader; of one and the producer
STAGES, READ_STAGES = gl.constexpr(3), gl.constexpr(2)
STORED = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0]))  # rows of 128 bytes


@jit
def num_own_chunks(starts_ptr, stops_ptr, firsts_ptr, row, LEAST: gl.constexpr):
    """Chunks of a row that the scan computes; as of `pieces.num_own_chunks`."""
    start, stop, first = gl.load(starts_ptr + row), gl.load(stops_ptr + row), gl.load(firsts_ptr + row)
    num_tokens = first + stop - start - (first + CHUNK - 1) // CHUNK * CHUNK
    return gl.where((stop > start) & (num_tokens >= LEAST), (num_tokens + CHUNK - 1) // CHUNK, 0)


@jit
def produce(
    descs, gates_ptr, smem, num_chunks, from_token, before, head, key_head, column, VALUE_HEADS: gl.constexpr
):  # fmt: skip
    """Copy the tiles of one chunk after the other; `column`: the first one, of all heads."""
    keys_desc, queries_desc, values_desc, of_keys_desc, of_queries_desc, inverses_desc = descs
    keys, values, of_keys, inverses, gates, full, queries, of_queries, read_gates, read_full = smem
    of_gates = gl.arange(0, 4 * CHUNK, QUADS)
    for chunk in range(num_chunks):
        token, unit = from_token + chunk * CHUNK, (before + chunk) * VALUE_HEADS + head
        own_gates = gates_ptr + unit.to(gl.int64) * (4 * CHUNK) + of_gates
        stage = chunk % STAGES
        if chunk >= STAGES:
            hardware_sync(FREE + stage, RING)
        bar = full.index(stage)
        mbarrier.expect(bar, CHUNK * 2 * (2 * HALF + COLUMNS + CHUNK + 2 * BLOCK))
        tma.async_copy_global_to_shared(keys_desc, [token, key_head * 2 * HALF], bar, keys.index(2 * stage))
        tma.async_copy_global_to_shared(keys_desc, [token, key_head * 2 * HALF + HALF], bar, keys.index(2 * stage + 1))
        tma.async_copy_global_to_shared(values_desc, [token, column], bar, values.index(stage))
        tma.async_copy_global_to_shared(inverses_desc, [unit * CHUNK, 0], bar, inverses.index(stage))
        tma.async_copy_global_to_shared(of_keys_desc, [unit * CHUNK, 0], bar, of_keys.index(stage))
        async_copy.async_copy_global_to_shared(gates.index(stage), own_gates)
        async_copy.mbarrier_arrive(bar, increment_count=False)
        stage = chunk % READ_STAGES
        if chunk >= READ_STAGES:
            hardware_sync(READ_FREE + stage, RING)
        bar = read_full.index(stage)
        mbarrier.expect(bar, CHUNK * 2 * (2 * HALF + CHUNK))
        left, right = queries.index(2 * stage), queries.index(2 * stage + 1)
        tma.async_copy_global_to_shared(queries_desc, [token, key_head * 2 * HALF], bar, left)
        tma.async_copy_global_to_shared(queries_desc, [token, key_head * 2 * HALF + HALF], bar, right)
        tma.async_copy_global_to_shared(of_queries_desc, [unit * CHUNK, 0], bar, of_queries.index(stage))
        async_copy.async_copy_global_to_shared(read_gates.index(stage), own_gates)
        async_copy.mbarrier_arrive(bar, increment_count=False)
    for chunk in range(gl.maximum(num_chunks - STAGES, 0), num_chunks):  # no arrival stays behind
        hardware_sync(FREE + chunk % STAGES, RING)
    for chunk in range(gl.maximum(num_chunks - READ_STAGES, 0), num_chunks):
        hardware_sync(READ_FREE + chunk % READ_STAGES, RING)
    async_copy.wait_group(0)


@jit
def read_chunks(
    smem, shared, num_chunks, out_ptr, stride_out, from_token, num_tokens, column, scale
):  # fmt: skip
    """Write the results of one chunk after the other; num_tokens: of all of them."""
    _, _, _, _, _, _, queries, of_queries, gates, full = smem
    large, small, added = shared
    zero = gl.zeros([COLUMNS, CHUNK], gl.float32, SQUARE)
    rows = gl.arange(0, CHUNK, gl.SliceLayout(1, STORED))
    to = column + gl.arange(0, COLUMNS, gl.SliceLayout(0, STORED))
    for chunk in range(num_chunks):
        stage = chunk % READ_STAGES
        mbarrier.wait(full.index(stage), (chunk // READ_STAGES) & 1)
        right_0, right_1 = queries.index(2 * stage).permute((1, 0)), queries.index(2 * stage + 1).permute((1, 0))
        from_border = gates.index(stage).slice(0, CHUNK).load(OF_COLUMNS)
        hardware_sync(READY, BOTH)
        found = warpgroup_mma(large.index(0), right_0, zero, use_acc=False, is_async=True)
        found = warpgroup_mma(large.index(1), right_1, found, is_async=True)
        found = warpgroup_mma(small.index(0), right_0, found, is_async=True)
        found = warpgroup_mma(small.index(1), right_1, found, is_async=True)
        found = warpgroup_mma_wait(0, deps=(found,))
        hardware_arrive(READ, BOTH)
        found = from_border[None, :] * found
        hardware_sync(ADDED, BOTH)
        found = warpgroup_mma(added, of_queries.index(stage).permute((1, 0)), found, is_async=True)
        found = warpgroup_mma_wait(0, deps=(found,))
        hardware_arrive(TAKEN, BOTH)
        hardware_arrive(READ_FREE + stage, RING)
        results = gl.convert_layout((found * scale).to(out_ptr.dtype.element_ty).permute((1, 0)), STORED)
        tokens = chunk * CHUNK + rows
        at = out_ptr + (from_token + tokens).to(gl.int64)[:, None] * stride_out + to[None, :]
        gl.store(at, results, mask=(tokens < num_tokens)[:, None] & (to >= 0)[None, :])


@jit
def columns_of(x, B: gl.constexpr):
    """Columns of block B of [64, 64], [64, 16]: each thread has them already."""
    even, odd = gl.split(x.reshape([64, 2, 2, BLOCK]).permute([0, 3, 1, 2]))  # [64, 16, 2]
    half = even if B % 2 == 0 else odd
    first, second = gl.split(half)
    chosen = first if B < 2 else second
    return gl.convert_layout(chosen, NARROW)


@jit
def solve(missing, inverses, stage, narrow, dtype: gl.constexpr, B: gl.constexpr):
    """Issue what a block adds, [64, 16] fp32, of what its tokens miss: by the inverse's large and small parts."""
    misses = columns_of(missing, B)
    most = misses.to(dtype)
    least = gl.convert_layout((misses - most.to(gl.float32)).to(dtype), LEFT_NARROW)
    most = gl.convert_layout(most, LEFT_NARROW)
    own = inverses.index(stage).slice(B * BLOCK, BLOCK, dim=0)
    large = own.slice(0, BLOCK, dim=1).permute((1, 0))
    small = own.slice(BLOCK, BLOCK, dim=1).permute((1, 0))
    added = warpgroup_mma(least, large, narrow, use_acc=False, is_async=True)
    added = warpgroup_mma(most, small, added, is_async=True)
    return warpgroup_mma(most, large, added, is_async=True)


@jit
def own_columns(tile, stage, B: gl.constexpr):
    """Columns of block B of a chunk's factors [64, 64], as a right factor [16, 64]."""
    return tile.index(stage).slice(B * BLOCK, BLOCK, dim=1).permute((1, 0))


@jit
def fold(added, gates, keys, stage, state_0, state_1, B: gl.constexpr):
    """Issue what block B adds to the state."""
    left = gates.index(stage).slice(2 * CHUNK + B * BLOCK, BLOCK).load(gl.SliceLayout(0, LEFT))
    turned = (added.to(gl.float32) * left[None, :]).to(added.dtype)
    state_0 = warpgroup_mma(turned, keys.index(2 * stage).slice(B * BLOCK, BLOCK, dim=0), state_0, is_async=True)
    state_1 = warpgroup_mma(turned, keys.index(2 * stage + 1).slice(B * BLOCK, BLOCK, dim=0), state_1, is_async=True)
    return state_0, state_1


@jit
def store_half(state, to_ptr, columns, FIRST: gl.constexpr, VALUE_DIM: gl.constexpr):
    dims = FIRST + gl.arange(0, HALF, OF_COLUMNS)
    gl.store(to_ptr + dims[None, :] * VALUE_DIM + columns[:, None], state.to(to_ptr.dtype.element_ty))


@jit
def store_state(state_0, state_1, to_ptr, columns, VALUE_DIM: gl.constexpr):
    store_half(state_0, to_ptr, columns, 0, VALUE_DIM)
    store_half(state_1, to_ptr, columns, HALF, VALUE_DIM)


@jit
def store_states(
    state_0, state_1, border, fold_to, is_wanted, start, stop, first, target, num_writes, write_tokens_ptr,
    write_slots_ptr, states_ptr, stride_states, columns, VALUE_DIM: gl.constexpr,
):  # fmt: skip
    """Write the state at a border to the slots whose state is folded up to there; `states_ptr`: of the head."""
    if (border == fold_to) & is_wanted:
        store_state(state_0, state_1, states_ptr + target * stride_states, columns, VALUE_DIM)
    for write in range(0, num_writes):
        token = gl.load(write_tokens_ptr + write).to(gl.int32)
        num_tokens = first + token + 1 - start
        if (token >= start) & (token < stop) & (num_tokens // CHUNK * CHUNK == border):
            slot = gl.load(write_slots_ptr + write)
            store_state(state_0, state_1, states_ptr + slot * stride_states, columns, VALUE_DIM)


@jit
def keep_block(
    added, misses, position, fold_to, kept_from, start, stop, first, target, num_writes, write_tokens_ptr,
    write_slots_ptr, values_ring_ptr, misses_ring_ptr, stride_values_ring, stride_misses_ring, head, columns,
    VALUE_HEADS: gl.constexpr, VALUE_DIM: gl.constexpr, RING_SIZE: gl.constexpr, MISSES_RING: gl.constexpr,
):  # fmt: skip
    """Write what a block's tokens from a position on add, and miss, to rings; as `pieces.keep_new`. Both [64, 16]."""
    last = first + stop - start
    positions = position + gl.arange(0, BLOCK, gl.SliceLayout(0, NARROW))
    rows = gl.convert_layout(columns, gl.SliceLayout(1, NARROW))
    added = gl.convert_layout(added, NARROW)
    of_ring = ((positions % RING_SIZE) * VALUE_HEADS + head)[None, :] * VALUE_DIM + rows[:, None]
    of_misses = ((positions % MISSES_RING) * VALUE_HEADS + head)[None, :] * VALUE_DIM + rows[:, None]
    is_kept = ((positions < last) & (positions >= fold_to))[None, :] & (rows >= 0)[:, None]
    gl.store(values_ring_ptr + target * stride_values_ring + of_ring, added, mask=is_kept)
    is_kept = ((positions < last) & (positions >= kept_from))[None, :] & (rows >= 0)[:, None]
    gl.store(misses_ring_ptr + target * stride_misses_ring + of_misses, misses, mask=is_kept)
    for write in range(0, num_writes):
        token = gl.load(write_tokens_ptr + write).to(gl.int32)
        num_tokens = first + token + 1 - start
        if (token >= start) & (token < stop):
            slot = gl.load(write_slots_ptr + write)
            is_kept = ((positions < num_tokens) & (positions >= num_tokens // CHUNK * CHUNK))[None, :]
            is_kept = is_kept & (rows >= 0)[:, None]
            gl.store(values_ring_ptr + slot * stride_values_ring + of_ring, added, mask=is_kept)
            is_kept = ((positions < num_tokens) & (positions >= num_tokens // BLOCK * BLOCK))[None, :]
            is_kept = is_kept & (rows >= 0)[:, None]
            gl.store(misses_ring_ptr + slot * stride_misses_ring + of_misses, misses, mask=is_kept)


@jit
def next_kept(chunk, num_chunks, begin, fold_to, start, stop, first, num_writes, write_tokens_ptr):
    """The next chunk, from one on, of which a slot keeps more than the state behind it."""
    kept = num_chunks
    if fold_to < first + stop - start:
        kept = num_chunks - 1
    for write in range(0, num_writes):
        token = gl.load(write_tokens_ptr + write).to(gl.int32)
        its = (first + token + 1 - start - begin) // CHUNK
        if (token >= start) & (token < stop) & (its >= chunk) & (its < kept) & (first + token + 1 > begin + start):
            kept = its
    return kept


@jit
def solve_chunks(
    smem, shared, num_chunks, begin, start, stop, first, source, target, first_column, head, num_writes,
    write_tokens_ptr, write_slots_ptr, states_ptr, values_ring_ptr, misses_ring_ptr, stride_states, stride_values_ring,
    stride_misses_ring, dtype: gl.constexpr, VALUE_HEADS: gl.constexpr, VALUE_DIM: gl.constexpr,
    RING_SIZE: gl.constexpr, MISSES_RING: gl.constexpr,
):  # fmt: skip
    """Find what each chunk's tokens add, and write the states and rings that a slot keeps."""
    keys, values, of_keys, inverses, gates, full, _, _, _, _ = smem
    shared_large, shared_small, shared_added = shared
    if num_chunks > 0:
        last = first + stop - start
        fold_to, kept_from = last // CHUNK * CHUNK, last // BLOCK * BLOCK
        places = gl.arange(0, CHUNK, OF_COLUMNS)
        columns = first_column + gl.arange(0, COLUMNS, OF_ROWS)
        of_head = states_ptr + head * (2 * HALF * VALUE_DIM)
        is_given = ((first > 0) & (places >= 0))[None, :] & (columns >= 0)[:, None]
        of_state = source * stride_states + places[None, :] * VALUE_DIM + columns[:, None]
        state_0 = gl.load(of_head + of_state, mask=is_given, other=0.0).to(gl.float32)
        state_1 = gl.load(of_head + of_state + HALF * VALUE_DIM, mask=is_given, other=0.0).to(gl.float32)
        zero = gl.zeros([COLUMNS, CHUNK], gl.float32, SQUARE)
        narrow = gl.zeros([COLUMNS, BLOCK], gl.float32, NARROW)
        kept = next_kept(0, num_chunks, begin, fold_to, start, stop, first, num_writes, write_tokens_ptr)
        for chunk in range(num_chunks):
            stage = chunk % STAGES
            border = begin + chunk * CHUNK
            if chunk == kept:
                store_states(
                    state_0, state_1, border, fold_to, kept > 0, start, stop, first, target, num_writes,
                    write_tokens_ptr, write_slots_ptr, of_head, stride_states, columns, VALUE_DIM,
                )  # fmt: skip
            mbarrier.wait(full.index(stage), (chunk // STAGES) & 1)
            right_0, right_1 = keys.index(2 * stage).permute((1, 0)), keys.index(2 * stage + 1).permute((1, 0))
            large_0 = state_0.to(dtype)
            read = warpgroup_mma(gl.convert_layout(large_0, LEFT), right_0, zero, use_acc=False, is_async=True)
            large_1 = state_1.to(dtype)
            read = warpgroup_mma(gl.convert_layout(large_1, LEFT), right_1, read, is_async=True)
            small_0 = (state_0 - large_0.to(gl.float32)).to(dtype)
            read = warpgroup_mma(gl.convert_layout(small_0, LEFT), right_0, read, is_async=True)
            small_1 = (state_1 - large_1.to(gl.float32)).to(dtype)
            read = warpgroup_mma(gl.convert_layout(small_1, LEFT), right_1, read, is_async=True)
            if chunk > 0:
                hardware_sync(READ, BOTH)
            shared_large.index(0).store(large_0)
            shared_large.index(1).store(large_1)
            shared_small.index(0).store(small_0)
            shared_small.index(1).store(small_1)
            fence_async_shared()
            hardware_arrive(READY, BOTH)
            own_gates = gates.index(stage)
            total = own_gates.slice(3 * CHUNK, CHUNK).load(OF_ROWS)
            state_0 = total[:, None] * state_0
            state_1 = total[:, None] * state_1
            own_values = values.index(stage).permute((1, 0)).load(SQUARE)
            read = warpgroup_mma_wait(0, deps=(read,))
            from_border = own_gates.slice(0, CHUNK).load(OF_COLUMNS)
            betas = own_gates.slice(CHUNK, CHUNK).load(OF_COLUMNS)
            missing = betas[None, :] * (own_values.to(gl.float32) - from_border[None, :] * read)
            missing = gl.where((places < last - border)[None, :], missing, 0.0)
            if chunk > 0:
                hardware_sync(TAKEN, BOTH)
            for b in gl.static_range(4):
                added = solve(missing, inverses, stage, narrow, dtype, b)
                added = warpgroup_mma_wait(0, deps=(added,)).to(dtype)
                left = gl.convert_layout(added, LEFT)
                if b < 3:
                    missing = warpgroup_mma(left, own_columns(of_keys, stage, b), missing, is_async=True)
                state_0, state_1 = fold(left, gates, keys, stage, state_0, state_1, b)
                shared_added.slice(b * BLOCK, BLOCK, dim=1).store(added)
                if b < 3:
                    missing = warpgroup_mma_wait(2, deps=(missing,))
            fence_async_shared()
            hardware_arrive(ADDED, BOTH)
            state_0, state_1 = warpgroup_mma_wait(0, deps=(state_0, state_1))
            hardware_arrive(FREE + stage, RING)
            state_0 = state_0.to(states_ptr.dtype.element_ty).to(gl.float32)
            state_1 = state_1.to(states_ptr.dtype.element_ty).to(gl.float32)
            if chunk == kept:
                for b in gl.static_range(4):
                    own = shared_added.slice(b * BLOCK, BLOCK, dim=1).load(NARROW)
                    keep_block(
                        own, columns_of(missing, b), border + b * BLOCK, fold_to, kept_from, start, stop, first, target,
                        num_writes, write_tokens_ptr, write_slots_ptr, values_ring_ptr, misses_ring_ptr,
                        stride_values_ring, stride_misses_ring, head, columns, VALUE_HEADS, VALUE_DIM, RING_SIZE,
                        MISSES_RING,
                    )  # fmt: skip
                kept = next_kept(
                    chunk + 1, num_chunks, begin, fold_to, start, stop, first, num_writes, write_tokens_ptr
                )
        if fold_to == last:
            store_states(
                state_0, state_1, last, fold_to, True, start, stop, first, target, num_writes, write_tokens_ptr,
                write_slots_ptr, of_head, stride_states, columns, VALUE_DIM,
            )  # fmt: skip
        hardware_sync(READ, BOTH)  # no arrival stays behind
        hardware_sync(TAKEN, BOTH)


@jit(do_not_specialize=["num_writes"])
def hallmark_recurrence_scan_wide(
    keys_desc, queries_desc, values_desc, of_keys_desc, of_queries_desc, inverses_desc, gates_ptr, out_ptr, starts_ptr,
    stops_ptr, firsts_ptr, folded_ptr, sources_ptr, targets_ptr, write_tokens_ptr, write_slots_ptr, states_ptr,
    values_ring_ptr, misses_ring_ptr, num_writes, stride_out, stride_states, stride_values_ring, stride_misses_ring,
    scale, KEY_HEADS: gl.constexpr, VALUE_HEADS: gl.constexpr, VALUE_DIM: gl.constexpr, RING_SIZE: gl.constexpr,
    MISSES_RING: gl.constexpr, LEAST: gl.constexpr,
):  # fmt: skip
    """One program: 64 columns of one value head of one row, from its first border on. Keys have 128 numbers.

    Descriptors have boxes of [64, 64], that of inverses, whose first 32 columns are read, of [64, 32].
    gates [units, 4, 64] fp32: decays from the border, betas, decays to the next border, the decay of the whole chunk.
    """
    dtype: gl.constexpr = keys_desc.dtype
    keys = gl.allocate_shared_memory(dtype, [STAGES * 2, CHUNK, HALF], TILE)
    values = gl.allocate_shared_memory(dtype, [STAGES, CHUNK, COLUMNS], TILE)
    of_keys = gl.allocate_shared_memory(dtype, [STAGES, CHUNK, CHUNK], TILE)
    inverses = gl.allocate_shared_memory(dtype, [STAGES, CHUNK, 2 * BLOCK], HALF_TILE)
    gates = gl.allocate_shared_memory(gl.float32, [STAGES, 4 * CHUNK], FLAT)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    queries = gl.allocate_shared_memory(dtype, [READ_STAGES * 2, CHUNK, HALF], TILE)
    of_queries = gl.allocate_shared_memory(dtype, [READ_STAGES, CHUNK, CHUNK], TILE)
    read_gates = gl.allocate_shared_memory(gl.float32, [READ_STAGES, 4 * CHUNK], FLAT)
    read_full = gl.allocate_shared_memory(gl.int64, [READ_STAGES, 1], mbarrier.MBarrierLayout())
    large = gl.allocate_shared_memory(dtype, [2, COLUMNS, HALF], TILE)
    small = gl.allocate_shared_memory(dtype, [2, COLUMNS, HALF], TILE)
    added = gl.allocate_shared_memory(dtype, [COLUMNS, CHUNK], TILE)
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=33)  # the producer's threads say that their gates are there; the tiles
    for stage in gl.static_range(READ_STAGES):
        mbarrier.init(read_full.index(stage), count=33)
    smem = keys, values, of_keys, inverses, gates, full, queries, of_queries, read_gates, read_full
    shared = large, small, added
    descs = keys_desc, queries_desc, values_desc, of_keys_desc, of_queries_desc, inverses_desc

    head, row = gl.program_id(1), gl.program_id(2)
    start, stop, first = gl.load(starts_ptr + row), gl.load(stops_ptr + row), gl.load(firsts_ptr + row)
    begin = (first + CHUNK - 1) // CHUNK * CHUNK
    from_token, num_tokens = start + begin - first, first + stop - start - begin
    num_chunks = num_own_chunks(starts_ptr, stops_ptr, firsts_ptr, row, LEAST)
    before = 0
    if num_chunks > 0:
        for other in range(0, row):
            before += num_own_chunks(starts_ptr, stops_ptr, firsts_ptr, other, LEAST)
    target, source = gl.load(targets_ptr + row), gl.load(sources_ptr + row)
    if gl.load(folded_ptr + row) < begin:  # the kernel before has folded the state up to here
        source = target
    first_column = gl.program_id(0) * COLUMNS
    column = head * VALUE_DIM + first_column
    key_head = head // (VALUE_HEADS // KEY_HEADS)
    gl.warp_specialize([
        (solve_chunks, (
            smem, shared, num_chunks, begin, start, stop, first, source, target, first_column, head, num_writes,
            write_tokens_ptr, write_slots_ptr, states_ptr, values_ring_ptr, misses_ring_ptr, stride_states,
            stride_values_ring, stride_misses_ring, dtype, VALUE_HEADS, VALUE_DIM, RING_SIZE, MISSES_RING,
        )),
        (read_chunks, (smem, shared, num_chunks, out_ptr, stride_out, from_token, num_tokens, column, scale)),
        (produce, (descs, gates_ptr, smem, num_chunks, from_token, before, head, key_head, column, VALUE_HEADS)),
    ], [4, 1], [176, 88])  # fmt: skip
