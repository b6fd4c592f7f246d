"""The rule itself for rows of one block of 16 tokens, in Triton: what is decoded, and what was drafted."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
# The signatures of jitted functions are Triton's: only their constexpr parameters are annotated.

import triton
import triton.language as tl

from kernels.recurrence.portable.pieces import (
    add_product,
    added_rows,
    copy_kept,
    exact_logs,
    is_one_block,
    keep_new,
    key_rows,
    known_misses,
    known_or_new,
    read_state,
    solved,
    store_state,
)


@triton.jit(do_not_specialize=["num_writes"])
def hallmark_recurrence_rows(
    queries_ptr, keys_ptr, values_ptr, added_ptr, of_keys_ptr, of_queries_ptr, inverses_ptr, gates_ptr, out_ptr,
    decays_ptr, starts_ptr, stops_ptr, firsts_ptr, folded_ptr, sources_ptr, targets_ptr, write_tokens_ptr,
    write_slots_ptr, states_ptr, keys_ring_ptr, values_ring_ptr, decays_ring_ptr, betas_ring_ptr, misses_ring_ptr,
    num_writes, stride_out, stride_states, stride_keys_ring, stride_values_ring, stride_decays_ring, stride_betas_ring,
    stride_misses_ring, scale, KEY_HEADS: tl.constexpr, VALUE_HEADS: tl.constexpr, KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr, RING: tl.constexpr, MISSES_RING: tl.constexpr, FOLDS_ALL: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """One program: BLOCK_V columns of one value head of one row.

    What is seldom comes last: a full chunk is folded, a state copied to another slot.
    """
    row, head = tl.program_id(0), tl.program_id(1)
    start, stop, first = tl.load(starts_ptr + row), tl.load(stops_ptr + row), tl.load(firsts_ptr + row)
    source, target = tl.load(sources_ptr + row), tl.load(targets_ptr + row)
    if is_one_block(start, stop, first, tl.load(folded_ptr + row), BLOCK, CHUNK):
        dims, steps, places = tl.arange(0, BLOCK_K), tl.arange(0, BLOCK), tl.arange(0, CHUNK)
        columns = tl.program_id(2) * BLOCK_V + tl.arange(0, BLOCK_V)
        is_column = columns < VALUE_DIM
        is_state = (dims < KEY_DIM)[:, None] & is_column[None, :]
        of_columns = dims[:, None] * VALUE_DIM + columns[None, :]
        last = first + stop - start
        border, begin = first // CHUNK * CHUNK, first // BLOCK * BLOCK
        positions = begin + steps
        is_new = (positions >= first) & (positions < last)
        tokens = start + positions - first
        is_key = is_new[:, None] & (dims < KEY_DIM)[None, :]
        is_value = is_new[:, None] & is_column[None, :]
        fold_to = border
        if FOLDS_ALL:
            fold_to = last // CHUNK * CHUNK
        state = tl.load(
            states_ptr + source * stride_states + head * KEY_DIM * VALUE_DIM + of_columns,
            mask=is_state & (first > 0), other=0.0,
        ).to(tl.float32)  # fmt: skip
        of_keys = (tokens * KEY_HEADS + head // (VALUE_HEADS // KEY_HEADS))[:, None] * KEY_DIM + dims[None, :]
        keys = tl.load(keys_ptr + of_keys, mask=is_key, other=0.0)
        queries = tl.load(queries_ptr + of_keys, mask=is_key, other=0.0)
        of_values = (tokens * VALUE_HEADS + head)[:, None] * VALUE_DIM + columns[None, :]
        values = tl.load(values_ptr + of_values, mask=is_value, other=0.0).to(tl.float32)
        added = added_rows(
            values_ring_ptr + source * stride_values_ring + head * VALUE_DIM, added_ptr, border + places, start,
            first, begin, begin, VALUE_HEADS * VALUE_DIM, RING, columns, is_column,
        )  # fmt: skip
        misses_ring = misses_ring_ptr + source * stride_misses_ring + head * VALUE_DIM
        known = known_misses(misses_ring, positions, first, VALUE_HEADS * VALUE_DIM, MISSES_RING, columns, is_column)
        unit = (row * VALUE_HEADS + head).to(tl.int64)
        of_rows = unit * BLOCK * CHUNK + steps[:, None] * CHUNK
        of_others = tl.load(of_keys_ptr + of_rows + places[None, :])
        of_results = tl.load(of_queries_ptr + of_rows + places[None, :])
        of_own = tl.load(of_queries_ptr + of_rows + (begin - border + steps)[None, :])
        of_inverse = inverses_ptr + of_rows + steps[None, :]
        large, small = tl.load(of_inverse), tl.load(of_inverse + BLOCK)
        from_border = tl.load(gates_ptr + unit * 4 * BLOCK + steps)
        betas = tl.load(gates_ptr + unit * 4 * BLOCK + BLOCK + steps)
        missing = betas[:, None] * (values - from_border[:, None] * read_state(keys, state, True))
        missing = add_product(of_others, added, missing)
        missing = tl.where(is_new[:, None], missing, known)
        own_added = solved(large, small, missing)
        found = add_product(of_results, added, from_border[:, None] * read_state(queries, state, True))
        found = add_product(of_own, own_added, found)
        tl.store(added_ptr + of_values, own_added, mask=is_value)
        of_out = tokens[:, None] * stride_out + head * VALUE_DIM + columns[None, :]
        tl.store(out_ptr + of_out, (found * scale).to(out_ptr.dtype.element_ty), mask=is_value)
        of_ring = ((positions % RING) * VALUE_HEADS + head)[:, None] * VALUE_DIM + columns[None, :]
        is_kept = is_value & (positions >= fold_to)[:, None]
        tl.store(values_ring_ptr + target * stride_values_ring + of_ring, own_added, mask=is_kept)
        of_ring = ((positions % MISSES_RING) * VALUE_HEADS + head)[:, None] * VALUE_DIM + columns[None, :]
        tl.store(misses_ring_ptr + target * stride_misses_ring + of_ring, missing, mask=is_value)
        is_folded = FOLDS_ALL & (last == border + CHUNK)
        is_seldom = (target != source) | (first == 0) | is_folded
        for write in range(0, num_writes):
            token = tl.load(write_tokens_ptr + write)
            is_seldom |= (token >= start) & (token < stop)
        if is_seldom:
            tl.debug_barrier()
            key_head = head // (VALUE_HEADS // KEY_HEADS)
            of_state = head * KEY_DIM * VALUE_DIM + of_columns
            state = tl.load(states_ptr + source * stride_states + of_state, mask=is_state & (first > 0), other=0.0).to(
                tl.float32
            )
            store_state(
                state, border, fold_to, (target != source) | (first == 0), start, stop, first, target, num_writes,
                write_tokens_ptr, write_slots_ptr, states_ptr, stride_states, of_state, is_state, CHUNK,
            )  # fmt: skip
            copy_kept(
                border, first, fold_to, begin, start, stop, source, target, num_writes, write_tokens_ptr,
                write_slots_ptr, keys_ring_ptr, values_ring_ptr, decays_ring_ptr, betas_ring_ptr, misses_ring_ptr,
                stride_keys_ring, stride_values_ring, stride_decays_ring, stride_betas_ring, stride_misses_ring,
                head, key_head, columns, is_column, KEY_HEADS, VALUE_HEADS, KEY_DIM, VALUE_DIM, RING, MISSES_RING,
                CHUNK, BLOCK, BLOCK_K,
            )  # fmt: skip
            of_values = (tokens * VALUE_HEADS + head)[:, None] * VALUE_DIM + columns[None, :]
            own_added = tl.load(added_ptr + of_values, mask=is_value, other=0.0)
            misses_ring = misses_ring_ptr + target * stride_misses_ring + head * VALUE_DIM
            missing = known_misses(
                misses_ring, positions, last, VALUE_HEADS * VALUE_DIM, MISSES_RING, columns, is_column
            )
            keep_new(
                own_added, missing, positions, is_new, is_column, columns, last, last, start, stop, first, target,
                num_writes, write_tokens_ptr, write_slots_ptr, values_ring_ptr, misses_ring_ptr, stride_values_ring,
                stride_misses_ring, head, VALUE_HEADS, VALUE_DIM, RING, MISSES_RING, CHUNK, BLOCK,
            )  # fmt: skip
            if is_folded:
                chunk_keys = key_rows(
                    keys_ring_ptr + source * stride_keys_ring + key_head * KEY_DIM, keys_ptr + key_head * KEY_DIM,
                    border + places, start, first, last, KEY_HEADS * KEY_DIM, RING, KEY_DIM, BLOCK_K,
                )  # fmt: skip
                chunk_added = added_rows(
                    values_ring_ptr + source * stride_values_ring + head * VALUE_DIM, added_ptr + head * VALUE_DIM,
                    border + places, start, first, last, last, VALUE_HEADS * VALUE_DIM, RING, columns, is_column,
                )  # fmt: skip
                decays = known_or_new(
                    decays_ring_ptr + source * stride_decays_ring + head, decays_ptr + head, border + places, start,
                    first, last, VALUE_HEADS, RING,
                )  # fmt: skip
                sums = tl.cumsum(exact_logs(decays), 0)
                total = tl.sum(tl.where(places == CHUNK - 1, sums, 0.0), axis=0)
                left = tl.exp((total - sums).to(tl.float32))
                turned = (chunk_added.to(tl.float32) * left[:, None]).to(chunk_keys.dtype)
                state = add_product(tl.trans(chunk_keys), turned, tl.exp(total.to(tl.float32)) * state)
                store_state(
                    state, last, fold_to, True, start, stop, first, target, num_writes, write_tokens_ptr,
                    write_slots_ptr, states_ptr, stride_states, of_state, is_state, CHUNK,
                )  # fmt: skip
