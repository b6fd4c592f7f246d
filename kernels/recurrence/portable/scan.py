"""The rule itself for rows of many tokens, in Triton: chunk by chunk, from a border on, with what stands ready of each.

All is transposed: value columns are rows of the matrix units, tokens their columns. So the state, what tokens miss and
what they add are left factors that stay in registers, whatever is summed up next.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
# The signatures of jitted functions are Triton's: only their constexpr parameters are annotated.

import triton
import triton.language as tl

from kernels.recurrence.portable.pieces import add_product, keep_new, num_own_chunks, product, store_state


@triton.jit(do_not_specialize=["num_rows", "num_writes"])
def hallmark_recurrence_scan(
    queries_ptr, keys_ptr, values_ptr, of_keys_ptr, of_queries_ptr, inverses_ptr, gates_ptr, out_ptr, starts_ptr,
    stops_ptr, firsts_ptr, folded_ptr, sources_ptr, targets_ptr, write_tokens_ptr, write_slots_ptr, states_ptr,
    values_ring_ptr, misses_ring_ptr, num_rows, num_writes, stride_out, stride_states, stride_values_ring,
    stride_misses_ring, scale, KEY_HEADS: tl.constexpr, VALUE_HEADS: tl.constexpr, KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr, RING: tl.constexpr, MISSES_RING: tl.constexpr, BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK: tl.constexpr, CHUNK: tl.constexpr, LEAST: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """One program: BLOCK_V columns of one value head of one row, from its first border on."""
    row = tl.program_id(0)
    head = tl.program_id(1)
    start, stop, first = tl.load(starts_ptr + row), tl.load(stops_ptr + row), tl.load(firsts_ptr + row)
    begin, last = tl.cdiv(first, CHUNK) * CHUNK, first + stop - start
    if (stop > start) & (last - begin >= LEAST):
        before = 0
        for other in range(0, row, BLOCK_R):
            rows = other + tl.arange(0, BLOCK_R)
            counts = num_own_chunks(starts_ptr, stops_ptr, firsts_ptr, rows, num_rows, CHUNK, LEAST)
            before += tl.sum(tl.where(rows < row, counts, 0), axis=0)
        target = tl.load(targets_ptr + row)
        source = tl.load(sources_ptr + row)
        if tl.load(folded_ptr + row) < begin:  # the kernel before has folded the state up to here
            source = target
        fold_to, kept_from = last // CHUNK * CHUNK, last // BLOCK * BLOCK
        dims, places = tl.arange(0, BLOCK_K), tl.arange(0, CHUNK)
        columns = tl.program_id(2) * BLOCK_V + tl.arange(0, BLOCK_V)
        is_column, is_dim = columns < VALUE_DIM, dims < KEY_DIM
        is_state = is_column[:, None] & is_dim[None, :]
        of_state = head * KEY_DIM * VALUE_DIM + dims[None, :] * VALUE_DIM + columns[:, None]
        state = tl.load(states_ptr + source * stride_states + of_state, mask=is_state & (first > 0), other=0.0).to(
            tl.float32
        )
        num_chunks = tl.cdiv(last - begin, CHUNK)
        chunk = 0
        while chunk < num_chunks:
            # The next chunk of which a slot keeps more than the state behind it.
            kept = num_chunks
            if fold_to < last:
                kept = num_chunks - 1
            for write in range(0, num_writes):
                token = tl.load(write_tokens_ptr + write).to(tl.int32)
                its = (first + token + 1 - start - begin) // CHUNK
                if (token >= start) & (token < stop) & (its >= chunk) & (its < kept) & (first + token + 1 > begin):
                    kept = its
            for plain in tl.range(chunk, kept, num_stages=STAGES):
                state, added, missing = _step(
                    state, start + begin - first + plain * CHUNK, stop, before + plain, queries_ptr, keys_ptr,
                    values_ptr, of_keys_ptr, of_queries_ptr, inverses_ptr, gates_ptr, out_ptr, stride_out, scale, head,
                    columns, KEY_HEADS, VALUE_HEADS, KEY_DIM, VALUE_DIM, BLOCK_K, BLOCK_V, BLOCK, CHUNK,
                    (KEY_DIM == BLOCK_K) & (VALUE_DIM % BLOCK_V == 0),
                )  # fmt: skip
                state = state.to(states_ptr.dtype.element_ty).to(tl.float32)
            if kept < num_chunks:
                border = begin + kept * CHUNK
                store_state(
                    state, border, fold_to, kept > 0, start, stop, first, target, num_writes, write_tokens_ptr,
                    write_slots_ptr, states_ptr, stride_states, of_state, is_state, CHUNK,
                )  # fmt: skip
                state, added, missing = _step(
                    state, start + border - first, stop, before + kept, queries_ptr, keys_ptr, values_ptr,
                    of_keys_ptr, of_queries_ptr, inverses_ptr, gates_ptr, out_ptr, stride_out, scale, head, columns,
                    KEY_HEADS, VALUE_HEADS, KEY_DIM, VALUE_DIM, BLOCK_K, BLOCK_V, BLOCK, CHUNK, False,
                )  # fmt: skip
                state = state.to(states_ptr.dtype.element_ty).to(tl.float32)
                keep_new(
                    tl.trans(added), tl.trans(missing), border + places, places < last - border, is_column, columns,
                    fold_to, kept_from, start, stop, first, target, num_writes, write_tokens_ptr, write_slots_ptr,
                    values_ring_ptr, misses_ring_ptr, stride_values_ring, stride_misses_ring, head, VALUE_HEADS,
                    VALUE_DIM, RING, MISSES_RING, CHUNK, BLOCK,
                )  # fmt: skip
            chunk = kept + 1
        if fold_to == last:
            store_state(
                state, last, fold_to, True, start, stop, first, target, num_writes, write_tokens_ptr, write_slots_ptr,
                states_ptr, stride_states, of_state, is_state, CHUNK,
            )  # fmt: skip


@triton.jit
def _step(
    state, from_token, stop, chunk, queries_ptr, keys_ptr, values_ptr, of_keys_ptr, of_queries_ptr, inverses_ptr,
    gates_ptr, out_ptr, stride_out, scale, head, columns, KEY_HEADS: tl.constexpr, VALUE_HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK: tl.constexpr,
    CHUNK: tl.constexpr, IS_FULL: tl.constexpr,
):  # fmt: skip
    """(state behind a chunk, what its tokens add, what they miss), and write the results: the latter [BLOCK_V, CHUNK].

    state [BLOCK_V, BLOCK_K] fp32
    IS_FULL  whether every place of the chunk is a token, and of the tiles a number
    """
    key_head = head // (VALUE_HEADS // KEY_HEADS)
    dims, places = tl.arange(0, BLOCK_K), tl.arange(0, CHUNK)
    unit = (chunk * VALUE_HEADS + head).to(tl.int64)
    is_token = places < stop - from_token
    is_key = is_token[:, None] & (dims < KEY_DIM)[None, :]
    of_rows = ((from_token + places) * KEY_HEADS + key_head)[:, None] * KEY_DIM + dims[None, :]
    if IS_FULL:
        keys, queries = tl.load(keys_ptr + of_rows), tl.load(queries_ptr + of_rows)
    else:
        keys = tl.load(keys_ptr + of_rows, mask=is_key, other=0.0)
        queries = tl.load(queries_ptr + of_rows, mask=is_key, other=0.0)
    of_values = ((from_token + places) * VALUE_HEADS + head)[:, None] * VALUE_DIM + columns[None, :]
    is_value = is_token[:, None] & (columns < VALUE_DIM)[None, :]
    if IS_FULL:
        values = tl.load(values_ptr + of_values)
    else:
        values = tl.load(values_ptr + of_values, mask=is_value, other=0.0)
    gates = gates_ptr + unit * 4 * CHUNK
    from_border, betas = tl.load(gates + places), tl.load(gates + CHUNK + places)
    left, total = tl.load(gates + 2 * CHUNK + places), tl.load(gates + CHUNK - 1)
    of_square = unit * CHUNK * CHUNK + places[:, None] * CHUNK
    large = state.to(keys.dtype)
    small = (state - large.to(tl.float32)).to(keys.dtype)
    read = add_product(small, tl.trans(keys), product(large, tl.trans(keys)))
    missing = betas[None, :] * (tl.trans(values).to(tl.float32) - from_border[None, :] * read)
    found = from_border[None, :] * add_product(small, tl.trans(queries), product(large, tl.trans(queries)))
    missing, added_0 = _block(missing, 0, unit, of_square, of_keys_ptr, inverses_ptr, BLOCK_V, BLOCK, CHUNK)
    missing, added_1 = _block(missing, 1, unit, of_square, of_keys_ptr, inverses_ptr, BLOCK_V, BLOCK, CHUNK)
    missing, added_2 = _block(missing, 2, unit, of_square, of_keys_ptr, inverses_ptr, BLOCK_V, BLOCK, CHUNK)
    missing, added_3 = _block(missing, 3, unit, of_square, of_keys_ptr, inverses_ptr, BLOCK_V, BLOCK, CHUNK)
    added = _joined(added_0, added_1, added_2, added_3, BLOCK_V, BLOCK)
    turned = (added.to(tl.float32) * left[None, :]).to(keys.dtype)
    state = add_product(turned, keys, total * state)
    of_queries = tl.load(of_queries_ptr + of_square + places[None, :])
    found = add_product(added, tl.trans(of_queries), found)
    of_out = (from_token + places)[:, None] * stride_out + head * VALUE_DIM + columns[None, :]
    results = tl.trans(found * scale).to(out_ptr.dtype.element_ty)
    if IS_FULL:
        tl.store(out_ptr + of_out, results)
    else:
        tl.store(out_ptr + of_out, results, mask=is_value)
    return state, added, missing


@triton.jit
def _block(
    missing, block: tl.constexpr, unit, of_square, of_keys_ptr, inverses_ptr, BLOCK_V: tl.constexpr,
    BLOCK: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """(missing without what the block adds, what it adds [BLOCK_V, BLOCK])."""
    steps = tl.arange(0, BLOCK)
    of_inverse = inverses_ptr + (unit * CHUNK + block * BLOCK + steps)[:, None] * CHUNK + tl.arange(0, CHUNK)[None, :]
    inverse = tl.load(of_inverse)
    misses = _columns(missing, block, BLOCK_V, BLOCK)
    most = misses.to(inverse.dtype)
    least = (misses - most.to(tl.float32)).to(inverse.dtype)
    added = product(_joined(least, most, most, most * 0, BLOCK_V, BLOCK), tl.trans(inverse)).to(inverse.dtype)
    if block < CHUNK // BLOCK - 1:
        of_keys = tl.load(of_keys_ptr + of_square + (block * BLOCK + steps)[None, :])
        missing = add_product(added, tl.trans(of_keys), missing)
    return missing, added


@triton.jit
def _joined(x_0, x_1, x_2, x_3, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Four of [ROWS, BLOCK] side by side: each thread has them already."""
    pairs = tl.join(tl.join(x_0, x_1), tl.join(x_2, x_3))  # [ROWS, BLOCK, 2, 2]
    return tl.reshape(tl.permute(pairs, (0, 3, 2, 1)), (ROWS, 4 * BLOCK))


@triton.jit
def _columns(x, block: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """x [ROWS, 4 * BLOCK]: its columns of one block; each thread has them already."""
    halves = tl.permute(tl.reshape(x, (ROWS, 2, 2, BLOCK)), (0, 3, 1, 2))
    even, odd = tl.split(halves)
    if block % 2 == 0:
        first, second = tl.split(even)
    else:
        first, second = tl.split(odd)
    if block < 2:
        chosen = first
    else:
        chosen = second
    return chosen
