"""Pieces that the kernels of recurrences share, so that a token's numbers have the same bits in each of them.

Products are chains over 16 terms, in order, whatever the tile, as the GPU's matrix units compute them (docs/limits.md);
sums of decays' logarithms are exact; all else is done element by element, without contraction of products and sums.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
# The signatures of jitted functions are Triton's: only their constexpr parameters are annotated.

import triton
import triton.language as tl


@triton.jit
def product(left, right):
    """left @ right in fp32; numbers of 32 bits as they are."""
    return tl.dot(left, right, input_precision="ieee")


@triton.jit
def add_product(left, right, sum_):
    """sum_ + left @ right in fp32, term by term; numbers of 32 bits as they are."""
    return tl.dot(left, right, sum_, input_precision="ieee")


@triton.jit
def exact_logs(decays):
    """Logarithms of decays as multiples of 2^-30 from -256 on, fp64: any sum of 64 of them is exact.

    e^-256 is 0 in fp32; a step of 2^-30 is 1/250 of the error that fp32 makes of a logarithm.
    """
    logs = tl.maximum(decays, -256.0).to(tl.float64)
    return tl.floor(logs * 1073741824.0 + 0.5) * 9.313225746154785e-10


@triton.jit
def inverse(near):
    """(1 + near)^-1 of [16, 16] fp32 below its diagonal. Each number is summed up from its row's last column on.

    So no row depends on another, and no bit on how a tile lies in the threads.
    """
    rows, columns = tl.arange(0, 16)[:, None], tl.arange(0, 16)[None, :]
    found = 0.0 - near
    for behind in range(0, 15):
        step = 15 - behind
        row = tl.sum(tl.where(rows == step, near, 0.0), axis=0)
        factors = 0.0 - tl.sum(tl.where(columns == step, found, 0.0), axis=1)
        found = tl.fma(tl.broadcast_to(factors[:, None], [16, 16]), tl.broadcast_to(row[None, :], [16, 16]), found)
    return tl.where(rows == columns, 1.0, found)


@triton.jit
def read_state(rows, state, IS_HALF: tl.constexpr):
    """rows @ state, the state as a sum of two numbers of 16 bits where rows have 16."""
    if IS_HALF:
        large = state.to(rows.dtype)
        small = (state - large.to(tl.float32)).to(rows.dtype)
        found = add_product(rows, small, product(rows, large))
    else:
        found = product(rows, state)
    return found


@triton.jit
def solved(large, small, missing):
    """Return what each token of a block adds, rounded: [BLOCK, BLOCK_V], by the two parts of the inverse in 16 bits."""
    most = missing.to(large.dtype)
    least = (missing - most.to(tl.float32)).to(large.dtype)
    return add_product(large, most, add_product(small, most, product(large, least))).to(large.dtype)


@triton.jit
def is_one_block(start, stop, first, folded, BLOCK: tl.constexpr, CHUNK: tl.constexpr):
    """Return whether a row's tokens are of one block, and its state is folded up to the border before it."""
    last = first + stop - start
    return (stop > start) & (first // BLOCK == (last - 1) // BLOCK) & (folded == first // CHUNK * CHUNK)


@triton.jit
def num_own_chunks(starts_ptr, stops_ptr, firsts_ptr, rows, num_rows, CHUNK: tl.constexpr, LEAST: tl.constexpr):
    """Chunks of each row that are computed by the scan: those from its first border on, of LEAST tokens or more."""
    is_row = rows < num_rows
    start, stop = tl.load(starts_ptr + rows, mask=is_row, other=0), tl.load(stops_ptr + rows, mask=is_row, other=0)
    first = tl.load(firsts_ptr + rows, mask=is_row, other=0)
    begin = tl.cdiv(first, CHUNK) * CHUNK
    num_tokens = first + stop - start - begin
    return tl.where((stop > start) & (num_tokens >= LEAST), tl.cdiv(num_tokens, CHUNK), 0)


@triton.jit
def known_or_new(ring_ptr, new_ptr, positions, start, first, last, STRIDE: tl.constexpr, RING: tl.constexpr):
    """A number of each token: of its place in the ring before the row's first, of the call from there on; else 0."""
    known = tl.load(ring_ptr + (positions % RING) * STRIDE, mask=positions < first, other=0.0)
    is_new = (positions >= first) & (positions < last)
    new = tl.load(new_ptr + (start + positions - first) * STRIDE, mask=is_new, other=0.0)
    return tl.where(positions < first, known, new)


@triton.jit
def key_rows(
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
def added_rows(
    ring_ptr, new_ptr, positions, start, first, last, end, STRIDE: tl.constexpr, RING: tl.constexpr, columns, is_column
):  # fmt: skip
    """[n, BLOCK_V]: what the tokens at these positions have added; zero from the row's last or position `end` on."""
    is_known, is_new = (positions < first) & (positions < end), (positions >= first) & (positions < last)
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
def store_state(
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
def known_misses(ring_ptr, positions, first, STRIDE: tl.constexpr, RING: tl.constexpr, columns, is_column):
    """[BLOCK, BLOCK_V] fp32: of tokens before the row's first; else 0."""
    is_known = positions < first
    of_ring = (positions % RING)[:, None] * STRIDE + columns[None, :]
    return tl.load(ring_ptr + of_ring, mask=is_known[:, None] & is_column[None, :], other=0.0)


@triton.jit
def keep_new(
    added, missing, positions, is_new, is_column, columns, fold_to, kept_from, start, stop, first, target, num_writes,
    write_tokens_ptr, write_slots_ptr, values_ring_ptr, misses_ring_ptr, stride_values_ring, stride_misses_ring, head,
    VALUE_HEADS: tl.constexpr, VALUE_DIM: tl.constexpr, RING: tl.constexpr, MISSES_RING: tl.constexpr,
    CHUNK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write what new tokens add, and miss, to the rings of the slots in which they are behind border and block."""
    of_ring = ((positions % RING) * VALUE_HEADS + head)[:, None] * VALUE_DIM + columns[None, :]
    of_misses = ((positions % MISSES_RING) * VALUE_HEADS + head)[:, None] * VALUE_DIM + columns[None, :]
    to = values_ring_ptr + target * stride_values_ring + of_ring
    tl.store(to, added, mask=(is_new & (positions >= fold_to))[:, None] & is_column[None, :])
    to = misses_ring_ptr + target * stride_misses_ring + of_misses
    tl.store(to, missing, mask=(is_new & (positions >= kept_from))[:, None] & is_column[None, :])
    for write in range(0, num_writes):
        token = tl.load(write_tokens_ptr + write).to(tl.int32)
        num_tokens = first + token + 1 - start
        if (token >= start) & (token < stop):
            slot = tl.load(write_slots_ptr + write)
            is_written = is_new & (positions < num_tokens)
            is_behind = is_written & (positions >= num_tokens // CHUNK * CHUNK)
            to = values_ring_ptr + slot * stride_values_ring + of_ring
            tl.store(to, added, mask=is_behind[:, None] & is_column[None, :])
            is_behind = is_written & (positions >= num_tokens // BLOCK * BLOCK)
            to = misses_ring_ptr + slot * stride_misses_ring + of_misses
            tl.store(to, missing, mask=is_behind[:, None] & is_column[None, :])


@triton.jit
def copy_kept(
    begin, first, fold_to, kept_from, start, stop, source, target, num_writes, write_tokens_ptr, write_slots_ptr,
    keys_ring_ptr, values_ring_ptr, decays_ring_ptr, betas_ring_ptr, misses_ring_ptr, stride_keys_ring,
    stride_values_ring, stride_decays_ring, stride_betas_ring, stride_misses_ring, head, key_head, columns, is_column,
    KEY_HEADS: tl.constexpr, VALUE_HEADS: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    RING: tl.constexpr, MISSES_RING: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Copy what the source slot has of the row's earlier tokens behind the border to the other slots that need it."""
    for write in range(-1, num_writes):
        slot, border, block, is_wanted = target, fold_to, kept_from, target != source
        if write >= 0:
            token = tl.load(write_tokens_ptr + write).to(tl.int32)
            slot = tl.load(write_slots_ptr + write)
            border = (first + token + 1 - start) // CHUNK * CHUNK
            block = (first + token + 1 - start) // BLOCK * BLOCK
            is_wanted = (token >= start) & (token < stop) & (slot != source)
        if is_wanted:
            dims = tl.arange(0, BLOCK_K)
            for position in range(tl.maximum(begin, border), first):
                place = position % RING
                at = (place * VALUE_HEADS + head) * VALUE_DIM + columns
                kept = tl.load(values_ring_ptr + source * stride_values_ring + at, mask=is_column)
                tl.store(values_ring_ptr + slot * stride_values_ring + at, kept, mask=is_column)
                if tl.program_id(2) == 0:
                    of_head = place * VALUE_HEADS + head
                    decay = tl.load(decays_ring_ptr + source * stride_decays_ring + of_head)
                    tl.store(decays_ring_ptr + slot * stride_decays_ring + of_head, decay)
                    beta = tl.load(betas_ring_ptr + source * stride_betas_ring + of_head)
                    tl.store(betas_ring_ptr + slot * stride_betas_ring + of_head, beta)
                    if head % (VALUE_HEADS // KEY_HEADS) == 0:
                        of_key = (place * KEY_HEADS + key_head) * KEY_DIM + dims
                        key = tl.load(keys_ring_ptr + source * stride_keys_ring + of_key, mask=dims < KEY_DIM)
                        tl.store(keys_ring_ptr + slot * stride_keys_ring + of_key, key, mask=dims < KEY_DIM)
            for position in range(tl.maximum(begin, block), first):
                at = ((position % MISSES_RING) * VALUE_HEADS + head) * VALUE_DIM + columns
                miss = tl.load(misses_ring_ptr + source * stride_misses_ring + at, mask=is_column)
                tl.store(misses_ring_ptr + slot * stride_misses_ring + at, miss, mask=is_column)
