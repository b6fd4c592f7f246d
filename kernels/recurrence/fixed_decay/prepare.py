"""Before lightning attention, in Triton: queries, keys and values of new tokens apart, each head by a program."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
# The signatures of jitted functions are Triton's: only their constexpr parameters are annotated.

import triton
import triton.language as tl

from kernels.recurrence.portable.prepare import LEAST_DECAY
from kernels.recurrence.token_rows import row_of_each


@triton.jit(do_not_specialize=["num_tokens", "num_rows"])
def hallmark_recurrence_fixed_prepare(
    qkv_ptr, a_log_ptr, starts_ptr, stops_ptr, firsts_ptr, targets_ptr, keys_ring_ptr, decays_ring_ptr, queries_ptr,
    keys_ptr, values_ptr, steps_ptr, decays_ptr, out_ptr, num_tokens, num_rows, stride_qkv, stride_keys_ring,
    stride_decays_ring, KEY_HEADS: tl.constexpr, VALUE_HEADS: tl.constexpr, KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr, RING: tl.constexpr, KEEPS: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_R: tl.constexpr,
    BLOCK_D: tl.constexpr,
):  # fmt: skip
    """One program: a head of queries, of keys or of values, of BLOCK_T tokens; steps of 1 and decays beside values.

    KEEPS  whether the tokens are few enough to be written to the rings of their row's slot at once: none of these
           places is read by this call
    Results of tokens without a row become 0; those with one are written by the scan.
    """
    tokens = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    head = tl.program_id(1)
    row, is_token = row_of_each(tokens, starts_ptr, stops_ptr, num_rows, BLOCK_R)
    position = tl.load(firsts_ptr + row) + tokens - tl.load(starts_ptr + row)
    target = tl.load(targets_ptr + row)

    dims = tl.arange(0, BLOCK_D)
    is_key = head < 2 * KEY_HEADS
    channel = tl.where(is_key, head * KEY_DIM, 2 * KEY_HEADS * KEY_DIM + (head - 2 * KEY_HEADS) * VALUE_DIM)
    is_channel = dims < tl.where(is_key, KEY_DIM, VALUE_DIM)
    wide = tokens.to(tl.int64)
    stored = is_token[:, None] & is_channel[None, :]
    x = tl.load(qkv_ptr + wide[:, None] * stride_qkv + (channel + dims)[None, :], mask=stored, other=0.0)
    if is_key:
        if head < KEY_HEADS:
            tl.store(queries_ptr + (wide * KEY_HEADS + head)[:, None] * KEY_DIM + dims[None, :], x, mask=stored)
        else:
            own = head - KEY_HEADS
            tl.store(keys_ptr + (wide * KEY_HEADS + own)[:, None] * KEY_DIM + dims[None, :], x, mask=stored)
            if KEEPS:
                ring = keys_ring_ptr + target * stride_keys_ring + (position % RING * KEY_HEADS + own) * KEY_DIM
                tl.store(ring[:, None] + dims[None, :], x, mask=stored)
    else:
        own = head - 2 * KEY_HEADS
        of_values = (wide * VALUE_HEADS + own)[:, None] * VALUE_DIM + dims[None, :]
        tl.store(values_ptr + of_values, x, mask=stored)
        is_free = (tokens < num_tokens) & (is_token == 0)
        zeros = tl.zeros([BLOCK_T, BLOCK_D], tl.float32).to(out_ptr.dtype.element_ty)
        tl.store(out_ptr + of_values, zeros, mask=is_free[:, None] & is_channel[None, :])
        ones = tl.full([BLOCK_T], 1.0, tl.float32)
        decay = -tl.exp(tl.load(a_log_ptr + own)) * ones
        decay = tl.where(decay < LEAST_DECAY, LEAST_DECAY, decay)
        tl.store(steps_ptr + wide * VALUE_HEADS + own, ones, mask=is_token)
        tl.store(decays_ptr + wide * VALUE_HEADS + own, decay, mask=is_token)
        if KEEPS:
            of_decays = (position % RING) * VALUE_HEADS + own
            tl.store(decays_ring_ptr + target * stride_decays_ring + of_decays, decay, mask=is_token)
