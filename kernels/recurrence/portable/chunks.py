"""The rule itself, in Triton: chunks of 64 tokens in blocks of 16, in the order "chunk64.triton"."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
# The signatures of jitted functions are Triton's: only their constexpr parameters are annotated.

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["num_writes"])
def hallmark_recurrence_chunks(
    queries_ptr, keys_ptr, values_ptr, decays_ptr, betas_ptr, added_ptr, out_ptr, starts_ptr, stops_ptr, firsts_ptr,
    folded_ptr, sources_ptr, targets_ptr, write_tokens_ptr, write_slots_ptr, states_ptr, keys_ring_ptr,
    values_ring_ptr, decays_ring_ptr, num_writes, stride_out, stride_states, stride_keys_ring, stride_values_ring,
    stride_decays_ring, scale, KEY_HEADS: tl.constexpr, VALUE_HEADS: tl.constexpr, KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr, RING: tl.constexpr, FOLDS_ALL: tl.constexpr, IS_HALF: tl.constexpr, BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr, BLOCK: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """One program: BLOCK_V columns of one value head of one row.

    FOLDS_ALL  whether the state is folded up to the row's last border; else up to the border before its first token
    What each token adds is written to `added` and read again by this program, behind a barrier.
    """
    row = tl.program_id(0)
    head = tl.program_id(1)
    start, stop = tl.load(starts_ptr + row), tl.load(stops_ptr + row)
    if stop > start:
        first, begin = tl.load(firsts_ptr + row), tl.load(folded_ptr + row)
        source, target = tl.load(sources_ptr + row), tl.load(targets_ptr + row)
        last = first + stop - start
        key_head = head // (VALUE_HEADS // KEY_HEADS)
        fold_to = first // CHUNK * CHUNK
        if FOLDS_ALL:
            fold_to = last // CHUNK * CHUNK
        dims = tl.arange(0, BLOCK_K)
        columns = tl.program_id(2) * BLOCK_V + tl.arange(0, BLOCK_V)
        is_column = columns < VALUE_DIM
        is_state = (dims < KEY_DIM)[:, None] & is_column[None, :]
        of_state = head * KEY_DIM * VALUE_DIM + dims[:, None] * VALUE_DIM + columns[None, :]
        state = tl.load(states_ptr + source * stride_states + of_state, mask=is_state & (first > 0), other=0.0).to(
            tl.float32
        )
        _store_state(
            state, begin, fold_to, (target != source) | (first == 0), start, stop, first, target, num_writes,
            write_tokens_ptr, write_slots_ptr, states_ptr, stride_states, of_state, is_state, CHUNK,
        )  # fmt: skip
        _copy_kept(
            begin, first, fold_to, start, stop, source, target, num_writes, write_tokens_ptr, write_slots_ptr,
            keys_ring_ptr, values_ring_ptr, decays_ring_ptr, stride_keys_ring, stride_values_ring, stride_decays_ring,
            head, key_head, columns, is_column, KEY_HEADS, VALUE_HEADS, KEY_DIM, VALUE_DIM, RING, CHUNK, BLOCK_K,
        )  # fmt: skip
        keys_ring = keys_ring_ptr + source * stride_keys_ring + key_head * KEY_DIM
        values_ring = values_ring_ptr + source * stride_values_ring + head * VALUE_DIM
        decays_ring = decays_ring_ptr + source * stride_decays_ring + head
        for border in range(begin, last, CHUNK):
            chunk_places = tl.arange(0, CHUNK)
            decays = _known_or_new(
                decays_ring, decays_ptr + head, border + chunk_places, start, first, last, VALUE_HEADS, RING
            )
            first_block = tl.maximum(first - border, 0) // BLOCK
            end_block = tl.cdiv(tl.minimum(last - border, CHUNK), BLOCK)
            for block in range(first_block, end_block):
                places = block * BLOCK + tl.arange(0, BLOCK)
                positions = border + places
                is_new = (positions >= first) & (positions < last)
                tokens = start + positions - first
                keys = _key_rows(
                    keys_ring, keys_ptr + key_head * KEY_DIM, positions, start, first, last, KEY_HEADS * KEY_DIM, RING,
                    KEY_DIM, BLOCK_K,
                )  # fmt: skip
                queries = tl.load(
                    queries_ptr + (tokens * KEY_HEADS + key_head)[:, None] * KEY_DIM + dims[None, :],
                    mask=is_new[:, None] & (dims < KEY_DIM)[None, :], other=0.0,
                )  # fmt: skip
                of_values = (tokens * VALUE_HEADS + head)[:, None] * VALUE_DIM + columns[None, :]
                is_value = is_new[:, None] & is_column[None, :]
                values = tl.load(values_ptr + of_values, mask=is_value, other=0.0).to(tl.float32)
                betas = tl.load(betas_ptr + tokens * VALUE_HEADS + head, mask=is_new, other=0.0)
                # Logarithms of decays: sums between two tokens, each of terms of one sign. A difference of two sums
                # from the border would cancel behind a token that forgets all.
                within = tl.where(
                    (chunk_places[None, :] >= block * BLOCK) & (chunk_places[None, :] <= places[:, None]),
                    decays[None, :], 0.0,
                )  # fmt: skip
                own = tl.sum(within, axis=1)  # [BLOCK]: from the block's first token on
                earlier = tl.sum(tl.where(chunk_places < block * BLOCK, decays, 0.0), axis=0)
                of_border = tl.exp(earlier + own)[:, None]
                missing = betas[:, None] * (values - of_border * _read(keys, state, IS_HALF))
                found = of_border * _read(queries, state, IS_HALF)
                for other in range(0, block):
                    others = other * BLOCK + tl.arange(0, BLOCK)
                    rest = tl.sum(
                        tl.where(
                            (chunk_places[None, :] > others[:, None]) & (chunk_places[None, :] < block * BLOCK),
                            decays[None, :], 0.0,
                        ), axis=1,
                    )  # fmt: skip
                    decay = tl.exp(rest[None, :] + own[:, None])
                    their_keys = _key_rows(
                        keys_ring, keys_ptr + key_head * KEY_DIM, border + others, start, first, last,
                        KEY_HEADS * KEY_DIM, RING, KEY_DIM, BLOCK_K,
                    )  # fmt: skip
                    their = _added_rows(
                        values_ring, added_ptr + head * VALUE_DIM, border + others, start, first, last,
                        VALUE_HEADS * VALUE_DIM, RING, columns, is_column,
                    )  # fmt: skip
                    of_keys = betas[:, None] * decay * _product(keys, tl.trans(their_keys))
                    missing -= _product(of_keys.to(keys.dtype), their)
                    found += _product((decay * _product(queries, tl.trans(their_keys))).to(keys.dtype), their)
                decay_between = _between(decays, block, BLOCK, CHUNK)
                added = _solved(
                    missing, betas, keys, decay_between, places, is_new, values_ring, added_ptr, border, start, first,
                    last, columns, is_column, VALUE_HEADS * VALUE_DIM, RING, BLOCK,
                )  # fmt: skip
                of_queries = (decay_between * _product(queries, tl.trans(keys))).to(keys.dtype)
                found += _product(of_queries, added.to(keys.dtype))
                tl.store(added_ptr + of_values, added.to(added_ptr.dtype.element_ty), mask=is_value)
                of_out = tokens[:, None] * stride_out + head * VALUE_DIM + columns[None, :]
                tl.store(out_ptr + of_out, (found * scale).to(out_ptr.dtype.element_ty), mask=is_value)
                _keep_values(
                    added, positions, is_new, is_column, columns, fold_to, start, stop, first, target, num_writes,
                    write_tokens_ptr, write_slots_ptr, values_ring_ptr, stride_values_ring, head, VALUE_HEADS,
                    VALUE_DIM, RING, CHUNK,
                )  # fmt: skip
                tl.debug_barrier()
            if last >= border + CHUNK:
                state = tl.exp(tl.sum(decays, axis=0)) * state
                for part in range(0, CHUNK // BLOCK):
                    folded_places = part * BLOCK + tl.arange(0, BLOCK)
                    folded_keys = _key_rows(
                        keys_ring, keys_ptr + key_head * KEY_DIM, border + folded_places, start, first, last,
                        KEY_HEADS * KEY_DIM, RING, KEY_DIM, BLOCK_K,
                    )  # fmt: skip
                    folded_added = _added_rows(
                        values_ring, added_ptr + head * VALUE_DIM, border + folded_places, start, first, last,
                        VALUE_HEADS * VALUE_DIM, RING, columns, is_column,
                    )  # fmt: skip
                    left = tl.sum(
                        tl.where(chunk_places[None, :] > folded_places[:, None], decays[None, :], 0.0), axis=1
                    )
                    turned = (folded_keys.to(tl.float32) * tl.exp(left)[:, None]).to(folded_keys.dtype)
                    state += _product(tl.trans(turned), folded_added)
                state = state.to(states_ptr.dtype.element_ty).to(tl.float32)
                _store_state(
                    state, border + CHUNK, fold_to, True, start, stop, first, target, num_writes, write_tokens_ptr,
                    write_slots_ptr, states_ptr, stride_states, of_state, is_state, CHUNK,
                )  # fmt: skip


@triton.jit
def _product(left, right):
    """left @ right in fp32; numbers of 32 bits as they are."""
    return tl.dot(left, right, input_precision="ieee")


@triton.jit
def _read(rows, state, IS_HALF: tl.constexpr):
    """rows @ state, the state as a sum of two numbers of 16 bits where rows have 16."""
    if IS_HALF:
        large = state.to(rows.dtype)
        small = (state - large.to(tl.float32)).to(rows.dtype)
        found = _product(rows, large) + _product(rows, small)
    else:
        found = _product(rows, state)
    return found


@triton.jit
def _between(decays, block, BLOCK: tl.constexpr, CHUNK: tl.constexpr):
    """[BLOCK, BLOCK]: decays until each token of a block of what another one before it, or itself, added; else 0."""
    chunk_places = tl.arange(0, CHUNK)
    own = block * BLOCK + tl.arange(0, BLOCK)
    of_block = tl.sum(tl.where(chunk_places[None, :] == own[:, None], decays[None, :], 0.0), axis=1)  # [BLOCK]
    steps = tl.arange(0, BLOCK)
    is_between = (steps[None, None, :] > steps[None, :, None]) & (steps[None, None, :] <= steps[:, None, None])
    sums = tl.sum(tl.where(is_between, of_block[None, None, :], 0.0), axis=2)
    return tl.where(steps[:, None] >= steps[None, :], tl.exp(sums), 0.0)


@triton.jit
def _solved(
    missing, betas, keys, between, places, is_new, values_ring, added_ptr, border, start, first, last, columns,
    is_column, stride_token, RING: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Return what each token of a block adds, rounded: [BLOCK, BLOCK_V] fp32. Each reads those before it, in order."""
    steps = tl.arange(0, BLOCK)
    known = _added_rows(
        values_ring, added_ptr, border + places, start, first, tl.minimum(first, last), stride_token, RING, columns,
        is_column,
    )  # fmt: skip
    added = tl.where(is_new[:, None], missing, known.to(tl.float32))
    of_keys = betas[:, None] * between * _product(keys, tl.trans(keys))
    for step in range(0, BLOCK):
        one = tl.sum(tl.where(steps[:, None] == step, added, 0.0), axis=0)
        one = one.to(keys.dtype).to(tl.float32)
        factors = tl.sum(tl.where(steps[None, :] == step, of_keys, 0.0), axis=1)
        is_behind = (steps > step) & is_new
        added = tl.where(is_behind[:, None], added - factors[:, None] * one[None, :], added)
    return added.to(keys.dtype).to(tl.float32)


@triton.jit
def _known_or_new(ring_ptr, new_ptr, positions, start, first, last, STRIDE: tl.constexpr, RING: tl.constexpr):
    """A number of each token: of its place in the ring before the row's first, of the call from there on; else 0."""
    known = tl.load(ring_ptr + (positions % RING) * STRIDE, mask=positions < first, other=0.0)
    is_new = (positions >= first) & (positions < last)
    new = tl.load(new_ptr + start + positions - first * STRIDE, mask=is_new, other=0.0)
    return tl.where(positions < first, known, new)


@triton.jit
def _key_rows(
    ring_ptr, new_ptr, positions, start, first, last, STRIDE: tl.constexpr, RING: tl.constexpr, KEY_DIM: tl.constexpr,
    BLOCK_K: tl.constexpr,
):  # fmt: skip
    """[n, BLOCK_K]: keys of the tokens at these positions; zero behind the row's last."""
    dims = tl.arange(0, BLOCK_K)
    is_dim = (dims < KEY_DIM)[None, :]
    is_known, is_new = positions < first, (positions >= first) & (positions < last)
    known = tl.load(
        ring_ptr + (positions % RING)[:, None] * STRIDE + dims[None, :], mask=is_known[:, None] & is_dim, other=0.0
    )
    tokens = start + positions - first
    new = tl.load(new_ptr + tokens[:, None] * STRIDE + dims[None, :], mask=is_new[:, None] & is_dim, other=0.0)
    return tl.where(is_known[:, None], known, new)


@triton.jit
def _added_rows(
    ring_ptr, new_ptr, positions, start, first, last, STRIDE: tl.constexpr, RING: tl.constexpr, columns, is_column
):  # fmt: skip
    """[n, BLOCK_V]: what the tokens at these positions have added; zero behind the row's last."""
    is_known, is_new = positions < first, (positions >= first) & (positions < last)
    known = tl.load(
        ring_ptr + (positions % RING)[:, None] * STRIDE + columns[None, :],
        mask=is_known[:, None] & is_column[None, :], other=0.0,
    )  # fmt: skip
    tokens = start + positions - first
    new = tl.load(
        new_ptr + tokens[:, None] * STRIDE + columns[None, :], mask=is_new[:, None] & is_column[None, :], other=0.0
    )
    return tl.where(is_known[:, None], known, new)


@triton.jit
def _store_state(
    state, border, fold_to, is_wanted, start, stop, first, target, num_writes, write_tokens_ptr, write_slots_ptr,
    states_ptr, stride_states, of_state, is_state, CHUNK: tl.constexpr,
):  # fmt: skip
    """Write the state at a border to the slots whose state is folded up to there."""
    kept = state.to(states_ptr.dtype.element_ty)
    if (border == fold_to) & is_wanted:
        tl.store(states_ptr + target * stride_states + of_state, kept, mask=is_state)
    for write in range(0, num_writes):
        token = tl.load(write_tokens_ptr + write).to(tl.int32)
        num_tokens = first + token + 1 - start
        if (token >= start) & (token < stop) & (num_tokens // CHUNK * CHUNK == border):
            slot = tl.load(write_slots_ptr + write)
            tl.store(states_ptr + slot * stride_states + of_state, kept, mask=is_state)


@triton.jit
def _keep_values(
    added, positions, is_new, is_column, columns, fold_to, start, stop, first, target, num_writes,
    write_tokens_ptr, write_slots_ptr, values_ring_ptr, stride_values_ring, head, VALUE_HEADS: tl.constexpr,
    VALUE_DIM: tl.constexpr, RING: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Write what new tokens add to the rings of the slots in which they are behind the border."""
    kept = added.to(values_ring_ptr.dtype.element_ty)
    of_ring = ((positions % RING) * VALUE_HEADS + head)[:, None] * VALUE_DIM + columns[None, :]
    is_own = is_new & (positions >= fold_to)
    to = values_ring_ptr + target * stride_values_ring + of_ring
    tl.store(to, kept, mask=is_own[:, None] & is_column[None, :])
    for write in range(0, num_writes):
        token = tl.load(write_tokens_ptr + write).to(tl.int32)
        num_tokens = first + token + 1 - start
        if (token >= start) & (token < stop):
            slot = tl.load(write_slots_ptr + write)
            is_written = is_new & (positions >= num_tokens // CHUNK * CHUNK) & (positions < num_tokens)
            to = values_ring_ptr + slot * stride_values_ring + of_ring
            tl.store(to, kept, mask=is_written[:, None] & is_column[None, :])


@triton.jit
def _copy_kept(
    begin, first, fold_to, start, stop, source, target, num_writes, write_tokens_ptr, write_slots_ptr,
    keys_ring_ptr, values_ring_ptr, decays_ring_ptr, stride_keys_ring, stride_values_ring, stride_decays_ring, head,
    key_head, columns, is_column, KEY_HEADS: tl.constexpr, VALUE_HEADS: tl.constexpr, KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr, RING: tl.constexpr, CHUNK: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Copy what the source slot has of the row's earlier tokens behind the border to the other slots that need it."""
    for write in range(-1, num_writes):
        slot, border, is_wanted = target, fold_to, target != source
        if write >= 0:
            token = tl.load(write_tokens_ptr + write).to(tl.int32)
            slot = tl.load(write_slots_ptr + write)
            border = (first + token + 1 - start) // CHUNK * CHUNK
            is_wanted = (token >= start) & (token < stop) & (slot != source)
        if is_wanted:
            dims = tl.arange(0, BLOCK_K)
            for position in range(tl.maximum(begin, border), first):
                place = position % RING
                at = (place * VALUE_HEADS + head) * VALUE_DIM + columns
                kept = tl.load(values_ring_ptr + source * stride_values_ring + at, mask=is_column)
                tl.store(values_ring_ptr + slot * stride_values_ring + at, kept, mask=is_column)
                if tl.program_id(2) == 0:
                    of_decay = place * VALUE_HEADS + head
                    decay = tl.load(decays_ring_ptr + source * stride_decays_ring + of_decay)
                    tl.store(decays_ring_ptr + slot * stride_decays_ring + of_decay, decay)
                    if head % (VALUE_HEADS // KEY_HEADS) == 0:
                        of_key = (place * KEY_HEADS + key_head) * KEY_DIM + dims
                        key = tl.load(keys_ring_ptr + source * stride_keys_ring + of_key, mask=dims < KEY_DIM)
                        tl.store(keys_ring_ptr + slot * stride_keys_ring + of_key, key, mask=dims < KEY_DIM)
