"""The convolution in Triton: results of tokens by tiles, and what is kept of each row where that is more than a few.

Taps are added in fp32 from the oldest token to the newest, each product and sum rounded, so that the bits of a token
are the same in every call, and those of PyTorch.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
# The signatures of jitted functions are Triton's: only their constexpr parameters are annotated.

import triton
import triton.language as tl

from kernels.recurrence.token_rows import row_of_each


@triton.jit(do_not_specialize=["num_tokens", "num_rows"])
def hallmark_convolution_tokens(
    projected_ptr, taps_ptr, bias_ptr, starts_ptr, stops_ptr, firsts_ptr, sources_ptr, targets_ptr, inputs_ptr, out_ptr,
    num_tokens, num_rows, stride_projected, stride_inputs, stride_out, CHANNELS: tl.constexpr, WIDTH: tl.constexpr,
    RING: tl.constexpr, HAS_BIAS: tl.constexpr, KEEPS: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
):  # fmt: skip
    """One program: BLOCK_C channels of BLOCK_T tokens.

    KEEPS  whether the tokens are few enough to be written to the ring of their row's slot at once: none of these places
           is read by this call
    Results of tokens without a row become 0.
    """
    tokens = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    channels = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    is_channel = (channels < CHANNELS)[None, :]
    row, is_token = row_of_each(tokens, starts_ptr, stops_ptr, num_rows, BLOCK_R)
    start = tl.load(starts_ptr + row)
    position = tl.load(firsts_ptr + row) + tokens - start
    source = (tl.load(sources_ptr + row) * stride_inputs)[:, None]
    target = (tl.load(targets_ptr + row) * stride_inputs)[:, None]
    own = projected_ptr + tokens.to(tl.int64)[:, None] * stride_projected + channels[None, :]
    mixed = tl.zeros([BLOCK_T, BLOCK_C], tl.float32)
    for tap in tl.static_range(WIDTH):
        behind = WIDTH - 1 - tap
        is_given = is_token & (tokens - behind >= start)
        is_kept = is_token & (tokens - behind < start) & (position >= behind)
        given = is_given[:, None] & is_channel
        gates = tl.load(own - behind * stride_projected, mask=given, other=0.0).to(tl.float32)
        values = tl.load(own - behind * stride_projected + 2 * CHANNELS, mask=given, other=0.0).to(tl.float32)
        of_place = (tl.maximum(position - behind, 0) % RING)[:, None] * CHANNELS + channels[None, :]
        kept = tl.load(inputs_ptr + source + of_place, mask=is_kept[:, None] & is_channel, other=0.0)
        x = tl.where(is_given[:, None], (gates * values).to(inputs_ptr.dtype.element_ty), kept)
        if KEEPS:  # of earlier tokens those that the row's first one reads: the slot may be another
            is_new = is_given if tap == WIDTH - 1 else is_kept & (tokens == start)
            tl.store(inputs_ptr + target + of_place, x, mask=is_new[:, None] & is_channel)
        taps = tl.load(taps_ptr + channels * WIDTH + tap, mask=channels < CHANNELS, other=0.0)
        mixed += x.to(tl.float32) * taps.to(tl.float32)[None, :]
    if HAS_BIAS:
        mixed += tl.load(bias_ptr + channels, mask=channels < CHANNELS, other=0.0).to(tl.float32)[None, :]
    result_gates = tl.load(own + CHANNELS, mask=is_token[:, None] & is_channel, other=0.0).to(tl.float32)
    to = out_ptr + tokens.to(tl.int64)[:, None] * stride_out + channels[None, :]
    is_stored = (tokens < num_tokens)[:, None] & is_channel
    results = tl.where(is_token[:, None], mixed * result_gates, 0.0)
    tl.store(to, results.to(out_ptr.dtype.element_ty), mask=is_stored)


@triton.jit(do_not_specialize=["num_writes"])
def hallmark_convolution_keep(
    projected_ptr, starts_ptr, stops_ptr, firsts_ptr, sources_ptr, targets_ptr, write_tokens_ptr, write_slots_ptr,
    inputs_ptr, num_writes, stride_projected, stride_inputs, CHANNELS: tl.constexpr, RING: tl.constexpr,
    BLOCK_C: tl.constexpr,
):  # fmt: skip
    """One program: BLOCK_C channels of all that is kept of one row, behind the results' kernel.

    Snapshots come first: what the row itself keeps may overwrite what they read.
    """
    row = tl.program_id(0)
    start, stop, first = tl.load(starts_ptr + row), tl.load(stops_ptr + row), tl.load(firsts_ptr + row)
    if stop > start:
        channels = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
        source, target = tl.load(sources_ptr + row), tl.load(targets_ptr + row)
        for write in range(0, num_writes):
            token = tl.load(write_tokens_ptr + write).to(tl.int32)
            if (token >= start) & (token < stop):
                _keep(
                    projected_ptr, inputs_ptr, start, first, first + token + 1 - start, source,
                    tl.load(write_slots_ptr + write), channels, stride_projected, stride_inputs, CHANNELS, RING,
                )  # fmt: skip
        tl.debug_barrier()
        _keep(
            projected_ptr, inputs_ptr, start, first, first + stop - start, source, target, channels, stride_projected,
            stride_inputs, CHANNELS, RING,
        )  # fmt: skip


@triton.jit
def _keep(
    projected_ptr, inputs_ptr, start, first, last, source, target, channels, stride_projected, stride_inputs,
    CHANNELS: tl.constexpr, RING: tl.constexpr,
):  # fmt: skip
    """Write the latest of a sequence's first `last` tokens to a slot."""
    is_channel = channels < CHANNELS
    for position in range(tl.maximum(0, last - RING), last):
        of_place = position % RING * CHANNELS + channels
        to = inputs_ptr + target * stride_inputs + of_place
        if position >= first:
            own = projected_ptr + (start + position - first).to(tl.int64) * stride_projected + channels
            gates = tl.load(own, mask=is_channel, other=0.0).to(tl.float32)
            values = tl.load(own + 2 * CHANNELS, mask=is_channel, other=0.0).to(tl.float32)
            tl.store(to, (gates * values).to(inputs_ptr.dtype.element_ty), mask=is_channel)
        elif target != source:
            kept = tl.load(inputs_ptr + source * stride_inputs + of_place, mask=is_channel, other=0.0)
            tl.store(to, kept, mask=is_channel)
