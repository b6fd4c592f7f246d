"""Rotary embedding, a factor of values, and the write into the KV cache, where values are not as wide as keys."""

from torch import Tensor

from kernels.fused.backend import jit, next_power_of_2, overlap, runs_on_triton, tl
from kernels.fused.rope_kv import Turns, angles_of, rope_and_write_kv_torch, store_halves, store_rotated


def rope_and_write_asymmetric(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cos_sin: Tensor,
    positions: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    slots: Tensor,
    *,
    value_scale: float = 1.0,
    turns: Turns | None = None,
) -> None:
    """Rotate q and k and multiply v, in place, and write k and v into their pages. Computed in fp32, rounded once.

    q [T, heads, d], k [T, kv_heads, d], v [T, kv_heads, e], d even, heads of a token side by side; k_pages [num_pages,
    page_size, kv_heads, d], v_pages [num_pages, page_size, kv_heads, e], contiguous; all else as of
    `kernels.fused.rope_kv.rope_and_write_kv`.
    """
    if turns is not None or not runs_on_triton(q):
        v.mul_(value_scale)
        rope_and_write_kv_torch(q, k, v, cos_sin, positions, k_pages, v_pages, slots, turns=turns)
        return
    num_tokens, num_heads, head_dim = q.shape
    num_kv_heads, value_dim = v.shape[1:]
    rotated = cos_sin.shape[1]
    block_heads = min(next_power_of_2(max(num_heads, num_kv_heads)), 16)
    num_q_blocks, num_kv_blocks = -(-num_heads // block_heads), -(-num_kv_heads // block_heads)
    _asymmetric_kv_kernel[(num_tokens, num_q_blocks + num_kv_blocks)](
        q, k, v, cos_sin, positions, k_pages, v_pages, slots, q.stride(0), k.stride(0), v.stride(0), value_scale,
        NUM_HEADS=num_heads, NUM_KV_HEADS=num_kv_heads, HEAD_DIM=head_dim, VALUE_DIM=value_dim, HALF=rotated // 2,
        NUM_Q_BLOCKS=num_q_blocks, BLOCK_HEADS=block_heads, BLOCK_HALF=next_power_of_2(rotated // 2),
        REST=head_dim - rotated, BLOCK_REST=next_power_of_2(max(head_dim - rotated, 1)),
        BLOCK_VALUE=next_power_of_2(value_dim), **overlap(q.device),
    )  # fmt: skip


# The alignment of positions and slots changes with the batch; a kernel for each would compile after ready.
@jit(do_not_specialize_on_alignment=["positions_ptr", "slots_ptr"])
def _asymmetric_kv_kernel(
    q_ptr, k_ptr, v_ptr, cos_sin_ptr, positions_ptr, k_pages_ptr, v_pages_ptr, slots_ptr, stride_qt, stride_kt,
    stride_vt, value_scale,
    NUM_HEADS: tl.constexpr, NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    HALF: tl.constexpr, NUM_Q_BLOCKS: tl.constexpr, BLOCK_HEADS: tl.constexpr, BLOCK_HALF: tl.constexpr,
    REST: tl.constexpr, BLOCK_REST: tl.constexpr, BLOCK_VALUE: tl.constexpr,
    OVERLAPS: tl.constexpr = False,
):  # fmt: skip
    """One program a token and block of heads: query heads first, then key heads with their values."""
    if OVERLAPS:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    token = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    cols = tl.arange(0, BLOCK_HALF)
    cos, sin = angles_of(cos_sin_ptr, tl.load(positions_ptr + token), cols[None, :], HALF)
    is_query = block < NUM_Q_BLOCKS
    heads = (block - tl.where(is_query, 0, NUM_Q_BLOCKS)) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
    is_head = heads < tl.where(is_query, NUM_HEADS, NUM_KV_HEADS)
    mask = is_head[:, None] & (cols < HALF)[None, :]
    tile = heads[:, None] * HEAD_DIM + cols[None, :]
    if is_query:
        row = q_ptr + token * stride_qt + tile
    else:
        row = k_ptr + token * stride_kt + tile
    left = tl.load(row, mask=mask, other=0.0).to(tl.float32)
    right = tl.load(row + HALF, mask=mask, other=0.0).to(tl.float32)
    new_left, new_right = store_rotated(row, left, right, cos, sin, mask, HALF)
    if not is_query:
        # int64: a cache of a few GB has more than 2^31 elements
        slot = tl.load(slots_ptr + token).to(tl.int64)
        k_row = k_pages_ptr + slot * (NUM_KV_HEADS * HEAD_DIM)
        store_halves(k_row + tile, new_left, new_right, mask, HALF)
        if REST > 0:
            rests = tl.arange(0, BLOCK_REST)
            rest_mask = is_head[:, None] & (rests < REST)[None, :]
            rest_tile = heads[:, None] * HEAD_DIM + 2 * HALF + rests[None, :]
            rest = tl.load(k_ptr + token * stride_kt + rest_tile, mask=rest_mask, other=0.0)
            tl.store(k_row + rest_tile, rest.to(k_pages_ptr.dtype.element_ty), mask=rest_mask)
        values = tl.arange(0, BLOCK_VALUE)
        value_mask = is_head[:, None] & (values < VALUE_DIM)[None, :]
        value_tile = heads[:, None] * VALUE_DIM + values[None, :]
        value_row = v_ptr + token * stride_vt + value_tile
        value = tl.load(value_row, mask=value_mask, other=0.0).to(tl.float32) * value_scale
        rounded = value.to(v_ptr.dtype.element_ty)
        tl.store(value_row, rounded, mask=value_mask)
        v_row = v_pages_ptr + slot * (NUM_KV_HEADS * VALUE_DIM) + value_tile
        tl.store(v_row, rounded.to(v_pages_ptr.dtype.element_ty), mask=value_mask)
