"""Pieces of scans and of what runs behind them, in Triton: which slots get a row's state, its tokens and inputs."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
# The signatures of jitted functions are Triton's: only their constexpr parameters are annotated.

import triton
import triton.language as tl

from kernels.recurrence.portable.pieces import store_state


@triton.jit
def begun_state(
    begin, first, fold_to, start, stop, source, target, num_writes, write_tokens_ptr, write_slots_ptr, states_ptr,
    keys_ring_ptr, values_ring_ptr, decays_ring_ptr, stride_states, stride_keys_ring, stride_values_ring,
    stride_decays_ring, of_state, is_state, columns, is_column, KEY_HEADS: tl.constexpr, VALUE_HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, DECAY_DIM: tl.constexpr, RING: tl.constexpr, CHUNK: tl.constexpr,
    BLOCK_K: tl.constexpr,
):  # fmt: skip
    """[BLOCK_K, BLOCK_V] fp32: the state that a row begins with.

    It is written to the other slots that need it, as are keys, values and decays of the row's earlier tokens behind
    the border. DECAY_DIM: decays of a token and head.
    """
    head = tl.program_id(1)
    state = tl.load(states_ptr + source * stride_states + of_state, mask=is_state & (first > 0), other=0.0).to(
        tl.float32
    )
    store_state(
        state, begin, fold_to, (target != source) | (first == 0), start, stop, first, target, num_writes,
        write_tokens_ptr, write_slots_ptr, states_ptr, stride_states, of_state, is_state, CHUNK,
    )  # fmt: skip
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
                    of_head = (place * VALUE_HEADS + head) * DECAY_DIM
                    is_decay = True
                    if DECAY_DIM > 1:  # as a tile, one number costs the scan of a state space 30 more spills (sm_90)
                        of_head = of_head + dims
                        is_decay = dims < DECAY_DIM
                    decay = tl.load(decays_ring_ptr + source * stride_decays_ring + of_head, mask=is_decay)
                    tl.store(decays_ring_ptr + slot * stride_decays_ring + of_head, decay, mask=is_decay)
                    if head % (VALUE_HEADS // KEY_HEADS) == 0:
                        of_key = (place * KEY_HEADS + head // (VALUE_HEADS // KEY_HEADS)) * KEY_DIM + dims
                        key = tl.load(keys_ring_ptr + source * stride_keys_ring + of_key, mask=dims < KEY_DIM)
                        tl.store(keys_ring_ptr + slot * stride_keys_ring + of_key, key, mask=dims < KEY_DIM)
    return state


@triton.jit
def keep_added(
    added, positions, is_new, is_column, columns, fold_to, start, stop, first, target, num_writes, write_tokens_ptr,
    write_slots_ptr, values_ring_ptr, stride_values_ring, head, VALUE_HEADS: tl.constexpr, VALUE_DIM: tl.constexpr,
    RING: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Write what new tokens add to the rings of the slots in which they are behind the border."""
    of_ring = ((positions % RING) * VALUE_HEADS + head)[:, None] * VALUE_DIM + columns[None, :]
    to = values_ring_ptr + target * stride_values_ring + of_ring
    tl.store(to, added, mask=(is_new & (positions >= fold_to))[:, None] & is_column[None, :])
    for write in range(0, num_writes):
        token = tl.load(write_tokens_ptr + write).to(tl.int32)
        num_tokens = first + token + 1 - start
        if (token >= start) & (token < stop):
            slot = tl.load(write_slots_ptr + write)
            is_behind = is_new & (positions < num_tokens) & (positions >= num_tokens // CHUNK * CHUNK)
            to = values_ring_ptr + slot * stride_values_ring + of_ring
            tl.store(to, added, mask=is_behind[:, None] & is_column[None, :])


@triton.jit
def keep_tokens(
    new_ptr, ring_ptr, head, start, first, last, HEADS: tl.constexpr, DIM: tl.constexpr, RING: tl.constexpr,
    CHUNK: tl.constexpr, FOLDS_ALL: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write DIM numbers of one of HEADS, of each new token behind the border, to the ring of one slot."""
    folded = last // CHUNK * CHUNK
    if not FOLDS_ALL:
        folded = first // CHUNK * CHUNK
    dims = tl.arange(0, BLOCK)
    for position in range(tl.maximum(first, folded), last):
        token = (start + position - first).to(tl.int64)
        new = tl.load(new_ptr + (token * HEADS + head) * DIM + dims, mask=dims < DIM)
        tl.store(ring_ptr + (position % RING * HEADS + head) * DIM + dims, new, mask=dims < DIM)


@triton.jit
def keep_inputs(
    qkv_ptr, inputs_ptr, block, start, first, last, source, target, stride_qkv, stride_inputs, CONV_DIM: tl.constexpr,
    INPUT_RING: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Write BLOCK_C channels of the latest inputs to one slot: of the call, and earlier ones of the source slot."""
    channels = block * BLOCK_C + tl.arange(0, BLOCK_C)
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
