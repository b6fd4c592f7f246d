"""The delta rule of channels itself in Triton: blocks of 16 tokens, one kernel and one tile for all phases.

So a token is the same sum, by the same instructions, in a prompt, in a part of one and alone. A block reads the state
before it in products; then its tokens are added in their order; what they give to one another and the state behind them
are products again. Numbers that products take are the sums of two of 16 bits where tokens have 16.

All is transposed: value columns are rows of the matrix units, tokens their columns. So the state, and what tokens add,
are left factors that stay in registers.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
# The signatures of jitted functions are Triton's: only their constexpr parameters are annotated.

import triton
import triton.language as tl

from kernels.recurrence.channel_delta.factors import num_blocks, parts_of
from kernels.recurrence.forms.slots import begun_state, keep_added
from kernels.recurrence.portable.pieces import add_product, product, store_state


@triton.jit(do_not_specialize=["num_rows", "num_writes"])
def hallmark_recurrence_channels_scan(
    values_ptr, betas_ptr, read_ptr, turned_ptr, near_ptr, of_queries_ptr, totals_ptr, scale, out_ptr, starts_ptr,
    stops_ptr, firsts_ptr, folded_ptr, sources_ptr, targets_ptr, write_tokens_ptr, write_slots_ptr, states_ptr,
    keys_ring_ptr, values_ring_ptr, decays_ring_ptr, num_rows, num_writes, stride_out, stride_states, stride_keys_ring,
    stride_values_ring, stride_decays_ring, KEY_HEADS: tl.constexpr, VALUE_HEADS: tl.constexpr, KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr, RING: tl.constexpr, FOLDS_ALL: tl.constexpr, IS_HALF: tl.constexpr, BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK: tl.constexpr, CHUNK: tl.constexpr, STAGES: tl.constexpr,
    IS_LONG: tl.constexpr,
):  # fmt: skip
    """One program: BLOCK_V columns of one value head of one row.

    FOLDS_ALL  whether the state is folded up to the row's last border; else up to the border before its first token
    IS_LONG    whether rows may have chunks of new tokens alone
    """
    row, head = tl.program_id(0), tl.program_id(1)
    start, stop = tl.load(starts_ptr + row), tl.load(stops_ptr + row)
    first, begin = tl.load(firsts_ptr + row), tl.load(folded_ptr + row)
    source, target = tl.load(sources_ptr + row), tl.load(targets_ptr + row)
    last = first + stop - start
    if stop > start:
        before = 0
        for other in range(0, row, BLOCK_R):
            rows = other + tl.arange(0, BLOCK_R)
            counts = num_blocks(starts_ptr, stops_ptr, firsts_ptr, folded_ptr, rows, num_rows, BLOCK)
            before += tl.sum(tl.where(rows < row, counts, 0), axis=0)
        fold_to = first // CHUNK * CHUNK
        if FOLDS_ALL:
            fold_to = last // CHUNK * CHUNK
        dims, steps = tl.arange(0, BLOCK_K), tl.arange(0, BLOCK)
        columns = tl.program_id(2) * BLOCK_V + tl.arange(0, BLOCK_V)
        is_column = columns < VALUE_DIM
        is_state = is_column[:, None] & (dims < KEY_DIM)[None, :]
        of_state = head * KEY_DIM * VALUE_DIM + dims[None, :] * VALUE_DIM + columns[:, None]
        state = begun_state(
            begin, first, fold_to, start, stop, source, target, num_writes, write_tokens_ptr, write_slots_ptr,
            states_ptr, keys_ring_ptr, values_ring_ptr, decays_ring_ptr, stride_states, stride_keys_ring,
            stride_values_ring, stride_decays_ring, of_state, is_state, columns, is_column, KEY_HEADS, VALUE_HEADS,
            KEY_DIM, VALUE_DIM, KEY_DIM, RING, CHUNK, BLOCK_K,
        )  # fmt: skip
        values_ring = values_ring_ptr + source * stride_values_ring + head * VALUE_DIM
        num_chunks = tl.cdiv(last - begin, CHUNK)
        chunk = 0
        while chunk < num_chunks:
            # The next chunk that has known tokens, or of which a slot keeps more than the state behind it.
            kept = chunk
            if IS_LONG & (begin + chunk * CHUNK >= first):
                kept = num_chunks
                if fold_to < last:
                    kept = num_chunks - 1
                for write in range(0, num_writes):
                    token = tl.load(write_tokens_ptr + write).to(tl.int32)
                    its = (first + token + 1 - start - begin) // CHUNK
                    if (token >= start) & (token < stop) & (its >= chunk) & (its < kept):
                        kept = its
            for block in tl.range(chunk * (CHUNK // BLOCK), kept * (CHUNK // BLOCK), num_stages=STAGES):
                state, _ = _step(
                    state, begin + block * BLOCK, ((before + block) * VALUE_HEADS + head).to(tl.int64), start, first,
                    last, values_ring, values_ptr, betas_ptr, read_ptr, turned_ptr, near_ptr, of_queries_ptr,
                    totals_ptr, out_ptr, stride_out, scale, head, columns, VALUE_HEADS, VALUE_DIM, RING, IS_HALF,
                    BLOCK_K, BLOCK, True,
                )  # fmt: skip
                if (block + 1) % (CHUNK // BLOCK) == 0:
                    state = state.to(states_ptr.dtype.element_ty).to(tl.float32)
            if kept < num_chunks:
                border = begin + kept * CHUNK
                if kept > 0:
                    store_state(
                        state, border, fold_to, True, start, stop, first, target, num_writes, write_tokens_ptr,
                        write_slots_ptr, states_ptr, stride_states, of_state, is_state, CHUNK,
                    )  # fmt: skip
                for block in range(0, tl.cdiv(tl.minimum(last - border, CHUNK), BLOCK)):
                    position = border + block * BLOCK
                    unit = ((before + kept * (CHUNK // BLOCK) + block) * VALUE_HEADS + head).to(tl.int64)
                    state, added = _step(
                        state, position, unit, start, first, last, values_ring, values_ptr, betas_ptr, read_ptr,
                        turned_ptr, near_ptr, of_queries_ptr, totals_ptr, out_ptr, stride_out, scale, head, columns,
                        VALUE_HEADS, VALUE_DIM, RING, IS_HALF, BLOCK_K, BLOCK, False,
                    )  # fmt: skip
                    positions = position + steps
                    keep_added(
                        tl.trans(added), positions, (positions >= first) & (positions < last), is_column, columns,
                        fold_to, start, stop, first, target, num_writes, write_tokens_ptr, write_slots_ptr,
                        values_ring_ptr, stride_values_ring, head, VALUE_HEADS, VALUE_DIM, RING, CHUNK,
                    )  # fmt: skip
                state = state.to(states_ptr.dtype.element_ty).to(tl.float32)
            chunk = kept + 1
        if fold_to == last:
            store_state(
                state, last, fold_to, True, start, stop, first, target, num_writes, write_tokens_ptr, write_slots_ptr,
                states_ptr, stride_states, of_state, is_state, CHUNK,
            )  # fmt: skip


@triton.jit
def _step(
    state, border, unit, start, first, last, values_ring, values_ptr, betas_ptr, read_ptr, turned_ptr, near_ptr,
    of_queries_ptr, totals_ptr, out_ptr, stride_out, scale, head, columns, VALUE_HEADS: tl.constexpr,
    VALUE_DIM: tl.constexpr, RING: tl.constexpr, IS_HALF: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK: tl.constexpr,
    IS_FULL: tl.constexpr,
):  # fmt: skip
    """(state behind a block, or before it if it is not full; what its tokens add [BLOCK_V, BLOCK]), results written.

    state    [BLOCK_V, BLOCK_K] fp32
    IS_FULL  whether every place of the block is a new token
    """
    steps, dims = tl.arange(0, BLOCK), tl.arange(0, BLOCK_K)
    SIZE: tl.constexpr = BLOCK * BLOCK_K
    PARTS: tl.constexpr = 2 if IS_HALF else 1
    if IS_FULL:
        added = _added(
            state, border, unit, start, first, last, values_ring, values_ptr, betas_ptr, read_ptr, near_ptr,
            of_queries_ptr, out_ptr, stride_out, scale, head, columns, VALUE_HEADS, VALUE_DIM, RING, IS_HALF, BLOCK_K,
            BLOCK, True,
        )  # fmt: skip
    elif border + BLOCK > first:
        added = _added(
            state, border, unit, start, first, last, values_ring, values_ptr, betas_ptr, read_ptr, near_ptr,
            of_queries_ptr, out_ptr, stride_out, scale, head, columns, VALUE_HEADS, VALUE_DIM, RING, IS_HALF, BLOCK_K,
            BLOCK, False,
        )  # fmt: skip
    else:
        added = _known(values_ring, border, first, columns, VALUE_HEADS, VALUE_DIM, RING, BLOCK)
    if IS_FULL | (last >= border + BLOCK):
        totals = tl.load(totals_ptr + unit * BLOCK_K + dims)
        of_tile = turned_ptr + unit * PARTS * SIZE + steps[:, None] * BLOCK_K + dims[None, :]
        state = totals[None, :] * state
        if IS_HALF:
            state = add_product(added, tl.load(of_tile + SIZE), state)
        state = add_product(added, tl.load(of_tile), state)
    return state, added


@triton.jit
def _known(
    values_ring, border, first, columns, VALUE_HEADS: tl.constexpr, VALUE_DIM: tl.constexpr, RING: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """[BLOCK_V, BLOCK]: what the known tokens of a block have added."""
    positions = border + tl.arange(0, BLOCK)
    of_ring = (positions % RING)[None, :] * (VALUE_HEADS * VALUE_DIM) + columns[:, None]
    is_known = (positions < first)[None, :] & (columns < VALUE_DIM)[:, None]
    return tl.load(values_ring + of_ring, mask=is_known, other=0.0)


@triton.jit
def _added(
    state, border, unit, start, first, last, values_ring, values_ptr, betas_ptr, read_ptr, near_ptr, of_queries_ptr,
    out_ptr, stride_out, scale, head, columns, VALUE_HEADS: tl.constexpr, VALUE_DIM: tl.constexpr, RING: tl.constexpr,
    IS_HALF: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK: tl.constexpr, IS_FULL: tl.constexpr,
):  # fmt: skip
    """[BLOCK_V, BLOCK]: what the tokens of a block add, known ones too; the results of new ones are written."""
    steps, dims = tl.arange(0, BLOCK), tl.arange(0, BLOCK_K)
    SIZE: tl.constexpr = BLOCK * BLOCK_K
    PARTS: tl.constexpr = 2 if IS_HALF else 1
    dtype: tl.constexpr = read_ptr.dtype.element_ty
    positions = border + steps
    tokens = start.to(tl.int64) + positions - first  # tokens times numbers of all heads may pass 32 bits
    is_new = (positions >= first) & (positions < last)
    of_values = (tokens * VALUE_HEADS + head)[None, :] * VALUE_DIM + columns[:, None]
    of_betas = tokens * VALUE_HEADS + head
    is_value = (columns < VALUE_DIM)[:, None] & (steps >= 0)[None, :]
    if IS_FULL:
        betas = tl.load(betas_ptr + of_betas)
    else:
        is_value = is_value & is_new[None, :]
        betas = tl.load(betas_ptr + of_betas, mask=is_new, other=0.0)
    values = tl.load(values_ptr + of_values, mask=is_value, other=0.0).to(tl.float32)
    of_keys = read_ptr + unit * 2 * PARTS * SIZE + steps[:, None] * BLOCK_K + dims[None, :]
    missing = betas[None, :] * (values - _read(state, of_keys, SIZE, IS_HALF))
    if not IS_FULL:
        known = _known(values_ring, border, first, columns, VALUE_HEADS, VALUE_DIM, RING, BLOCK)
        missing = tl.where((positions < first)[None, :], known.to(tl.float32), missing)
    # Tokens in their order: what each adds is rounded, and those behind it read that.
    for step in tl.static_range(BLOCK - 1):
        near = tl.load(near_ptr + unit * BLOCK * BLOCK + step * BLOCK + steps)
        own = tl.sum(tl.where((steps == step)[None, :], missing, 0.0), axis=1).to(dtype).to(tl.float32)
        missing -= tl.where((steps > step)[None, :], near[None, :] * own[:, None], 0.0)
    added = missing.to(dtype)
    given = of_queries_ptr + unit * PARTS * BLOCK * BLOCK + steps[:, None] * BLOCK + steps[None, :]
    found = _read(state, of_keys + PARTS * SIZE, SIZE, IS_HALF)
    if IS_HALF:
        found = add_product(added, tl.load(given + BLOCK * BLOCK), found)
    found = add_product(added, tl.load(given), found)
    of_out = tokens[None, :] * stride_out + head * VALUE_DIM + columns[:, None]
    tl.store(out_ptr + of_out, (found * scale).to(out_ptr.dtype.element_ty), mask=is_value)
    return added


@triton.jit
def _read(state, tile, SIZE: tl.constexpr, IS_HALF: tl.constexpr):
    """[BLOCK_V, BLOCK] fp32: the state's products with each row of a tile, both as two numbers of 16 bits or as one."""
    if IS_HALF:
        large_rows, small_rows = tl.trans(tl.load(tile)), tl.trans(tl.load(tile + SIZE))
        large, small = parts_of(state, large_rows.dtype)
        found = add_product(large, large_rows, add_product(large, small_rows, product(small, large_rows)))
    else:
        found = product(state, tl.trans(tl.load(tile)))
    return found
