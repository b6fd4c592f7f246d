"""Rotation of the query and key heads of a tower in place, where one product has written them beside the values."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
# The signatures of jitted functions are Triton's: only their constexpr parameters are annotated.

import torch
from torch import Tensor

from kernels.fused.backend import jit, next_power_of_2, runs_on_triton, tl


def turn_heads(qkv: Tensor, cosines: Tensor, sines: Tensor, num_heads: int) -> None:
    """Rotate the two halves of each query and key head against each other, in fp32, rounded once; in place.

    qkv             [T, 3 * num_heads * head_dim], last dim contiguous: queries, keys, values
    cosines, sines  [T, head_dim / 2] fp32, contiguous: those of each row
    Source: Su et al. 2021, in the half-split layout of Llama.
    """
    if not runs_on_triton(qkv):
        turn_heads_torch(qkv, cosines, sines, num_heads)
        return
    half = qkv.shape[1] // 3 // num_heads // 2
    _turn_heads_kernel[(qkv.shape[0],)](
        qkv,
        cosines,
        sines,
        qkv.stride(0),
        HALF=half,
        BLOCK=next_power_of_2(half),
        HEADS=2 * num_heads,
        BLOCK_HEADS=next_power_of_2(2 * num_heads),
    )


def turn_heads_torch(qkv: Tensor, cosines: Tensor, sines: Tensor, num_heads: int) -> None:
    size = qkv.shape[1] // 3
    heads = qkv[:, : 2 * size].view(-1, 2 * num_heads, 2, size // num_heads // 2)
    first, second = heads.float().unbind(2)
    of, at = cosines.unsqueeze(1), sines.unsqueeze(1)
    heads.copy_(torch.stack((first * of - second * at, second * of + first * at), dim=2))


@jit
def _turn_heads_kernel(
    qkv_ptr, cosines_ptr, sines_ptr, stride,
    HALF: tl.constexpr, BLOCK: tl.constexpr, HEADS: tl.constexpr, BLOCK_HEADS: tl.constexpr,
):  # fmt: skip
    """One program a row: all its heads."""
    row = tl.program_id(0).to(tl.int64)
    dims = tl.arange(0, BLOCK)
    heads = tl.arange(0, BLOCK_HEADS)
    inside = dims < HALF
    cosines = tl.load(cosines_ptr + row * HALF + dims, mask=inside, other=0.0)[None, :]
    sines = tl.load(sines_ptr + row * HALF + dims, mask=inside, other=0.0)[None, :]
    mask = (heads < HEADS)[:, None] & inside[None, :]
    first_ptr = qkv_ptr + row * stride + heads[:, None] * (2 * HALF) + dims[None, :]
    first = tl.load(first_ptr, mask=mask, other=0.0).to(tl.float32)
    second = tl.load(first_ptr + HALF, mask=mask, other=0.0).to(tl.float32)
    tl.store(first_ptr, (first * cosines - second * sines).to(qkv_ptr.dtype.element_ty), mask=mask)
    tl.store(first_ptr + HALF, (second * cosines + first * sines).to(qkv_ptr.dtype.element_ty), mask=mask)
