"""Before the state space, in Triton: convolution and steps of new tokens, each head of some tokens by a program."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
# The signatures of jitted functions are Triton's: only their constexpr parameters are annotated.

import triton
import triton.language as tl

from kernels.recurrence.forms.prepare import convolved, head_of_tokens, store_head
from kernels.recurrence.forms.slots import keep_inputs, keep_tokens
from kernels.recurrence.portable.prepare import LEAST_DECAY, kept_row, log1p


@triton.jit(do_not_specialize=["num_tokens", "num_rows"])
def hallmark_recurrence_space_prepare(
    qkv_ptr, steps_in_ptr, conv_ptr, conv_bias_ptr, a_log_ptr, dt_bias_ptr, least_step, most_step, stride_steps_in,
    sources_ptr, inputs_ptr, stride_inputs, starts_ptr, stops_ptr, firsts_ptr, targets_ptr, keys_ring_ptr,
    decays_ring_ptr, queries_ptr, keys_ptr, values_ptr, decays_ptr, steps_ptr, out_ptr, num_tokens, num_rows,
    stride_qkv, stride_keys_ring, stride_decays_ring, KEY_HEADS: tl.constexpr, VALUE_HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, WIDTH: tl.constexpr, INPUT_RING: tl.constexpr, RING: tl.constexpr,
    KEEPS: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """One program: a head of C, of B or of x, of BLOCK_T tokens; steps are computed beside x.

    KEEPS  whether the tokens are few enough to be written to the rings of their row's slot at once: none of these
           places is read by this call
    Results of tokens without a row become 0; those with one are written by the scan.
    """
    tokens, row, is_token, position, channels, is_channel = head_of_tokens(
        starts_ptr, stops_ptr, firsts_ptr, num_rows, KEY_HEADS, KEY_DIM, VALUE_DIM, BLOCK_T, BLOCK_R, BLOCK_D
    )
    target = tl.load(targets_ptr + row)
    mixed = convolved(
        qkv_ptr, conv_ptr, inputs_ptr, starts_ptr, sources_ptr, targets_ptr, tokens, row, is_token, position, channels,
        is_channel, stride_qkv, stride_inputs, 2 * KEY_HEADS * KEY_DIM + VALUE_HEADS * VALUE_DIM, WIDTH, INPUT_RING,
        KEEPS, BLOCK_T, BLOCK_D,
    )  # fmt: skip
    mixed += tl.load(conv_bias_ptr + channels, mask=is_channel, other=0.0).to(tl.float32)[None, :]
    mixed = mixed / (1.0 + tl.exp(-mixed))
    store_head(
        mixed, tokens, is_token, position, target, is_channel, queries_ptr, keys_ptr, values_ptr, keys_ring_ptr,
        out_ptr, num_tokens, stride_keys_ring, KEY_HEADS, VALUE_HEADS, KEY_DIM, VALUE_DIM, RING, KEEPS, BLOCK_D,
    )  # fmt: skip
    own = tl.program_id(1) - 2 * KEY_HEADS
    if own >= 0:
        given = tl.load(steps_in_ptr + tokens.to(tl.int64) * stride_steps_in + own, mask=is_token, other=0.0)
        biased = given.to(tl.float32) + tl.load(dt_bias_ptr + own)
        step = log1p(tl.exp(-tl.abs(biased))) + tl.where(biased < 0, 0.0, biased)
        step = tl.where(step < least_step, least_step, tl.where(step > most_step, most_step, step))
        store_steps(
            step, a_log_ptr, decays_ptr, steps_ptr, decays_ring_ptr, tokens, is_token, position, target,
            stride_decays_ring, own, VALUE_HEADS, RING, KEEPS,
        )  # fmt: skip


@triton.jit
def store_steps(
    step, a_log_ptr, decays_ptr, steps_ptr, decays_ring_ptr, tokens, is_token, position, target, stride_decays_ring,
    own, VALUE_HEADS: tl.constexpr, RING: tl.constexpr, KEEPS: tl.constexpr,
):  # fmt: skip
    """Write the step of each token [BLOCK_T] fp32 of a value head, and its decay."""
    of_head = tokens.to(tl.int64) * VALUE_HEADS + own
    tl.store(steps_ptr + of_head, step, mask=is_token)
    decay = -tl.exp(tl.load(a_log_ptr + own)) * step
    decay = tl.where(decay < LEAST_DECAY, LEAST_DECAY, decay)
    tl.store(decays_ptr + of_head, decay, mask=is_token)
    if KEEPS:
        of_ring = position % RING * VALUE_HEADS + own
        tl.store(decays_ring_ptr + target * stride_decays_ring + of_ring, decay, mask=is_token)


@triton.jit(do_not_specialize=["num_rows", "first_index"])
def hallmark_recurrence_space_keep(
    qkv_ptr, keys_ptr, decays_ptr, starts_ptr, stops_ptr, firsts_ptr, sources_ptr, targets_ptr, write_tokens_ptr,
    write_slots_ptr, inputs_ptr, keys_ring_ptr, decays_ring_ptr, num_rows, stride_qkv, stride_inputs, stride_keys_ring,
    stride_decays_ring, first_index, KEY_HEADS: tl.constexpr, VALUE_HEADS: tl.constexpr, KEY_DIM: tl.constexpr,
    CONV_DIM: tl.constexpr, INPUT_RING: tl.constexpr, RING: tl.constexpr, CHUNK: tl.constexpr, FOLDS_ALL: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """One program: a head of B, or BLOCK_C channels of the inputs, of what one slot gets: a row's own, or a write.

    first_index  as of `hallmark_recurrence_keep`
    It runs behind the scan, as it may write to places that this reads.
    """
    part = tl.program_id(1)
    row, last, target = kept_row(
        first_index + tl.program_id(0), starts_ptr, stops_ptr, firsts_ptr, targets_ptr, write_tokens_ptr,
        write_slots_ptr, num_rows,
    )  # fmt: skip
    if row >= 0:
        start, first, source = tl.load(starts_ptr + row), tl.load(firsts_ptr + row), tl.load(sources_ptr + row)
        keys_ring = keys_ring_ptr + target * stride_keys_ring
        decays_ring = decays_ring_ptr + target * stride_decays_ring
        if part < KEY_HEADS:
            keep_tokens(
                keys_ptr, keys_ring, part, start, first, last, KEY_HEADS, KEY_DIM, RING, CHUNK, FOLDS_ALL, BLOCK_D
            )
            if part == 0:
                keep_tokens(
                    decays_ptr, decays_ring, 0, start, first, last, 1, VALUE_HEADS, RING, CHUNK, FOLDS_ALL, BLOCK_H
                )
        else:
            keep_inputs(
                qkv_ptr, inputs_ptr, part - KEY_HEADS, start, first, last, source, target, stride_qkv, stride_inputs,
                CONV_DIM, INPUT_RING, BLOCK_C,
            )  # fmt: skip
