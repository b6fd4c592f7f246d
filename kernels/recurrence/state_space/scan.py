"""The state space itself in Triton: chunks of 64 tokens.

A token reads the state at the border before its chunk, then the tokens of its chunk in one product: the same sums, by
chains of products in the same order, in a prompt, in a part of one and alone. Tokens behind a row's last one are zeros.
Of long rows the scan computes states alone, and a second kernel the results of all chunks that have no other tokens.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
# The signatures of jitted functions are Triton's: only their constexpr parameters are annotated.

import triton
import triton.language as tl

from kernels.recurrence.forms.slots import begun_state, keep_added
from kernels.recurrence.portable.pieces import add_product, exact_logs, key_rows, known_or_new, product, store_state


@triton.jit(do_not_specialize=["num_rows", "num_writes"])
def hallmark_recurrence_space_scan(
    queries_ptr, keys_ptr, values_ptr, decays_ptr, steps_ptr, skip_ptr, borders_ptr, out_ptr, starts_ptr, stops_ptr,
    firsts_ptr, folded_ptr, sources_ptr, targets_ptr, write_tokens_ptr, write_slots_ptr, states_ptr, keys_ring_ptr,
    values_ring_ptr, decays_ring_ptr, num_rows, num_writes, stride_out, stride_states, stride_keys_ring,
    stride_values_ring, stride_decays_ring, KEY_HEADS: tl.constexpr, VALUE_HEADS: tl.constexpr, KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr, RING: tl.constexpr, FOLDS_ALL: tl.constexpr, IS_HALF: tl.constexpr, BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_R: tl.constexpr, CHUNK: tl.constexpr, STAGES: tl.constexpr,
    IS_APART: tl.constexpr,
):  # fmt: skip
    """One program: BLOCK_V columns of one value head of one row.

    FOLDS_ALL  whether the state is folded up to the row's last border; else up to the border before its first token
    BLOCK_Q    tokens of a chunk whose results are computed together: a chunk's, or few where few are new
    IS_APART   whether chunks of new tokens alone get no results, but a place in `borders`: the state before them
    """
    row, head = tl.program_id(0), tl.program_id(1)
    start, stop = tl.load(starts_ptr + row), tl.load(stops_ptr + row)
    first, begin = tl.load(firsts_ptr + row), tl.load(folded_ptr + row)
    source, target = tl.load(sources_ptr + row), tl.load(targets_ptr + row)
    last = first + stop - start
    if stop > start:
        key_head = head // (VALUE_HEADS // KEY_HEADS)
        fold_to = first // CHUNK * CHUNK
        if FOLDS_ALL:
            fold_to = last // CHUNK * CHUNK
        dims, places = tl.arange(0, BLOCK_K), tl.arange(0, CHUNK)
        columns = tl.program_id(2) * BLOCK_V + tl.arange(0, BLOCK_V)
        is_column = columns < VALUE_DIM
        is_state = (dims < KEY_DIM)[:, None] & is_column[None, :]
        of_columns = dims[:, None] * VALUE_DIM + columns[None, :]
        of_state = head * KEY_DIM * VALUE_DIM + of_columns
        state = begun_state(
            begin, first, fold_to, start, stop, source, target, num_writes, write_tokens_ptr, write_slots_ptr,
            states_ptr, keys_ring_ptr, values_ring_ptr, decays_ring_ptr, stride_states, stride_keys_ring,
            stride_values_ring, stride_decays_ring, of_state, is_state, columns, is_column, KEY_HEADS, VALUE_HEADS,
            KEY_DIM, VALUE_DIM, 1, RING, CHUNK, BLOCK_K,
        )  # fmt: skip
        skip = tl.load(skip_ptr + head)
        keys_ring = keys_ring_ptr + source * stride_keys_ring + key_head * KEY_DIM
        values_ring = values_ring_ptr + source * stride_values_ring + head * VALUE_DIM
        decays_ring = decays_ring_ptr + source * stride_decays_ring + head
        first_chunk = tl.cdiv(first, CHUNK)
        before = 0
        if IS_APART:
            for other in range(0, row, BLOCK_R):
                rows = other + tl.arange(0, BLOCK_R)
                counts = num_full_chunks(starts_ptr, stops_ptr, firsts_ptr, rows, num_rows, CHUNK)
                before += tl.sum(tl.where(rows < row, counts, 0), axis=0)
        num_chunks = tl.cdiv(last - begin, CHUNK)
        chunk = 0
        while chunk < num_chunks:
            # The next chunk that has known tokens, or of which a slot keeps more than the state behind it.
            kept = chunk
            if IS_APART & (begin + chunk * CHUNK >= first):
                kept = num_chunks
                if fold_to < last:
                    kept = num_chunks - 1
                for write in range(0, num_writes):
                    token = tl.load(write_tokens_ptr + write).to(tl.int32)
                    its = (first + token + 1 - start - begin) // CHUNK
                    if (token >= start) & (token < stop) & (its >= chunk) & (its < kept):
                        kept = its
            for plain in tl.range(chunk, kept, num_stages=STAGES):
                unit = (before + begin // CHUNK + plain - first_chunk) * VALUE_HEADS + head
                _store_border(state, borders_ptr, unit, of_columns, is_state, BLOCK_K * VALUE_DIM, IS_HALF)
                from_token = start + begin - first + plain * CHUNK
                keys, added, sums, _ = _chunk_of_new(
                    from_token, keys_ptr, values_ptr, decays_ptr, steps_ptr, head, key_head, columns, KEY_HEADS,
                    VALUE_HEADS, KEY_DIM, VALUE_DIM, BLOCK_K, CHUNK,
                )  # fmt: skip
                state = _folded(keys, added, state, sums, CHUNK).to(states_ptr.dtype.element_ty).to(tl.float32)
            if kept < num_chunks:
                border = begin + kept * CHUNK
                if kept > 0:
                    store_state(
                        state, border, fold_to, True, start, stop, first, target, num_writes, write_tokens_ptr,
                        write_slots_ptr, states_ptr, stride_states, of_state, is_state, CHUNK,
                    )  # fmt: skip
                positions = border + places
                is_known, is_new = positions < first, (positions >= first) & (positions < last)
                tokens = (start + positions - first).to(tl.int64)
                decays = known_or_new(decays_ring, decays_ptr + head, positions, start, first, last, VALUE_HEADS, RING)
                sums = tl.cumsum(exact_logs(decays), 0)  # [CHUNK] fp64: from the border on
                keys = key_rows(
                    keys_ring, keys_ptr + key_head * KEY_DIM, positions, start, first, last, KEY_HEADS * KEY_DIM, RING,
                    KEY_DIM, BLOCK_K,
                )  # fmt: skip
                of_values = (tokens * VALUE_HEADS + head)[:, None] * VALUE_DIM + columns[None, :]
                values = tl.load(values_ptr + of_values, mask=is_new[:, None] & is_column[None, :], other=0.0)
                steps = tl.load(steps_ptr + tokens * VALUE_HEADS + head, mask=is_new, other=0.0)
                of_ring = (positions % RING)[:, None] * (VALUE_HEADS * VALUE_DIM) + columns[None, :]
                known = tl.load(values_ring + of_ring, mask=is_known[:, None] & is_column[None, :], other=0.0)
                added = (values.to(tl.float32) * steps[:, None]).to(known.dtype)
                added = tl.where(is_known[:, None], known, added)
                keep_added(
                    added, positions, is_new, is_column, columns, fold_to, start, stop, first, target, num_writes,
                    write_tokens_ptr, write_slots_ptr, values_ring_ptr, stride_values_ring, head, VALUE_HEADS,
                    VALUE_DIM, RING, CHUNK,
                )  # fmt: skip
                is_full = (border >= first) & (last >= border + CHUNK)
                first_block = tl.maximum(first - border, 0) // BLOCK_Q
                if IS_APART & is_full:
                    unit = (before + border // CHUNK - first_chunk) * VALUE_HEADS + head
                    _store_border(state, borders_ptr, unit, of_columns, is_state, BLOCK_K * VALUE_DIM, IS_HALF)
                    first_block = CHUNK // BLOCK_Q
                large, small = parts_of(state, keys.dtype, IS_HALF)
                for block in range(first_block, tl.cdiv(tl.minimum(last - border, CHUNK), BLOCK_Q)):
                    own = block * BLOCK_Q + tl.arange(0, BLOCK_Q)
                    own_sums = tl.sum(tl.where(own[:, None] == places[None, :], sums[None, :], 0.0), axis=1)
                    own_positions = border + own
                    own_tokens = (start + own_positions - first).to(tl.int64)
                    is_own = (own_positions >= first) & (own_positions < last)
                    queries = tl.load(
                        queries_ptr + (own_tokens * KEY_HEADS + key_head)[:, None] * KEY_DIM + dims[None, :],
                        mask=is_own[:, None] & (dims < KEY_DIM)[None, :], other=0.0,
                    )  # fmt: skip
                    of_own = (own_tokens * VALUE_HEADS + head)[:, None] * VALUE_DIM + columns[None, :]
                    is_value = is_own[:, None] & is_column[None, :]
                    own_values = tl.load(values_ptr + of_own, mask=is_value, other=0.0).to(tl.float32)
                    is_there = own[:, None] >= places[None, :]
                    found = _results(queries, keys, added, large, small, sums, own_sums, is_there, IS_HALF)
                    of_out = own_tokens[:, None] * stride_out + head * VALUE_DIM + columns[None, :]
                    found = (found + skip * own_values).to(out_ptr.dtype.element_ty)
                    tl.store(out_ptr + of_out, found, mask=is_value)
                if last >= border + CHUNK:
                    state = _folded(keys, added, state, sums, CHUNK).to(states_ptr.dtype.element_ty).to(tl.float32)
            chunk = kept + 1
        if fold_to == last:
            store_state(
                state, last, fold_to, True, start, stop, first, target, num_writes, write_tokens_ptr, write_slots_ptr,
                states_ptr, stride_states, of_state, is_state, CHUNK,
            )  # fmt: skip


@triton.jit(do_not_specialize=["num_rows"])
def hallmark_recurrence_space_results(
    queries_ptr, keys_ptr, values_ptr, decays_ptr, steps_ptr, skip_ptr, borders_ptr, out_ptr, starts_ptr, stops_ptr,
    firsts_ptr, num_rows, stride_out, KEY_HEADS: tl.constexpr, VALUE_HEADS: tl.constexpr, KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr, IS_HALF: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
    BLOCK_R: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """One program: BLOCK_V columns of one value head of a chunk, of those of new tokens alone of all rows."""
    chunk, head = tl.program_id(0), tl.program_id(1)
    found, its, before = 0, 0, 0
    for begin in range(0, num_rows, BLOCK_R):
        rows = begin + tl.arange(0, BLOCK_R)
        counts = num_full_chunks(starts_ptr, stops_ptr, firsts_ptr, rows, num_rows, CHUNK)
        ends = before + tl.cumsum(counts, 0)
        is_own = (chunk >= ends - counts) & (chunk < ends)
        found += tl.sum(tl.where(is_own, rows + 1, 0), axis=0)
        its += tl.sum(tl.where(is_own, chunk - ends + counts, 0), axis=0)
        before += tl.sum(counts, axis=0)
    if found > 0:
        start, first = tl.load(starts_ptr + found - 1), tl.load(firsts_ptr + found - 1)
        from_token = start + tl.cdiv(first, CHUNK) * CHUNK - first + its * CHUNK
        key_head = head // (VALUE_HEADS // KEY_HEADS)
        dims, places = tl.arange(0, BLOCK_K), tl.arange(0, CHUNK)
        columns = tl.program_id(2) * BLOCK_V + tl.arange(0, BLOCK_V)
        is_state = (dims < KEY_DIM)[:, None] & (columns < VALUE_DIM)[None, :]
        keys, added, sums, values = _chunk_of_new(
            from_token, keys_ptr, values_ptr, decays_ptr, steps_ptr, head, key_head, columns, KEY_HEADS, VALUE_HEADS,
            KEY_DIM, VALUE_DIM, BLOCK_K, CHUNK,
        )  # fmt: skip
        tokens = from_token.to(tl.int64) + places
        of_queries = (tokens * KEY_HEADS + key_head)[:, None] * KEY_DIM + dims[None, :]
        queries = tl.load(queries_ptr + of_queries, mask=(dims < KEY_DIM)[None, :], other=0.0)
        PARTS: tl.constexpr = 2 if IS_HALF else 1
        unit = (chunk * VALUE_HEADS + head).to(tl.int64)
        border = borders_ptr + unit * PARTS * BLOCK_K * VALUE_DIM + dims[:, None] * VALUE_DIM + columns[None, :]
        large = tl.load(border, mask=is_state, other=0.0)
        small = large
        if IS_HALF:
            small = tl.load(border + BLOCK_K * VALUE_DIM, mask=is_state, other=0.0)
        is_there = places[:, None] >= places[None, :]
        results = _results(queries, keys, added, large, small, sums, sums, is_there, IS_HALF)
        results = (results + tl.load(skip_ptr + head) * values).to(out_ptr.dtype.element_ty)
        of_out = tokens[:, None] * stride_out + head * VALUE_DIM + columns[None, :]
        tl.store(out_ptr + of_out, results, mask=(columns < VALUE_DIM)[None, :] & (places >= 0)[:, None])


@triton.jit
def num_full_chunks(starts_ptr, stops_ptr, firsts_ptr, rows, num_rows, CHUNK: tl.constexpr):
    """Chunks of each row that have no other tokens than its own."""
    is_row = rows < num_rows
    start, stop = tl.load(starts_ptr + rows, mask=is_row, other=0), tl.load(stops_ptr + rows, mask=is_row, other=0)
    first = tl.load(firsts_ptr + rows, mask=is_row, other=0)
    return tl.maximum(first + stop - start - tl.cdiv(first, CHUNK) * CHUNK, 0) // CHUNK


@triton.jit
def parts_of(state, dtype: tl.constexpr, IS_HALF: tl.constexpr):
    """A state of fp32 as two numbers of 16 bits where tokens have 16, else itself twice."""
    large, small = state, state
    if IS_HALF:
        large = state.to(dtype)
        small = (state - large.to(tl.float32)).to(dtype)
    return large, small


@triton.jit
def _store_border(state, borders_ptr, unit, of_columns, is_state, SIZE: tl.constexpr, IS_HALF: tl.constexpr):
    """Write the state before a chunk, as its results read it."""
    PARTS: tl.constexpr = 2 if IS_HALF else 1
    large, small = parts_of(state, borders_ptr.dtype.element_ty, IS_HALF)
    to = borders_ptr + unit.to(tl.int64) * PARTS * SIZE + of_columns
    tl.store(to, large, mask=is_state)
    if IS_HALF:
        tl.store(to + SIZE, small, mask=is_state)


@triton.jit
def _chunk_of_new(
    from_token, keys_ptr, values_ptr, decays_ptr, steps_ptr, head, key_head, columns, KEY_HEADS: tl.constexpr,
    VALUE_HEADS: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, BLOCK_K: tl.constexpr,
    CHUNK: tl.constexpr,
):  # fmt: skip
    """(keys, what the tokens add, sums of decays' logarithms, values) of a chunk of new tokens."""
    dims, places = tl.arange(0, BLOCK_K), tl.arange(0, CHUNK)
    tokens = from_token.to(tl.int64) + places
    of_keys = (tokens * KEY_HEADS + key_head)[:, None] * KEY_DIM + dims[None, :]
    keys = tl.load(keys_ptr + of_keys, mask=(dims < KEY_DIM)[None, :], other=0.0)
    sums = tl.cumsum(exact_logs(tl.load(decays_ptr + tokens * VALUE_HEADS + head)), 0)
    steps = tl.load(steps_ptr + tokens * VALUE_HEADS + head)
    of_values = (tokens * VALUE_HEADS + head)[:, None] * VALUE_DIM + columns[None, :]
    given = tl.load(values_ptr + of_values, mask=(columns < VALUE_DIM)[None, :], other=0.0)
    values = given.to(tl.float32)
    return keys, (values * steps[:, None]).to(given.dtype), sums, values


@triton.jit
def _results(queries, keys, added, large, small, sums, own_sums, is_there, IS_HALF: tl.constexpr):
    """[n, BLOCK_V] fp32: what n tokens read of the state, and of the chunk's tokens that are there for them."""
    read = product(queries, large)
    if IS_HALF:
        read = add_product(queries, small, read)
    between = tl.exp(tl.where(is_there, own_sums[:, None] - sums[None, :], 0.0).to(tl.float32))
    factors = tl.where(is_there, between * product(queries, tl.trans(keys)), 0.0)
    return add_product(factors.to(keys.dtype), added, tl.exp(own_sums.to(tl.float32))[:, None] * read)


@triton.jit
def _folded(keys, added, state, sums, CHUNK: tl.constexpr):
    """The state behind a full chunk."""
    total = tl.sum(tl.where(tl.arange(0, CHUNK) == CHUNK - 1, sums, 0.0), axis=0)
    left = tl.exp((total - sums).to(tl.float32))
    turned = (added.to(tl.float32) * left[:, None]).to(keys.dtype)
    return add_product(tl.trans(keys), turned, tl.exp(total.to(tl.float32)) * state)
