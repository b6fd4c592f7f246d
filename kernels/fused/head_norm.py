"""RMSNorm of each head without weights, as of values that are normed. Computed in fp32, rounded once."""

from functools import lru_cache

import torch
from torch import Tensor

from kernels.fused.backend import Aligned, Loaded, jit, next_power_of_2, overlap, prepare, runs_on_triton, tl

_MAX_TILE = 4096  # elements of the heads that one program holds


def norm_heads(x: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) over the last dim, a new contiguous tensor of x's shape and dtype.

    x [T, heads, d]; the heads of a token stand side by side. Source: Zhang and Sennrich 2019.
    """
    if not runs_on_triton(x):
        return norm_heads_torch(x, eps)
    num_tokens, num_heads, head_dim = x.shape
    out = x.new_empty(num_tokens, num_heads, head_dim)
    stride, at = x.stride()[0], x.data_ptr()
    if x.is_cuda and at % 16 == 0:
        kernel, num_blocks = _prepared(x.device, x.dtype, (num_heads, head_dim), stride)
        kernel((num_tokens, num_blocks, 1), (at, out.data_ptr(), stride, eps))
    else:
        options, num_blocks = _options(x.device, (num_heads, head_dim))
        _norm_heads_kernel[(num_tokens, num_blocks)](x, out, stride, eps, **options)
    return out


def norm_heads_torch(x: Tensor, eps: float) -> Tensor:
    precise = x.float()
    norm = torch.linalg.vector_norm(precise, dim=-1, keepdim=True)
    return precise.mul((norm * norm / x.shape[-1] + eps).rsqrt_()).to(x.dtype)


# A pure function of what is compiled in: the cache holds no state.
@lru_cache(maxsize=64)
def _prepared(device: torch.device, dtype: torch.dtype, sizes: tuple[int, int], stride: int) -> tuple[Loaded, int]:
    """The kernel for aligned tensors, and its programs of a token."""
    options, num_blocks = _options(device, sizes)
    return prepare(_norm_heads_kernel, device, Aligned(dtype), Aligned(dtype), stride, 0.0, **options), num_blocks


def _options(device: torch.device, sizes: tuple[int, int]) -> tuple[dict[str, int], int]:
    """The kernel's constants and options, and its programs of a token."""
    num_heads, head_dim = sizes
    block_dim = next_power_of_2(head_dim)
    block_heads = min(next_power_of_2(num_heads), max(_MAX_TILE // block_dim, 1))
    constants = {"NUM_HEADS": num_heads, "HEAD_DIM": head_dim, "BLOCK_HEADS": block_heads, "BLOCK_DIM": block_dim}
    return {**constants, **overlap(device)}, -(-num_heads // block_heads)


@jit
def _norm_heads_kernel(
    x_ptr,
    out_ptr,
    stride_t,
    eps,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    OVERLAPS: tl.constexpr = False,
):
    """One program a token and block of heads."""
    if OVERLAPS:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    token = tl.program_id(0).to(tl.int64)
    heads = tl.program_id(1) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
    cols = tl.arange(0, BLOCK_DIM)
    mask = (heads < NUM_HEADS)[:, None] & (cols < HEAD_DIM)[None, :]
    tile = heads[:, None] * HEAD_DIM + cols[None, :]
    x = tl.load(x_ptr + token * stride_t + tile, mask=mask, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(x * x, axis=1) / HEAD_DIM + eps)[:, None]
    tl.store(out_ptr + token * (NUM_HEADS * HEAD_DIM) + tile, (x * scale).to(out_ptr.dtype.element_ty), mask=mask)
