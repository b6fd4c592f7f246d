"""Norm and rotation of an indexer's keys, rotation of its queries, and the write into pages behind the latents."""

import torch
from torch import Tensor

from kernels.fused.backend import jit, next_power_of_2, overlap, runs_on_triton, tl
from kernels.fused.rope_kv import Turns, angles_of, store_halves, store_rotated, turns_of

KEY_EPS = 1e-6  # of the norm of keys in every published class


def write_index(
    queries: Tensor,
    projected: Tensor,
    norm: Tensor,
    bias: Tensor,
    cos_sin: Tensor,
    positions: Tensor,
    keys: Tensor,
    pages: Tensor,
    slots: Tensor,
    *,
    neighbours: bool,
    turns: Turns | None = None,
) -> Tensor:
    """Norm and rotate an indexer's keys, write them beside and into the pages, and return its rotated queries.

    queries    [T, heads, dim], contiguous; the result is a tensor of this shape
    projected  [T, dim], last dim contiguous: keys before their norm
    norm, bias [dim] of a LayerNorm
    cos_sin    [max_position, r] fp32, the cosines of r / 2 angles, then their sines; of the first r numbers of a vector
    positions  [T] int32; slots [T] int64, page * page_size + offset: unique, in range (the caller proves it)
    keys       [T, 1, row], last dim contiguous: its last `dim` numbers are written
    pages      [num_pages, page_size, 1, row], contiguous, the same numbers of the rows at `slots`
    neighbours whether pairs are (x[2 i], x[2 i + 1]), which become (y[i], y[i + r / 2]), and not (x[i], x[i + r / 2])
    turns      `turns_of(cos_sin, positions)`, where it is at hand: then it is computed by torch
    Computed in fp32; a normed key is rounded before it is rotated. Source: DeepSeek-AI 2025, "DeepSeek-V3.2-Exp",
    whose inference code rotates so; the Hadamard transform there changes no product of a query and a key.
    """
    num_tokens, num_heads, dim = queries.shape
    half = cos_sin.shape[1] // 2
    if turns is not None or not runs_on_triton(queries):
        found = turns if turns is not None else turns_of(cos_sin, positions)
        assert found is not None, "a table is on the device of what it rotates"
        rotated = queries.clone()
        rotated[..., : 2 * half] = _rotated(queries[..., : 2 * half], found, neighbours)
        normed = torch.nn.functional.layer_norm(projected.float(), (dim,), norm.float(), bias.float(), KEY_EPS)
        own = normed.to(keys.dtype)[:, None]
        own[..., : 2 * half] = _rotated(own[..., : 2 * half], found, neighbours)
        keys[..., -dim:] = own
        pages.view(-1, 1, pages.shape[3])[..., -dim:].index_copy_(0, slots, own.to(pages.dtype))
        return rotated
    rotated = torch.empty_like(queries)
    block_heads = min(next_power_of_2(num_heads), 32)
    _index_kv_kernel[(num_tokens, 1 + -(-num_heads // block_heads))](
        queries, rotated, projected, norm, bias, cos_sin, positions, keys, pages, slots, projected.stride(0),
        keys.stride(0), pages.shape[3], KEY_EPS,
        NUM_HEADS=num_heads, DIM=dim, HALF=half, NEIGHBOURS=neighbours, BLOCK_HEADS=block_heads,
        BLOCK_DIM=next_power_of_2(dim), BLOCK_HALF=next_power_of_2(half), **overlap(queries.device),
    )  # fmt: skip
    return rotated


def _rotated(x: Tensor, turns: Turns, neighbours: bool) -> Tensor:
    """Return x [T, n, r] rotated, in its dtype."""
    precise = x.float()
    if neighbours:
        precise = precise.view(*x.shape[:-1], -1, 2).transpose(-1, -2).flatten(-2)
    half = precise.shape[-1] // 2
    swapped = torch.cat((precise[..., half:], precise[..., :half]), dim=-1)
    return (precise * turns.cos + swapped * turns.sin).to(x.dtype)


# The alignment of positions and slots changes with the batch; a kernel for each would compile after ready.
@jit(do_not_specialize_on_alignment=["positions_ptr", "slots_ptr"])
def _index_kv_kernel(
    queries_ptr, rotated_ptr, projected_ptr, norm_ptr, bias_ptr, cos_sin_ptr, positions_ptr, keys_ptr, pages_ptr,
    slots_ptr, stride_pt, stride_kt, row_size, eps,
    NUM_HEADS: tl.constexpr, DIM: tl.constexpr, HALF: tl.constexpr, NEIGHBOURS: tl.constexpr,
    BLOCK_HEADS: tl.constexpr, BLOCK_DIM: tl.constexpr, BLOCK_HALF: tl.constexpr, OVERLAPS: tl.constexpr = False,
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
    if NEIGHBOURS:
        left, right = 2 * cols, 2 * cols + 1
    else:
        left, right = cols, cols + HALF
    if block == 0:
        source = projected_ptr + token * stride_pt
        target = keys_ptr + token * stride_kt + (row_size - DIM)
        page = pages_ptr + tl.load(slots_ptr + token).to(tl.int64) * row_size + (row_size - DIM)
        dims = tl.arange(0, BLOCK_DIM)
        is_dim = dims < DIM
        x = tl.load(source + dims, mask=is_dim, other=0.0).to(tl.float32)
        mean = tl.sum(x, axis=0) / DIM
        centred = tl.where(is_dim, x - mean, 0.0)
        scale = tl.rsqrt(tl.sum(centred * centred, axis=0) / DIM + eps)
        weight = tl.load(norm_ptr + dims, mask=is_dim, other=0.0).to(tl.float32)
        bias = tl.load(bias_ptr + dims, mask=is_dim, other=0.0).to(tl.float32)
        rest = (centred * scale * weight + bias).to(keys_ptr.dtype.element_ty)
        is_rest = is_dim & (dims >= 2 * HALF)
        tl.store(target + dims, rest, mask=is_rest)
        tl.store(page + dims, rest.to(pages_ptr.dtype.element_ty), mask=is_rest)
        first = (tl.load(source + left, mask=is_col, other=0.0).to(tl.float32) - mean) * scale
        first = first * tl.load(norm_ptr + left, mask=is_col, other=0.0).to(tl.float32)
        first += tl.load(bias_ptr + left, mask=is_col, other=0.0).to(tl.float32)
        first = first.to(keys_ptr.dtype.element_ty).to(tl.float32)
        second = (tl.load(source + right, mask=is_col, other=0.0).to(tl.float32) - mean) * scale
        second = second * tl.load(norm_ptr + right, mask=is_col, other=0.0).to(tl.float32)
        second += tl.load(bias_ptr + right, mask=is_col, other=0.0).to(tl.float32)
        second = second.to(keys_ptr.dtype.element_ty).to(tl.float32)
        first, second = store_rotated(target + cols, first, second, cos, sin, is_col, HALF)
        store_halves(page + cols, first, second, is_col, HALF)
    else:  # no name of the branch above, where it has another shape: Triton would join the two
        heads = (block - 1) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
        mask = (heads < NUM_HEADS)[:, None] & is_col[None, :]
        at = (token * NUM_HEADS + heads[:, None]) * DIM
        row, out = queries_ptr + at, rotated_ptr + at
        q_first = tl.load(row + left[None, :], mask=mask, other=0.0).to(tl.float32)
        q_second = tl.load(row + right[None, :], mask=mask, other=0.0).to(tl.float32)
        store_rotated(out + cols[None, :], q_first, q_second, cos, sin, mask, HALF)
        dims = tl.arange(0, BLOCK_DIM)
        is_q_rest = (heads < NUM_HEADS)[:, None] & ((dims >= 2 * HALF) & (dims < DIM))[None, :]
        tl.store(out + dims[None, :], tl.load(row + dims[None, :], mask=is_q_rest, other=0.0), mask=is_q_rest)
