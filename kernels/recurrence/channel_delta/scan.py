"""The delta rule of channels itself in Triton: blocks of 16 tokens, one kernel and one tile for all phases.

So a token is the same sum, by the same instructions, in a prompt, in a part of one and alone. A block reads the state
before it in products; then its tokens are added in their order, element by element in fp32; the state behind it is one
product. Decays between two tokens of a block are exponentials of exact differences, which are 0 at most: none
overflows, however large the gates are. Numbers that products take are the sums of two of 16 bits where tokens have 16.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
# The signatures of jitted functions are Triton's: only their constexpr parameters are annotated.

import triton
import triton.language as tl

from kernels.recurrence.forms.slots import begun_state, keep_added
from kernels.recurrence.portable.pieces import add_product, exact_logs, key_rows, product, store_state


@triton.jit
def parts_of(x, dtype: tl.constexpr):
    """x fp32 as two numbers of 16 bits, the larger one first."""
    large = x.to(dtype)
    return large, (x - large.to(tl.float32)).to(dtype)


@triton.jit
def product_of_parts(left, right_large, right_small, right, dtype: tl.constexpr, IS_HALF: tl.constexpr):
    """left @ right in fp32, both as two numbers of 16 bits where tokens have 16; without the product of small ones."""
    if IS_HALF:
        large, small = parts_of(left, dtype)
        found = add_product(large, right_small, product(small, right_large))
        found = add_product(large, right_large, found)
    else:
        found = product(left, right)
    return found


@triton.jit(do_not_specialize=["num_writes"])
def hallmark_recurrence_channels_scan(
    queries_ptr, keys_ptr, values_ptr, decays_ptr, betas_ptr, scale, out_ptr, starts_ptr, stops_ptr, firsts_ptr,
    folded_ptr, sources_ptr, targets_ptr, write_tokens_ptr, write_slots_ptr, states_ptr, keys_ring_ptr, values_ring_ptr,
    decays_ring_ptr, num_writes, stride_out, stride_states, stride_keys_ring, stride_values_ring, stride_decays_ring,
    KEY_HEADS: tl.constexpr, VALUE_HEADS: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    RING: tl.constexpr, FOLDS_ALL: tl.constexpr, IS_HALF: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
    BLOCK: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """One program: BLOCK_V columns of one value head of one row.

    FOLDS_ALL  whether the state is folded up to the row's last border; else up to the border before its first token
    """
    row, head = tl.program_id(0), tl.program_id(1)
    start, stop = tl.load(starts_ptr + row), tl.load(stops_ptr + row)
    first, begin = tl.load(firsts_ptr + row), tl.load(folded_ptr + row)
    source, target = tl.load(sources_ptr + row), tl.load(targets_ptr + row)
    wide_start = start.to(tl.int64)  # tokens times numbers of all heads may pass 32 bits
    last = first + stop - start
    if stop > start:
        key_head = head // (VALUE_HEADS // KEY_HEADS)
        fold_to = first // CHUNK * CHUNK
        if FOLDS_ALL:
            fold_to = last // CHUNK * CHUNK
        dims, steps = tl.arange(0, BLOCK_K), tl.arange(0, BLOCK)
        columns = tl.program_id(2) * BLOCK_V + tl.arange(0, BLOCK_V)
        is_column = columns < VALUE_DIM
        is_state = (dims < KEY_DIM)[:, None] & is_column[None, :]
        of_state = head * KEY_DIM * VALUE_DIM + dims[:, None] * VALUE_DIM + columns[None, :]
        state = begun_state(
            begin, first, fold_to, start, stop, source, target, num_writes, write_tokens_ptr, write_slots_ptr,
            states_ptr, keys_ring_ptr, values_ring_ptr, decays_ring_ptr, stride_states, stride_keys_ring,
            stride_values_ring, stride_decays_ring, of_state, is_state, columns, is_column, KEY_HEADS, VALUE_HEADS,
            KEY_DIM, VALUE_DIM, KEY_DIM, RING, CHUNK, BLOCK_K,
        )  # fmt: skip
        keys_ring = keys_ring_ptr + source * stride_keys_ring + key_head * KEY_DIM
        values_ring = values_ring_ptr + source * stride_values_ring + head * VALUE_DIM
        decays_ring = decays_ring_ptr + source * stride_decays_ring + head * KEY_DIM
        for border in range(begin, last, BLOCK):
            positions = border + steps
            is_known, is_new = positions < first, (positions >= first) & (positions < last)
            tokens = (start + positions - first).to(tl.int64)
            keys = key_rows(
                keys_ring, keys_ptr + key_head * KEY_DIM, positions, wide_start, first, last, KEY_HEADS * KEY_DIM, RING,
                KEY_DIM, BLOCK_K,
            )  # fmt: skip
            decays = key_rows(
                decays_ring, decays_ptr + head * KEY_DIM, positions, wide_start, first, last, VALUE_HEADS * KEY_DIM,
                RING, KEY_DIM, BLOCK_K,
            )  # fmt: skip
            dtype: tl.constexpr = keys_ptr.dtype.element_ty
            wide_keys = keys.to(tl.float32)
            sums = tl.cumsum(exact_logs(decays), 0)  # [BLOCK, BLOCK_K] fp64: from the block's first token on
            of_ring = (positions % RING)[:, None] * (VALUE_HEADS * VALUE_DIM) + columns[None, :]
            known = tl.load(values_ring + of_ring, mask=is_known[:, None] & is_column[None, :], other=0.0)
            added = known
            if border + BLOCK > first:
                of_new = is_new[:, None] & is_column[None, :]
                of_values = (tokens * VALUE_HEADS + head)[:, None] * VALUE_DIM + columns[None, :]
                values = tl.load(values_ptr + of_values, mask=of_new, other=0.0).to(tl.float32)
                betas = tl.load(betas_ptr + tokens * VALUE_HEADS + head, mask=is_new, other=0.0)
                queries = tl.load(
                    queries_ptr + (tokens * KEY_HEADS + key_head)[:, None] * KEY_DIM + dims[None, :],
                    mask=is_new[:, None] & (dims < KEY_DIM)[None, :], other=0.0,
                ).to(tl.float32)  # fmt: skip
                until = tl.exp(sums.to(tl.float32))
                large, small = parts_of(state, dtype)
                read = product_of_parts(wide_keys * until, large, small, state, dtype, IS_HALF)
                missing = betas[:, None] * (values - read)
                found = product_of_parts(queries * until, large, small, state, dtype, IS_HALF)
                # Tokens of the block in their order: what each adds is rounded, and those behind it read that.
                for step in range(0, tl.minimum(last - border, BLOCK)):
                    is_step = (steps == step)[:, None]
                    own = tl.sum(tl.where(is_step, added.to(tl.float32), 0.0), axis=0)
                    if border + step >= first:
                        own = tl.sum(tl.where(is_step, missing, 0.0), axis=0).to(dtype).to(tl.float32)
                        added = tl.where(is_step, own[None, :], added.to(tl.float32)).to(dtype)
                    key = tl.sum(tl.where(is_step, wide_keys, 0.0), axis=0)
                    own_sums = tl.sum(tl.where(is_step, sums, 0.0), axis=0)
                    is_behind = (steps > step)[:, None]
                    between = tl.where((steps >= step)[:, None], sums - own_sums[None, :], 0.0).to(tl.float32)
                    between = tl.exp(between) * key[None, :]
                    by_keys = betas * tl.sum(wide_keys * between, axis=1)
                    by_queries = tl.sum(queries * between, axis=1)
                    missing -= tl.where(is_behind, by_keys[:, None] * own[None, :], 0.0)
                    found += tl.where((steps >= step)[:, None], by_queries[:, None] * own[None, :], 0.0)
                keep_added(
                    added, positions, is_new, is_column, columns, fold_to, start, stop, first, target, num_writes,
                    write_tokens_ptr, write_slots_ptr, values_ring_ptr, stride_values_ring, head, VALUE_HEADS,
                    VALUE_DIM, RING, CHUNK,
                )  # fmt: skip
                of_out = tokens[:, None] * stride_out + head * VALUE_DIM + columns[None, :]
                tl.store(out_ptr + of_out, (found * scale).to(out_ptr.dtype.element_ty), mask=of_new)
            if last >= border + BLOCK:
                is_end = (steps == BLOCK - 1)[:, None]
                total = tl.sum(tl.where(is_end, sums, 0.0), axis=0)
                turned = wide_keys * tl.exp((total[None, :] - sums).to(tl.float32))
                # Columns first: 32 rows are too few for wgmma, by which a state space's scan once read wrong memory.
                by_column = tl.trans(added)
                if IS_HALF:
                    most, least = parts_of(turned, dtype)
                    update = add_product(by_column, most, product(by_column, least))
                else:
                    update = product(by_column, turned)
                state = tl.exp(total.to(tl.float32))[:, None] * state + tl.trans(update)
                if (border + BLOCK) % CHUNK == 0:
                    state = state.to(states_ptr.dtype.element_ty).to(tl.float32)
                    store_state(
                        state, border + BLOCK, fold_to, True, start, stop, first, target, num_writes, write_tokens_ptr,
                        write_slots_ptr, states_ptr, stride_states, of_state, is_state, CHUNK,
                    )  # fmt: skip
