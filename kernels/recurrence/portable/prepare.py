"""Before the rule, in Triton: convolution, norms and gates of new tokens, each head of some tokens by a program."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
# The signatures of jitted functions are Triton's: only their constexpr parameters are annotated.

import triton
import triton.language as tl

from kernels.recurrence.token_rows import row_of_each

NORM_EPS = tl.constexpr(1e-6)
LEAST_DECAY = tl.constexpr(-1e30)  # its logarithm: sums of 64 of them stay finite


@triton.jit(do_not_specialize=["num_tokens", "num_rows"])
def hallmark_recurrence_prepare(
    qkv_ptr, a_ptr, b_ptr, conv_ptr, a_log_ptr, dt_bias_ptr, starts_ptr, stops_ptr, firsts_ptr, sources_ptr,
    targets_ptr, inputs_ptr, keys_ring_ptr, decays_ring_ptr, betas_ring_ptr, queries_ptr, keys_ptr, values_ptr,
    decays_ptr, betas_ptr, out_ptr, num_tokens, num_rows, stride_qkv, stride_a, stride_b, stride_inputs,
    stride_keys_ring, stride_decays_ring, stride_betas_ring, KEY_HEADS: tl.constexpr, VALUE_HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, WIDTH: tl.constexpr, INPUT_RING: tl.constexpr, RING: tl.constexpr,
    KEEPS: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_H: tl.constexpr,
    APART: tl.constexpr,
):  # fmt: skip
    """One program: a query head, key head or value head of BLOCK_T tokens, or the gates of all value heads.

    APART  what divides the distance of rows of qkv, given in these
    KEEPS  whether the tokens are few enough to be written to the rings of their row's slot at once: none of these
           places is read by this call
    Results of tokens without a row become 0; those with one are written by the chunks' kernel.
    """
    stride_qkv = stride_qkv * APART  # so that the compiler knows what divides it
    begin = tl.program_id(0) * BLOCK_T
    steps = tl.arange(0, BLOCK_T)
    tokens = begin + steps
    head = tl.program_id(1)
    wide = tokens.to(tl.int64)
    if head == 2 * KEY_HEADS + VALUE_HEADS:
        row, is_token = row_of_each(tokens, starts_ptr, stops_ptr, num_rows, BLOCK_R)
        place = (tl.load(firsts_ptr + row) + tokens - tl.load(starts_ptr + row)) % RING
        target = tl.load(targets_ptr + row)
        heads = tl.arange(0, BLOCK_H)
        is_given = is_token[:, None] & (heads < VALUE_HEADS)[None, :]
        a = tl.load(a_ptr + wide[:, None] * stride_a + heads[None, :], mask=is_given, other=0.0).to(tl.float32)
        b = tl.load(b_ptr + wide[:, None] * stride_b + heads[None, :], mask=is_given, other=0.0).to(tl.float32)
        biased = a + tl.load(dt_bias_ptr + heads, mask=heads < VALUE_HEADS, other=0.0)[None, :]
        softplus = log1p(tl.exp(-tl.abs(biased))) + tl.where(biased < 0, 0.0, biased)
        factor = -tl.exp(tl.load(a_log_ptr + heads, mask=heads < VALUE_HEADS, other=0.0))
        decay = factor[None, :] * softplus
        decay = tl.where(decay < LEAST_DECAY, LEAST_DECAY, decay)
        tl.store(decays_ptr + wide[:, None] * VALUE_HEADS + heads[None, :], decay, mask=is_given)
        beta = 1.0 / (1.0 + tl.exp(-b))
        tl.store(betas_ptr + wide[:, None] * VALUE_HEADS + heads[None, :], beta, mask=is_given)
        if KEEPS:
            of_ring = place[:, None] * VALUE_HEADS + heads[None, :]
            tl.store(decays_ring_ptr + (target * stride_decays_ring)[:, None] + of_ring, decay, mask=is_given)
            tl.store(betas_ring_ptr + (target * stride_betas_ring)[:, None] + of_ring, beta, mask=is_given)
    else:
        dims = tl.arange(0, BLOCK_D)
        is_key = head < 2 * KEY_HEADS
        channel = tl.where(is_key, head * KEY_DIM, 2 * KEY_HEADS * KEY_DIM + (head - 2 * KEY_HEADS) * VALUE_DIM)
        size = tl.where(is_key, KEY_DIM, VALUE_DIM)
        channels = channel + dims
        is_channel = dims < size
        own_qkv_ptr = qkv_ptr + begin.to(tl.int64) * stride_qkv
        mixed = tl.zeros([BLOCK_T, BLOCK_D], tl.float32)
        is_whole = False
        if not KEEPS:  # whether the tokens, and those that the first of them reads, are of one row
            for first_row in range(0, num_rows, BLOCK_R):
                rows = first_row + tl.arange(0, BLOCK_R)
                starts = tl.load(starts_ptr + rows, mask=rows < num_rows, other=0)
                stops = tl.load(stops_ptr + rows, mask=rows < num_rows, other=0)
                holds = (starts + WIDTH - 1 <= begin) & (stops >= begin + BLOCK_T)
                is_whole = is_whole | (tl.max(holds.to(tl.int32), axis=0) > 0)
        if is_whole:
            for tap in tl.static_range(WIDTH):
                x = tl.load(
                    own_qkv_ptr - (WIDTH - 1 - tap) * stride_qkv + steps[:, None] * stride_qkv + channels[None, :],
                    mask=is_channel[None, :], other=0.0,
                )  # fmt: skip
                factors = tl.load(conv_ptr + channels * WIDTH + tap, mask=is_channel, other=0.0).to(tl.float32)
                mixed = tl.fma(x.to(tl.float32), tl.broadcast_to(factors[None, :], [BLOCK_T, BLOCK_D]), mixed)
            _store_head(
                mixed, tokens, steps >= 0, tokens, tokens.to(tl.int64), head, queries_ptr, keys_ptr, values_ptr,
                keys_ring_ptr, out_ptr, num_tokens, stride_keys_ring, KEY_HEADS, VALUE_HEADS, KEY_DIM, VALUE_DIM, RING,
                False, BLOCK_D,
            )  # fmt: skip
        else:
            row, is_token = row_of_each(tokens, starts_ptr, stops_ptr, num_rows, BLOCK_R)
            start = tl.load(starts_ptr + row)
            position = tl.load(firsts_ptr + row) + tokens - start
            source = tl.load(sources_ptr + row)
            target = tl.load(targets_ptr + row)
            begins = tl.max((is_token & (tokens - (WIDTH - 1) < start)).to(tl.int32), axis=0) > 0
            for tap in tl.static_range(WIDTH):
                behind = WIDTH - 1 - tap
                is_given = is_token & (tokens - behind >= start)
                is_kept = is_token & (tokens - behind < start) & (position >= behind)
                place = tl.maximum(position - behind, 0) % INPUT_RING
                x = tl.load(
                    own_qkv_ptr + (steps - behind)[:, None] * stride_qkv + channels[None, :],
                    mask=is_given[:, None] & is_channel[None, :], other=0.0,
                )  # fmt: skip
                if begins:
                    kept = tl.load(
                        inputs_ptr
                        + source[:, None] * stride_inputs
                        + place[:, None] * (2 * KEY_HEADS * KEY_DIM + VALUE_HEADS * VALUE_DIM)
                        + channels[None, :],
                        mask=is_kept[:, None] & is_channel[None, :],
                        other=0.0,
                    )
                    x = tl.where(is_given[:, None], x, kept)
                if KEEPS:  # of earlier tokens those that the row's first one reads: the slot may be another
                    is_new = is_given if tap == WIDTH - 1 else is_kept & (tokens == start)
                    tl.store(
                        inputs_ptr
                        + target[:, None] * stride_inputs
                        + place[:, None] * (2 * KEY_HEADS * KEY_DIM + VALUE_HEADS * VALUE_DIM)
                        + channels[None, :],
                        x,
                        mask=is_new[:, None] & is_channel[None, :],
                    )
                factors = tl.load(conv_ptr + channels * WIDTH + tap, mask=is_channel, other=0.0).to(tl.float32)
                mixed = tl.fma(x.to(tl.float32), tl.broadcast_to(factors[None, :], [BLOCK_T, BLOCK_D]), mixed)
            _store_head(
                mixed, tokens, is_token, position, target, head, queries_ptr, keys_ptr, values_ptr, keys_ring_ptr,
                out_ptr, num_tokens, stride_keys_ring, KEY_HEADS, VALUE_HEADS, KEY_DIM, VALUE_DIM, RING, KEEPS, BLOCK_D,
            )  # fmt: skip


@triton.jit
def _store_head(
    mixed, tokens, is_token, position, target, head, queries_ptr, keys_ptr, values_ptr, keys_ring_ptr, out_ptr,
    num_tokens, stride_keys_ring, KEY_HEADS: tl.constexpr, VALUE_HEADS: tl.constexpr, KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr, RING: tl.constexpr, KEEPS: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Activate a head's sums of the convolution, norm queries and keys, and write them."""
    dims = tl.arange(0, BLOCK_D)
    wide = tokens.to(tl.int64)
    mixed = mixed / (1.0 + tl.exp(-mixed))
    if head < 2 * KEY_HEADS:
        is_dim = (dims < KEY_DIM)[None, :]
        stored = is_token[:, None] & is_dim
        # Rows behind the dims are zero.
        squares = tl.sum(tl.where(is_dim, mixed * mixed, 0.0), axis=1)
        unit = (mixed * (1.0 / tl.sqrt(squares + NORM_EPS))[:, None]).to(keys_ptr.dtype.element_ty)
        if head < KEY_HEADS:
            tl.store(queries_ptr + (wide * KEY_HEADS + head)[:, None] * KEY_DIM + dims[None, :], unit, mask=stored)
        else:
            own = head - KEY_HEADS
            tl.store(keys_ptr + (wide * KEY_HEADS + own)[:, None] * KEY_DIM + dims[None, :], unit, mask=stored)
            if KEEPS:
                key_ring = keys_ring_ptr + target * stride_keys_ring
                key_ring += (position % RING * KEY_HEADS + own) * KEY_DIM
                tl.store(key_ring[:, None] + dims[None, :], unit, mask=stored)
    else:
        own = head - 2 * KEY_HEADS
        is_dim = (dims < VALUE_DIM)[None, :]
        to = (wide * VALUE_HEADS + own)[:, None] * VALUE_DIM + dims[None, :]
        tl.store(values_ptr + to, mixed.to(values_ptr.dtype.element_ty), mask=is_token[:, None] & is_dim)
        is_free = (tokens < num_tokens) & ~is_token
        zeros = tl.zeros(mixed.shape, tl.float32).to(out_ptr.dtype.element_ty)
        tl.store(out_ptr + to, zeros, mask=is_free[:, None] & is_dim)


@triton.jit
def log1p(x):
    """log(1 + x) of 0 <= x <= 1: the sum's rounding is taken back by the quotient (Kahan's form)."""
    sum_ = 1.0 + x
    rest = sum_ - 1.0
    return tl.where(rest == 0.0, x, tl.log(sum_) * (x / tl.where(rest == 0.0, 1.0, rest)))


@triton.jit(do_not_specialize=["num_rows", "first_index"])
def hallmark_recurrence_keep(
    qkv_ptr, keys_ptr, decays_ptr, betas_ptr, starts_ptr, stops_ptr, firsts_ptr, sources_ptr, targets_ptr,
    write_tokens_ptr, write_slots_ptr, inputs_ptr, keys_ring_ptr, decays_ring_ptr, betas_ring_ptr, num_rows, stride_qkv,
    stride_inputs, stride_keys_ring, stride_decays_ring, stride_betas_ring, first_index, KEY_HEADS: tl.constexpr,
    VALUE_HEADS: tl.constexpr, KEY_DIM: tl.constexpr, CONV_DIM: tl.constexpr, INPUT_RING: tl.constexpr, RING:
    tl.constexpr, CHUNK: tl.constexpr, FOLDS_ALL: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_C:
    tl.constexpr,
):  # fmt: skip
    """One program: a key head, or BLOCK_C channels of the inputs, of what one slot gets; a row's own, or a written one.

    first_index  of the launch: 0 for the rows' own, num_rows for those written, whose launch is the earlier one: a
                 row's own program overwrites earlier inputs of its slot, which a written one may read
    It runs behind the chunks' kernel, as it may write to places that this reads.
    """
    index = first_index + tl.program_id(0)
    part = tl.program_id(1)
    row, last, target = kept_row(
        index, starts_ptr, stops_ptr, firsts_ptr, targets_ptr, write_tokens_ptr, write_slots_ptr, num_rows
    )
    if row >= 0:
        start = tl.load(starts_ptr + row)
        first = tl.load(firsts_ptr + row)
        source = tl.load(sources_ptr + row)
        if part < KEY_HEADS:
            folded = last // CHUNK * CHUNK
            if not FOLDS_ALL:
                folded = first // CHUNK * CHUNK
            dims, heads = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_H)
            for position in range(tl.maximum(first, folded), last):
                token, place = (start + position - first).to(tl.int64), position % RING
                keys = tl.load(keys_ptr + (token * KEY_HEADS + part) * KEY_DIM + dims, mask=dims < KEY_DIM)
                ring = keys_ring_ptr + target * stride_keys_ring + (place * KEY_HEADS + part) * KEY_DIM
                tl.store(ring + dims, keys, mask=dims < KEY_DIM)
                if part == 0:
                    is_head = heads < VALUE_HEADS
                    decays = tl.load(decays_ptr + token * VALUE_HEADS + heads, mask=is_head)
                    decays_ring = decays_ring_ptr + target * stride_decays_ring + place * VALUE_HEADS
                    tl.store(decays_ring + heads, decays, mask=is_head)
                    betas = tl.load(betas_ptr + token * VALUE_HEADS + heads, mask=is_head)
                    betas_ring = betas_ring_ptr + target * stride_betas_ring + place * VALUE_HEADS
                    tl.store(betas_ring + heads, betas, mask=is_head)
        else:
            channels = (part - KEY_HEADS) * BLOCK_C + tl.arange(0, BLOCK_C)
            is_channel = channels < CONV_DIM
            for position in range(tl.maximum(0, last - INPUT_RING), last):
                place = position % INPUT_RING
                to = inputs_ptr + target * stride_inputs + place * CONV_DIM + channels
                if position >= first:
                    token = (start + position - first).to(tl.int64)
                    tl.store(to, tl.load(qkv_ptr + token * stride_qkv + channels, mask=is_channel), mask=is_channel)
                elif target != source:
                    kept = inputs_ptr + source * stride_inputs + place * CONV_DIM + channels
                    tl.store(to, tl.load(kept, mask=is_channel), mask=is_channel)


@triton.jit
def kept_row(
    index, starts_ptr, stops_ptr, firsts_ptr, targets_ptr, write_tokens_ptr, write_slots_ptr, num_rows
):  # fmt: skip
    """(row, tokens of its sequence behind which it is kept, slot): of a row, or of a write; row -1: none."""
    row, last, target = -1, 0, tl.full([], 0, tl.int64)
    if index < num_rows:
        start, stop = tl.load(starts_ptr + index), tl.load(stops_ptr + index)
        if stop > start:
            row, last = index, tl.load(firsts_ptr + index) + stop - start
            target = tl.load(targets_ptr + index)
    else:
        token = tl.load(write_tokens_ptr + index - num_rows).to(tl.int32)
        target = tl.load(write_slots_ptr + index - num_rows)
        for other in range(0, num_rows):
            start, stop = tl.load(starts_ptr + other), tl.load(stops_ptr + other)
            if (start <= token) & (token < stop):
                row, last = other, tl.load(firsts_ptr + other) + token + 1 - start
    return row, last, target
