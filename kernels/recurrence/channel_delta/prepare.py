"""Before the delta rule of channels, in Triton: convolution, norms and gates, each head of some tokens by a program."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
# The signatures of jitted functions are Triton's: only their constexpr parameters are annotated.

import triton
import triton.language as tl

from kernels.recurrence.portable.prepare import LEAST_DECAY, NORM_EPS, kept_row, log1p
from kernels.recurrence.token_rows import row_of_each


@triton.jit(do_not_specialize=["num_tokens", "num_rows"])
def hallmark_recurrence_channels_prepare(
    inputs_new_ptr, a_ptr, b_ptr, conv_ptr, a_log_ptr, dt_bias_ptr, starts_ptr, stops_ptr, firsts_ptr, sources_ptr,
    targets_ptr, inputs_ptr, keys_ring_ptr, decays_ring_ptr, queries_ptr, keys_ptr, values_ptr, decays_ptr, betas_ptr,
    out_ptr, num_tokens, num_rows, stride_new, stride_a, stride_b, stride_inputs, stride_keys_ring, stride_decays_ring,
    KEY_HEADS: tl.constexpr, VALUE_HEADS: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    WIDTH: tl.constexpr, INPUT_RING: tl.constexpr, RING: tl.constexpr, KEEPS: tl.constexpr, BLOCK_T: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """One program: a query head, key head or value head of BLOCK_T tokens; gates are computed beside values.

    KEEPS  whether the tokens are few enough to be written to the rings of their row's slot at once: none of these
           places is read by this call
    Results of tokens without a row become 0; those with one are written by the scan.
    """
    CONV_DIM: tl.constexpr = 2 * KEY_HEADS * KEY_DIM + VALUE_HEADS * VALUE_DIM
    tokens = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    head = tl.program_id(1)
    row, is_token = row_of_each(tokens, starts_ptr, stops_ptr, num_rows, BLOCK_R)
    start = tl.load(starts_ptr + row)
    position = tl.load(firsts_ptr + row) + tokens - start
    source, target = tl.load(sources_ptr + row), tl.load(targets_ptr + row)

    dims = tl.arange(0, BLOCK_D)
    is_key = head < 2 * KEY_HEADS
    channel = tl.where(is_key, head * KEY_DIM, 2 * KEY_HEADS * KEY_DIM + (head - 2 * KEY_HEADS) * VALUE_DIM)
    channels = channel + dims
    is_channel = dims < tl.where(is_key, KEY_DIM, VALUE_DIM)
    reads_kept = tl.max((is_token & (tokens - (WIDTH - 1) < start)).to(tl.int32), axis=0) > 0
    own_ptr = inputs_new_ptr + tl.program_id(0).to(tl.int64) * BLOCK_T * stride_new
    mixed = tl.zeros([BLOCK_T, BLOCK_D], tl.float32)
    for tap in tl.static_range(WIDTH):
        behind = WIDTH - 1 - tap
        is_given = is_token & (tokens - behind >= start)
        is_kept = is_token & (tokens - behind < start) & (position >= behind)
        place = tl.maximum(position - behind, 0) % INPUT_RING
        x = tl.load(
            own_ptr + (tl.arange(0, BLOCK_T) - behind)[:, None] * stride_new + channels[None, :],
            mask=is_given[:, None] & is_channel[None, :],
            other=0.0,
        )
        of_ring = place[:, None] * CONV_DIM + channels[None, :]
        if reads_kept:
            kept = tl.load(
                inputs_ptr + source[:, None] * stride_inputs + of_ring,
                mask=is_kept[:, None] & is_channel[None, :],
                other=0.0,
            )
            x = tl.where(is_given[:, None], x, kept)
        if KEEPS:  # of earlier tokens those that the row's first one reads: the slot may be another
            is_new = is_given if tap == WIDTH - 1 else is_kept & (tokens == start)
            kept_inputs = inputs_ptr + target[:, None] * stride_inputs + of_ring
            tl.store(kept_inputs, x, mask=is_new[:, None] & is_channel[None, :])
        factors = tl.load(conv_ptr + channels * WIDTH + tap, mask=is_channel, other=0.0)
        mixed += x.to(tl.float32) * factors.to(tl.float32)[None, :]
    mixed = mixed / (1.0 + tl.exp(-mixed))
    stored = is_token[:, None] & is_channel[None, :]
    wide = tokens.to(tl.int64)
    if is_key:
        # Rows behind the dims are zero.
        squares = tl.sum(tl.where(is_channel[None, :], mixed * mixed, 0.0), axis=1)
        unit = mixed / tl.sqrt(squares + NORM_EPS)[:, None]
        if head < KEY_HEADS:
            queries = queries_ptr + (wide * KEY_HEADS + head)[:, None] * KEY_DIM + dims[None, :]
            tl.store(queries, unit.to(queries_ptr.dtype.element_ty), mask=stored)
        else:
            own = head - KEY_HEADS
            keys = keys_ptr + (wide * KEY_HEADS + own)[:, None] * KEY_DIM + dims[None, :]
            tl.store(keys, unit.to(keys_ptr.dtype.element_ty), mask=stored)
            if KEEPS:
                ring = keys_ring_ptr + target * stride_keys_ring + (position % RING * KEY_HEADS + own) * KEY_DIM
                tl.store(ring[:, None] + dims[None, :], unit.to(keys_ptr.dtype.element_ty), mask=stored)
    else:
        own = head - 2 * KEY_HEADS
        of_values = (wide * VALUE_HEADS + own)[:, None] * VALUE_DIM + dims[None, :]
        tl.store(values_ptr + of_values, mixed.to(values_ptr.dtype.element_ty), mask=stored)
        is_free = (tokens < num_tokens) & (is_token == 0)
        zeros = tl.zeros([BLOCK_T, BLOCK_D], tl.float32).to(out_ptr.dtype.element_ty)
        tl.store(out_ptr + of_values, zeros, mask=is_free[:, None] & is_channel[None, :])
        b = tl.load(b_ptr + wide * stride_b + own, mask=is_token, other=0.0).to(tl.float32)
        tl.store(betas_ptr + wide * VALUE_HEADS + own, 1.0 / (1.0 + tl.exp(-b)), mask=is_token)
        is_decay = is_token[:, None] & (dims < KEY_DIM)[None, :]
        of_decays = own * KEY_DIM + dims[None, :]
        a = tl.load(a_ptr + wide[:, None] * stride_a + of_decays, mask=is_decay, other=0.0).to(tl.float32)
        biased = a + tl.load(dt_bias_ptr + of_decays, mask=(dims < KEY_DIM)[None, :], other=0.0)
        softplus = log1p(tl.exp(-tl.abs(biased))) + tl.where(biased < 0, 0.0, biased)
        decays = -tl.exp(tl.load(a_log_ptr + own)) * softplus
        decays = tl.where(decays < LEAST_DECAY, LEAST_DECAY, decays)
        tl.store(decays_ptr + wide[:, None] * (VALUE_HEADS * KEY_DIM) + of_decays, decays, mask=is_decay)
        if KEEPS:
            ring = decays_ring_ptr + target * stride_decays_ring + (position % RING) * (VALUE_HEADS * KEY_DIM)
            tl.store(ring[:, None] + of_decays, decays, mask=is_decay)


@triton.jit(do_not_specialize=["num_rows", "first_index"])
def hallmark_recurrence_channels_keep(
    inputs_new_ptr, keys_ptr, decays_ptr, starts_ptr, stops_ptr, firsts_ptr, sources_ptr, targets_ptr,
    write_tokens_ptr, write_slots_ptr, inputs_ptr, keys_ring_ptr, decays_ring_ptr, num_rows, stride_new, stride_inputs,
    stride_keys_ring, stride_decays_ring, first_index, KEY_HEADS: tl.constexpr, VALUE_HEADS: tl.constexpr, KEY_DIM:
    tl.constexpr, CONV_DIM: tl.constexpr, INPUT_RING: tl.constexpr, RING: tl.constexpr, CHUNK: tl.constexpr, FOLDS_ALL:
    tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """One program: a key head, a head of decays, or BLOCK_C channels of the inputs, of what one slot gets.

    first_index  as of `hallmark_recurrence_keep`
    It runs behind the scan, as it may write to places that this reads.
    """
    index = first_index + tl.program_id(0)
    part = tl.program_id(1)
    row, last, target = kept_row(
        index, starts_ptr, stops_ptr, firsts_ptr, targets_ptr, write_tokens_ptr, write_slots_ptr, num_rows
    )
    if row >= 0:
        start, first, source = tl.load(starts_ptr + row), tl.load(firsts_ptr + row), tl.load(sources_ptr + row)
        if part < KEY_HEADS + VALUE_HEADS:
            folded = last // CHUNK * CHUNK
            if not FOLDS_ALL:
                folded = first // CHUNK * CHUNK
            dims = tl.arange(0, BLOCK_D)
            is_dim = dims < KEY_DIM
            for position in range(tl.maximum(first, folded), last):
                token, place = (start + position - first).to(tl.int64), position % RING
                if part < KEY_HEADS:
                    keys = tl.load(keys_ptr + (token * KEY_HEADS + part) * KEY_DIM + dims, mask=is_dim)
                    ring = keys_ring_ptr + target * stride_keys_ring + (place * KEY_HEADS + part) * KEY_DIM
                    tl.store(ring + dims, keys, mask=is_dim)
                else:
                    own = part - KEY_HEADS
                    decays = tl.load(decays_ptr + (token * VALUE_HEADS + own) * KEY_DIM + dims, mask=is_dim)
                    decays_ring = decays_ring_ptr + target * stride_decays_ring + (place * VALUE_HEADS + own) * KEY_DIM
                    tl.store(decays_ring + dims, decays, mask=is_dim)
        else:
            channels = (part - KEY_HEADS - VALUE_HEADS) * BLOCK_C + tl.arange(0, BLOCK_C)
            is_channel = channels < CONV_DIM
            for position in range(tl.maximum(0, last - INPUT_RING), last):
                place = position % INPUT_RING
                to = inputs_ptr + target * stride_inputs + place * CONV_DIM + channels
                if position >= first:
                    token = (start + position - first).to(tl.int64)
                    new = tl.load(inputs_new_ptr + token * stride_new + channels, mask=is_channel)
                    tl.store(to, new, mask=is_channel)
                elif target != source:
                    kept = inputs_ptr + source * stride_inputs + place * CONV_DIM + channels
                    tl.store(to, tl.load(kept, mask=is_channel), mask=is_channel)
