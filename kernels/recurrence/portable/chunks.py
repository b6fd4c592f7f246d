"""The rule itself for rows of few tokens, in Triton: blocks of 16 tokens, in the order "chunk64.triton"."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
# The signatures of jitted functions are Triton's: only their constexpr parameters are annotated.

import triton
import triton.language as tl

from kernels.recurrence.portable.pieces import (
    add_product,
    added_rows,
    copy_kept,
    exact_logs,
    inverse,
    is_one_block,
    keep_new,
    key_rows,
    known_misses,
    known_or_new,
    product,
    read_state,
    solved,
    store_state,
)


@triton.jit(do_not_specialize=["num_writes"])
def hallmark_recurrence_chunks(
    queries_ptr, keys_ptr, values_ptr, decays_ptr, betas_ptr, added_ptr, out_ptr, starts_ptr, stops_ptr, firsts_ptr,
    folded_ptr, sources_ptr, targets_ptr, write_tokens_ptr, write_slots_ptr, states_ptr, keys_ring_ptr,
    values_ring_ptr, decays_ring_ptr, betas_ring_ptr, misses_ring_ptr, num_writes, stride_out, stride_states,
    stride_keys_ring, stride_values_ring, stride_decays_ring, stride_betas_ring, stride_misses_ring, scale,
    KEY_HEADS: tl.constexpr, VALUE_HEADS: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    RING: tl.constexpr, MISSES_RING: tl.constexpr, FOLDS_ALL: tl.constexpr, IS_HALF: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK: tl.constexpr, CHUNK: tl.constexpr, LEAST: tl.constexpr,
    LEAVES_BLOCKS: tl.constexpr,
):  # fmt: skip
    """One program: BLOCK_V columns of one value head of one row.

    FOLDS_ALL  whether the state is folded up to the row's last border; else up to the border before its first token
    LEAVES_BLOCKS  whether rows of one block are left to another kernel
    LEAST      of a row that has so many tokens from its first border on, only those before; 0: of no row
    What each token adds is written to `added` and read again by this program, behind a barrier.
    """
    row = tl.program_id(0)
    head = tl.program_id(1)
    start, stop = tl.load(starts_ptr + row), tl.load(stops_ptr + row)
    first, begin = tl.load(firsts_ptr + row), tl.load(folded_ptr + row)
    source, target = tl.load(sources_ptr + row), tl.load(targets_ptr + row)
    last = first + stop - start
    is_wanted = stop > start
    if LEAVES_BLOCKS:
        is_wanted = is_wanted & (is_one_block(start, stop, first, begin, BLOCK, CHUNK) == 0)
    if is_wanted:
        end = last
        if LEAST > 0:
            border = tl.cdiv(first, CHUNK) * CHUNK
            if last - border >= LEAST:
                end = border
        key_head = head // (VALUE_HEADS // KEY_HEADS)
        fold_to = first // CHUNK * CHUNK
        kept_from = first // BLOCK * BLOCK
        if FOLDS_ALL:
            fold_to = last // CHUNK * CHUNK
            kept_from = last // BLOCK * BLOCK
        dims = tl.arange(0, BLOCK_K)
        columns = tl.program_id(2) * BLOCK_V + tl.arange(0, BLOCK_V)
        is_column = columns < VALUE_DIM
        is_state = (dims < KEY_DIM)[:, None] & is_column[None, :]
        of_state = head * KEY_DIM * VALUE_DIM + dims[:, None] * VALUE_DIM + columns[None, :]
        state = tl.load(states_ptr + source * stride_states + of_state, mask=is_state & (first > 0), other=0.0).to(
            tl.float32
        )
        store_state(
            state, begin, fold_to, (target != source) | (first == 0), start, stop, first, target, num_writes,
            write_tokens_ptr, write_slots_ptr, states_ptr, stride_states, of_state, is_state, CHUNK,
        )  # fmt: skip
        copy_kept(
            begin, first, fold_to, kept_from, start, stop, source, target, num_writes, write_tokens_ptr,
            write_slots_ptr, keys_ring_ptr, values_ring_ptr, decays_ring_ptr, betas_ring_ptr, misses_ring_ptr,
            stride_keys_ring, stride_values_ring, stride_decays_ring, stride_betas_ring, stride_misses_ring, head,
            key_head, columns, is_column, KEY_HEADS, VALUE_HEADS, KEY_DIM, VALUE_DIM, RING, MISSES_RING, CHUNK, BLOCK,
            BLOCK_K,
        )  # fmt: skip
        keys_ring = keys_ring_ptr + source * stride_keys_ring + key_head * KEY_DIM
        values_ring = values_ring_ptr + source * stride_values_ring + head * VALUE_DIM
        decays_ring = decays_ring_ptr + source * stride_decays_ring + head
        betas_ring = betas_ring_ptr + source * stride_betas_ring + head
        misses_ring = misses_ring_ptr + source * stride_misses_ring + head * VALUE_DIM
        places = tl.arange(0, CHUNK)
        steps = tl.arange(0, BLOCK)
        for border in range(begin, end, CHUNK):
            decays = known_or_new(decays_ring, decays_ptr + head, border + places, start, first, end, VALUE_HEADS, RING)
            sums = tl.cumsum(exact_logs(decays), 0)  # [CHUNK] fp64: from the border on
            keys = key_rows(
                keys_ring, keys_ptr + key_head * KEY_DIM, border + places, start, first, end, KEY_HEADS * KEY_DIM,
                RING, KEY_DIM, BLOCK_K,
            )  # fmt: skip
            first_block = tl.maximum(first - border, 0) // BLOCK
            end_block = tl.cdiv(tl.minimum(end - border, CHUNK), BLOCK)
            for block in range(first_block, end_block):
                own = block * BLOCK + steps
                positions = border + own
                is_new = (positions >= first) & (positions < end)
                tokens = start + positions - first
                own_keys = key_rows(
                    keys_ring, keys_ptr + key_head * KEY_DIM, positions, start, first, end, KEY_HEADS * KEY_DIM, RING,
                    KEY_DIM, BLOCK_K,
                )  # fmt: skip
                queries = tl.load(
                    queries_ptr + (tokens * KEY_HEADS + key_head)[:, None] * KEY_DIM + dims[None, :],
                    mask=is_new[:, None] & (dims < KEY_DIM)[None, :], other=0.0,
                )  # fmt: skip
                of_values = (tokens * VALUE_HEADS + head)[:, None] * VALUE_DIM + columns[None, :]
                is_value = is_new[:, None] & is_column[None, :]
                values = tl.load(values_ptr + of_values, mask=is_value, other=0.0).to(tl.float32)
                betas = known_or_new(betas_ring, betas_ptr + head, positions, start, first, end, VALUE_HEADS, RING)
                own_sums = tl.sum(tl.where(places[None, :] == own[:, None], sums[None, :], 0.0), axis=1)
                of_border = tl.exp(own_sums.to(tl.float32))
                is_before = (places < block * BLOCK)[None, :]
                between = tl.exp(tl.where(is_before, own_sums[:, None] - sums[None, :], 0.0).to(tl.float32))
                added = added_rows(
                    values_ring, added_ptr + head * VALUE_DIM, border + places, start, first,
                    tl.minimum(end, border + block * BLOCK), border + block * BLOCK, VALUE_HEADS * VALUE_DIM, RING,
                    columns, is_column,
                )  # fmt: skip
                # Negated, so that products are added to what is missing by the same instruction.
                of_keys = tl.where(is_before, -(betas[:, None] * between * product(own_keys, tl.trans(keys))), 0.0)
                of_queries = tl.where(is_before, between * product(queries, tl.trans(keys)), 0.0)
                missing = betas[:, None] * (values - of_border[:, None] * read_state(own_keys, state, IS_HALF))
                missing = add_product(of_keys.to(own_keys.dtype), added, missing)
                known = known_misses(
                    misses_ring, positions, first, VALUE_HEADS * VALUE_DIM, MISSES_RING, columns, is_column
                )
                missing = tl.where(is_new[:, None], missing, known)
                is_behind = steps[:, None] > steps[None, :]
                is_there = steps[:, None] >= steps[None, :]
                within = tl.exp(tl.where(is_there, own_sums[:, None] - tl.trans(own_sums[:, None]), 0.0).to(tl.float32))
                of_own_keys = betas[:, None] * within * product(own_keys, tl.trans(own_keys))
                of_missing = inverse(tl.where(is_behind, of_own_keys, 0.0))
                if IS_HALF:
                    large = of_missing.to(own_keys.dtype)
                    small = (of_missing - large.to(tl.float32)).to(own_keys.dtype)
                    own_added = solved(large, small, missing)
                else:
                    own_added = product(of_missing, missing)
                found = of_border[:, None] * read_state(queries, state, IS_HALF)
                found = add_product(of_queries.to(own_keys.dtype), added, found)
                of_own = tl.where(is_there, within * product(queries, tl.trans(own_keys)), 0.0)
                found = add_product(of_own.to(own_keys.dtype), own_added, found)
                tl.store(added_ptr + of_values, own_added, mask=is_value)
                of_out = tokens[:, None] * stride_out + head * VALUE_DIM + columns[None, :]
                tl.store(out_ptr + of_out, (found * scale).to(out_ptr.dtype.element_ty), mask=is_value)
                keep_new(
                    own_added, missing, positions, is_new, is_column, columns, fold_to, kept_from, start, stop, first,
                    target, num_writes, write_tokens_ptr, write_slots_ptr, values_ring_ptr, misses_ring_ptr,
                    stride_values_ring, stride_misses_ring, head, VALUE_HEADS, VALUE_DIM, RING, MISSES_RING, CHUNK,
                    BLOCK,
                )  # fmt: skip
                tl.debug_barrier()
            if end >= border + CHUNK:
                total = tl.sum(tl.where(places == CHUNK - 1, sums, 0.0), axis=0)
                left = tl.exp((total - sums).to(tl.float32))
                added = added_rows(
                    values_ring, added_ptr + head * VALUE_DIM, border + places, start, first, end, border + CHUNK,
                    VALUE_HEADS * VALUE_DIM, RING, columns, is_column,
                )  # fmt: skip
                turned = (added.to(tl.float32) * left[:, None]).to(keys.dtype)
                state = add_product(tl.trans(keys), turned, tl.exp(total.to(tl.float32)) * state)
                state = state.to(states_ptr.dtype.element_ty).to(tl.float32)
                store_state(
                    state, border + CHUNK, fold_to, True, start, stop, first, target, num_writes, write_tokens_ptr,
                    write_slots_ptr, states_ptr, stride_states, of_state, is_state, CHUNK,
                )  # fmt: skip
                if (border + CHUNK == end) & (end < last):  # the scan begins here
                    kept = state.to(states_ptr.dtype.element_ty)
                    tl.store(states_ptr + target * stride_states + of_state, kept, mask=is_state)
