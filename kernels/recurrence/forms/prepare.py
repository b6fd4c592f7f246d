"""Pieces of preparations, in Triton: the tokens of a program, their convolution, and where the results are written."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
# The signatures of jitted functions are Triton's: only their constexpr parameters are annotated.

import triton
import triton.language as tl

from kernels.recurrence.token_rows import row_of_each


@triton.jit
def head_of_tokens(
    starts_ptr, stops_ptr, firsts_ptr, num_rows, KEY_HEADS: tl.constexpr, KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """(tokens, row, whether there is one, position) of each token, (channels, whether there is one) of the head.

    A program has BLOCK_T tokens and one head, of queries, then keys, then values.
    """
    tokens = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    head = tl.program_id(1)
    row, is_token = row_of_each(tokens, starts_ptr, stops_ptr, num_rows, BLOCK_R)
    position = tl.load(firsts_ptr + row) + tokens - tl.load(starts_ptr + row)
    dims = tl.arange(0, BLOCK_D)
    is_key = head < 2 * KEY_HEADS
    channel = tl.where(is_key, head * KEY_DIM, 2 * KEY_HEADS * KEY_DIM + (head - 2 * KEY_HEADS) * VALUE_DIM)
    return tokens, row, is_token, position, channel + dims, dims < tl.where(is_key, KEY_DIM, VALUE_DIM)


@triton.jit
def convolved(
    qkv_ptr, conv_ptr, inputs_ptr, starts_ptr, sources_ptr, targets_ptr, tokens, row, is_token, position, channels,
    is_channel, stride_qkv, stride_inputs, CONV_DIM: tl.constexpr, WIDTH: tl.constexpr, INPUT_RING: tl.constexpr,
    KEEPS: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """[BLOCK_T, BLOCK_D] fp32: the convolution of a head, before bias and activation.

    KEEPS  whether the inputs are written to the ring of their row's slot
    """
    start = tl.load(starts_ptr + row)
    source, target = tl.load(sources_ptr + row), tl.load(targets_ptr + row)
    reads_kept = tl.max((is_token & (tokens - (WIDTH - 1) < start)).to(tl.int32), axis=0) > 0
    own_ptr = qkv_ptr + tl.program_id(0).to(tl.int64) * BLOCK_T * stride_qkv
    mixed = tl.zeros([BLOCK_T, BLOCK_D], tl.float32)
    for tap in tl.static_range(WIDTH):
        behind = WIDTH - 1 - tap
        is_given = is_token & (tokens - behind >= start)
        is_kept = is_token & (tokens - behind < start) & (position >= behind)
        place = tl.maximum(position - behind, 0) % INPUT_RING
        x = tl.load(
            own_ptr + (tl.arange(0, BLOCK_T) - behind)[:, None] * stride_qkv + channels[None, :],
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
    return mixed


@triton.jit
def store_head(
    x, tokens, is_token, position, target, is_channel, queries_ptr, keys_ptr, values_ptr, keys_ring_ptr, out_ptr,
    num_tokens, stride_keys_ring, KEY_HEADS: tl.constexpr, VALUE_HEADS: tl.constexpr, KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr, RING: tl.constexpr, KEEPS: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Write a head of queries, keys or values; and zeros to the results of tokens without a row, beside values."""
    head, dims = tl.program_id(1), tl.arange(0, BLOCK_D)
    stored = is_token[:, None] & is_channel[None, :]
    wide = tokens.to(tl.int64)
    kept = x.to(keys_ptr.dtype.element_ty)
    if head < KEY_HEADS:
        tl.store(queries_ptr + (wide * KEY_HEADS + head)[:, None] * KEY_DIM + dims[None, :], kept, mask=stored)
    elif head < 2 * KEY_HEADS:
        own = head - KEY_HEADS
        tl.store(keys_ptr + (wide * KEY_HEADS + own)[:, None] * KEY_DIM + dims[None, :], kept, mask=stored)
        if KEEPS:
            ring = keys_ring_ptr + target * stride_keys_ring + (position % RING * KEY_HEADS + own) * KEY_DIM
            tl.store(ring[:, None] + dims[None, :], kept, mask=stored)
    else:
        of_values = (wide * VALUE_HEADS + head - 2 * KEY_HEADS)[:, None] * VALUE_DIM + dims[None, :]
        tl.store(values_ptr + of_values, kept, mask=stored)
        is_free = (tokens < num_tokens) & (is_token == 0)
        zeros = tl.zeros(x.shape, tl.float32).to(out_ptr.dtype.element_ty)
        tl.store(out_ptr + of_values, zeros, mask=is_free[:, None] & is_channel[None, :])
