"""Norm of latents, rotations, and the write into pages: the work between the products of latent attention.

Absorbed queries are assembled here too: their first numbers are given, the rotated ones come behind them.
"""

import torch
from torch import Tensor

from kernels.fused.backend import jit, next_power_of_2, overlap, runs_on_triton, tl
from kernels.fused.norm import rms_norm_torch
from kernels.fused.rope_kv import Turns, angles_of, store_halves, store_rotated, turns_of


def write_latents(
    queries: Tensor,
    q_rotated: Tensor,
    projected: Tensor,
    norm: Tensor,
    cos_sin: Tensor,
    positions: Tensor,
    pages: Tensor,
    slots: Tensor,
    *,
    eps: float,
    turns: Turns | None = None,
) -> Tensor:
    """Rotate what is to be, norm latents, write both into their pages; return keys [T, 1, row].

    queries    [T, heads, latent + r], whose last r numbers are written; last dim contiguous
    q_rotated  [T, heads, r], last dim contiguous: what these are before their rotation
    projected  [T, latent + r], last dim contiguous: the latent before its norm, and r numbers to be rotated
    norm       [latent], weights of an RMSNorm
    cos_sin    [max_position, r] fp32, the cosines of r / 2 angles, then their sines
    positions  [T] int32; slots [T] int64, page * page_size + offset: unique, in range (the caller proves it)
    pages      [num_pages, page_size, 1, row], contiguous, of whose rows at `slots` the first latent + r numbers are
               written, as of the keys: `write_index` writes what follows; may be of another dtype
    turns      `turns_of(cos_sin, positions)`, where it is at hand: then it is computed by torch
    Computed in fp32, rounded once. Pairs are (x[i], x[i + r / 2]).
    """
    num_tokens, num_heads, size = queries.shape
    rotated = cos_sin.shape[1]
    latent = size - rotated
    row_size = pages.shape[3]
    keys = projected.new_empty(num_tokens, 1, row_size)
    if turns is not None or not runs_on_triton(queries):
        found = turns if turns is not None else turns_of(cos_sin, positions)
        assert found is not None, "a table is on the device of what it rotates"
        keys[:, 0, :latent] = rms_norm_torch(projected[:, :latent], norm, eps)
        keys[:, :, latent:size] = _rotated(projected[:, None, latent:], found)
        queries[..., latent:] = _rotated(q_rotated, found)
        pages.view(-1, 1, row_size)[..., :size].index_copy_(0, slots, keys[..., :size].to(pages.dtype))
        return keys
    block_heads = min(next_power_of_2(num_heads), 32)
    _latent_kv_kernel[(num_tokens, 1 + -(-num_heads // block_heads))](
        queries, q_rotated, projected, norm, cos_sin, positions, pages, slots, keys, queries.stride(0),
        queries.stride(1), q_rotated.stride(0), q_rotated.stride(1), projected.stride(0), row_size,
        eps,
        NUM_HEADS=num_heads, LATENT=latent, HALF=rotated // 2, BLOCK_HEADS=block_heads,
        BLOCK_LATENT=next_power_of_2(latent), BLOCK_HALF=next_power_of_2(rotated // 2),
        **overlap(queries.device),
    )  # fmt: skip
    return keys


def _rotated(x: Tensor, turns: Turns) -> Tensor:
    """Return x [T, n, r] rotated, fp32."""
    precise = x.float()
    swapped = precise.roll(precise.shape[-1] // 2, dims=-1)  # the halves of each
    return torch.addcmul(precise * turns.cos, swapped, turns.sin)


# The alignment of positions and slots changes with the batch; a kernel for each would compile after ready.
@jit(do_not_specialize_on_alignment=["positions_ptr", "slots_ptr"])
def _latent_kv_kernel(
    queries_ptr, q_rotated_ptr, projected_ptr, norm_ptr, cos_sin_ptr, positions_ptr, pages_ptr, slots_ptr, keys_ptr,
    stride_qt, stride_qh, stride_rt, stride_rh, stride_pt, row_size, eps,
    NUM_HEADS: tl.constexpr, LATENT: tl.constexpr, HALF: tl.constexpr, BLOCK_HEADS: tl.constexpr,
    BLOCK_LATENT: tl.constexpr, BLOCK_HALF: tl.constexpr, OVERLAPS: tl.constexpr = False,
):  # fmt: skip
    """One program a token and block: the key first, then blocks of query heads."""
    if OVERLAPS:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    token = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    cols = tl.arange(0, BLOCK_HALF)
    is_col = cols < HALF
    cos, sin = angles_of(cos_sin_ptr, tl.load(positions_ptr + token), cols, HALF)
    if block == 0:
        source = projected_ptr + token * stride_pt
        target = keys_ptr + token * row_size
        page = pages_ptr + tl.load(slots_ptr + token).to(tl.int64) * row_size
        dims = tl.arange(0, BLOCK_LATENT)
        is_dim = dims < LATENT
        latent = tl.load(source + dims, mask=is_dim, other=0.0).to(tl.float32)
        latent *= tl.rsqrt(tl.sum(latent * latent, axis=0) / LATENT + eps)
        latent *= tl.load(norm_ptr + dims, mask=is_dim, other=0.0).to(tl.float32)
        rounded = latent.to(keys_ptr.dtype.element_ty)
        tl.store(target + dims, rounded, mask=is_dim)
        tl.store(page + dims, rounded.to(pages_ptr.dtype.element_ty), mask=is_dim)
        left = tl.load(source + LATENT + cols, mask=is_col, other=0.0).to(tl.float32)
        right = tl.load(source + LATENT + HALF + cols, mask=is_col, other=0.0).to(tl.float32)
        left, right = store_rotated(target + LATENT + cols, left, right, cos, sin, is_col, HALF)
        store_halves(page + LATENT + cols, left, right, is_col, HALF)
    else:  # no name of the branch above, where it has another shape: Triton would join the two
        heads = (block - 1) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
        mask = (heads < NUM_HEADS)[:, None] & is_col[None, :]
        row = q_rotated_ptr + token * stride_rt + heads[:, None] * stride_rh + cols[None, :]
        out = queries_ptr + token * stride_qt + heads[:, None] * stride_qh + LATENT + cols[None, :]
        q_left = tl.load(row, mask=mask, other=0.0).to(tl.float32)
        q_right = tl.load(row + HALF, mask=mask, other=0.0).to(tl.float32)
        store_rotated(out, q_left, q_right, cos, sin, mask, HALF)
