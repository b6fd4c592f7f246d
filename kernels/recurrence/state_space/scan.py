"""The state space itself in Triton: chunks of 64 tokens, one kernel and one tile for all phases.

So a token is the same sum, by the same instructions, in a prompt, in a part of one and alone: it reads the state at the
border before its chunk, then the tokens of its chunk in one product. Tokens behind a row's last one are zeros.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
# The signatures of jitted functions are Triton's: only their constexpr parameters are annotated.

import triton
import triton.language as tl

from kernels.recurrence.forms.slots import begun_state, keep_added
from kernels.recurrence.portable.pieces import (
    add_product,
    exact_logs,
    key_rows,
    known_or_new,
    product,
    read_state,
    store_state,
)


@triton.jit(do_not_specialize=["num_writes"])
def hallmark_recurrence_space_scan(
    queries_ptr, keys_ptr, values_ptr, decays_ptr, steps_ptr, skip_ptr, out_ptr, starts_ptr, stops_ptr, firsts_ptr,
    folded_ptr, sources_ptr, targets_ptr, write_tokens_ptr, write_slots_ptr, states_ptr, keys_ring_ptr, values_ring_ptr,
    decays_ring_ptr, num_writes, stride_out, stride_states, stride_keys_ring, stride_values_ring, stride_decays_ring,
    KEY_HEADS: tl.constexpr, VALUE_HEADS: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    RING: tl.constexpr, FOLDS_ALL: tl.constexpr, IS_HALF: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
    CHUNK: tl.constexpr,
):  # fmt: skip
    """One program: BLOCK_V columns of one value head of one row.

    FOLDS_ALL  whether the state is folded up to the row's last border; else up to the border before its first token
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
        of_state = head * KEY_DIM * VALUE_DIM + dims[:, None] * VALUE_DIM + columns[None, :]
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
        for border in range(begin, last, CHUNK):
            positions = border + places
            is_known, is_new = positions < first, (positions >= first) & (positions < last)
            tokens = (start + positions - first).to(tl.int64)
            decays = known_or_new(decays_ring, decays_ptr + head, positions, start, first, last, VALUE_HEADS, RING)
            sums = tl.cumsum(exact_logs(decays), 0)  # [CHUNK] fp64: from the border on
            keys = key_rows(
                keys_ring, keys_ptr + key_head * KEY_DIM, positions, start, first, last, KEY_HEADS * KEY_DIM, RING,
                KEY_DIM, BLOCK_K,
            )  # fmt: skip
            of_new = is_new[:, None] & is_column[None, :]
            of_values = (tokens * VALUE_HEADS + head)[:, None] * VALUE_DIM + columns[None, :]
            values = tl.load(values_ptr + of_values, mask=of_new, other=0.0).to(tl.float32)
            steps = tl.load(steps_ptr + tokens * VALUE_HEADS + head, mask=is_new, other=0.0)
            of_ring = (positions % RING)[:, None] * (VALUE_HEADS * VALUE_DIM) + columns[None, :]
            known = tl.load(values_ring + of_ring, mask=is_known[:, None] & is_column[None, :], other=0.0)
            added = tl.where(is_known[:, None], known, (values * steps[:, None]).to(known.dtype))
            keep_added(
                added, positions, is_new, is_column, columns, fold_to, start, stop, first, target, num_writes,
                write_tokens_ptr, write_slots_ptr, values_ring_ptr, stride_values_ring, head, VALUE_HEADS, VALUE_DIM,
                RING, CHUNK,
            )  # fmt: skip
            if border + CHUNK > first:
                queries = tl.load(
                    queries_ptr + (tokens * KEY_HEADS + key_head)[:, None] * KEY_DIM + dims[None, :],
                    mask=is_new[:, None] & (dims < KEY_DIM)[None, :], other=0.0,
                )  # fmt: skip
                found = tl.exp(sums.to(tl.float32))[:, None] * read_state(queries, state, IS_HALF)
                is_there = places[:, None] >= places[None, :]
                between = tl.exp(tl.where(is_there, sums[:, None] - sums[None, :], 0.0).to(tl.float32))
                factors = tl.where(is_there, between * product(queries, tl.trans(keys)), 0.0)
                found = add_product(factors.to(keys.dtype), added, found) + skip * values
                of_out = tokens[:, None] * stride_out + head * VALUE_DIM + columns[None, :]
                tl.store(out_ptr + of_out, found.to(out_ptr.dtype.element_ty), mask=of_new)
            if last >= border + CHUNK:
                total = tl.sum(tl.where(places == CHUNK - 1, sums, 0.0), axis=0)
                left = tl.exp((total - sums).to(tl.float32))
                turned = (added.to(tl.float32) * left[:, None]).to(keys.dtype)
                state = add_product(tl.trans(keys), turned, tl.exp(total.to(tl.float32)) * state)
                state = state.to(states_ptr.dtype.element_ty).to(tl.float32)
                store_state(
                    state, border + CHUNK, fold_to, True, start, stop, first, target, num_writes, write_tokens_ptr,
                    write_slots_ptr, states_ptr, stride_states, of_state, is_state, CHUNK,
                )  # fmt: skip
