"""Before lightning attention, in Triton: queries, keys and values of new tokens apart, each head by a program."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
# The signatures of jitted functions are Triton's: only their constexpr parameters are annotated.

import triton
import triton.language as tl

from kernels.recurrence.forms.prepare import head_of_tokens, store_head
from kernels.recurrence.state_space.prepare import store_steps


@triton.jit(do_not_specialize=["num_tokens", "num_rows"])
def hallmark_recurrence_fixed_prepare(
    qkv_ptr, a_log_ptr, starts_ptr, stops_ptr, firsts_ptr, targets_ptr, keys_ring_ptr, decays_ring_ptr, queries_ptr,
    keys_ptr, values_ptr, decays_ptr, steps_ptr, out_ptr, num_tokens, num_rows, stride_qkv, stride_keys_ring,
    stride_decays_ring, KEY_HEADS: tl.constexpr, VALUE_HEADS: tl.constexpr, KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr, RING: tl.constexpr, KEEPS: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_R: tl.constexpr,
    BLOCK_D: tl.constexpr,
):  # fmt: skip
    """One program: a head of queries, of keys or of values, of BLOCK_T tokens; steps of 1 and decays beside values.

    KEEPS  whether the tokens are few enough to be written to the rings of their row's slot at once: none of these
           places is read by this call
    Results of tokens without a row become 0; those with one are written by the scan.
    """
    tokens, row, is_token, position, channels, is_channel = head_of_tokens(
        starts_ptr, stops_ptr, firsts_ptr, num_rows, KEY_HEADS, KEY_DIM, VALUE_DIM, BLOCK_T, BLOCK_R, BLOCK_D
    )
    target = tl.load(targets_ptr + row)
    x = tl.load(
        qkv_ptr + tokens.to(tl.int64)[:, None] * stride_qkv + channels[None, :],
        mask=is_token[:, None] & is_channel[None, :], other=0.0,
    )  # fmt: skip
    store_head(
        x, tokens, is_token, position, target, is_channel, queries_ptr, keys_ptr, values_ptr, keys_ring_ptr, out_ptr,
        num_tokens, stride_keys_ring, KEY_HEADS, VALUE_HEADS, KEY_DIM, VALUE_DIM, RING, KEEPS, BLOCK_D,
    )  # fmt: skip
    own = tl.program_id(1) - 2 * KEY_HEADS
    if own >= 0:
        store_steps(
            tl.full([BLOCK_T], 1.0, tl.float32), a_log_ptr, decays_ptr, steps_ptr, decays_ring_ptr, tokens, is_token,
            position, target, stride_decays_ring, own, VALUE_HEADS, RING, KEEPS,
        )  # fmt: skip
