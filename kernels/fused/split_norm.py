"""RMSNorm of rows of which each rank has a part: the squares of its part first, the norm once all ranks' are summed."""

import torch
from torch import Tensor

from kernels.fused.backend import jit, next_power_of_2, overlap, runs_on_triton, tl


def mean_squares(first: Tensor, second: Tensor) -> Tensor:
    """Return [T, 2] fp32: the mean of the squares of each row of `first` and of `second`.

    first, second  [T, any size], last dim contiguous, of one dtype
    """
    if not runs_on_triton(first):
        norms = [torch.linalg.vector_norm(it.float(), dim=-1).square_().div_(it.shape[1]) for it in (first, second)]
        return torch.stack(norms, dim=1)
    out = torch.empty(first.shape[0], 2, dtype=torch.float32, device=first.device)
    block = next_power_of_2(max(first.shape[1], second.shape[1]))
    _mean_squares_kernel[(first.shape[0], 2)](
        first,
        second,
        out,
        first.stride(0),
        second.stride(0),
        SIZE=first.shape[1],
        OTHER=second.shape[1],
        BLOCK=block,
        num_warps=_num_warps(block),
        **overlap(first.device),
    )
    return out


def norm_by(x: Tensor, weight: Tensor, squares: Tensor, eps: float) -> Tensor:
    """Return x / sqrt(squares + eps) * weight, computed in fp32 and rounded once: [T, H] of x's dtype, contiguous.

    x [T, H], last dim contiguous; weight [H]; squares [T] fp32, of any stride
    """
    if not runs_on_triton(x):
        return torch.mul(x.float(), (squares + eps).rsqrt_()[:, None]).mul_(weight).to(x.dtype)
    num_tokens, size = x.shape
    out = x.new_empty(num_tokens, size)
    block = next_power_of_2(size)
    _norm_by_kernel[(num_tokens,)](
        x,
        weight,
        squares,
        out,
        x.stride(0),
        squares.stride(0),
        eps,
        SIZE=size,
        BLOCK=block,
        num_warps=_num_warps(block),
        **overlap(x.device),
    )
    return out


def _num_warps(block: int) -> int:
    return min(max(block // 512, 1), 16)  # 16 elements a thread, up to 8192


@jit
def _mean_squares_kernel(
    first_ptr,
    second_ptr,
    out_ptr,
    stride_first,
    stride_second,
    SIZE: tl.constexpr,
    OTHER: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAPS: tl.constexpr = False,
):
    """One program a token and tensor; its whole row is in registers."""
    if OVERLAPS:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    token = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    if tl.program_id(1) == 0:
        x = tl.load(first_ptr + token * stride_first + cols, mask=cols < SIZE, other=0.0).to(tl.float32)
        tl.store(out_ptr + token * 2, tl.sum(x * x, axis=0) / SIZE)
    else:
        y = tl.load(second_ptr + token * stride_second + cols, mask=cols < OTHER, other=0.0).to(tl.float32)
        tl.store(out_ptr + token * 2 + 1, tl.sum(y * y, axis=0) / OTHER)


@jit
def _norm_by_kernel(
    x_ptr,
    weight_ptr,
    squares_ptr,
    out_ptr,
    stride_x,
    stride_squares,
    eps,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAPS: tl.constexpr = False,
):
    """One program a token; its whole row is in registers."""
    if OVERLAPS:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    token = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    mask = cols < SIZE
    scale = tl.rsqrt(tl.load(squares_ptr + token * stride_squares) + eps)
    x = tl.load(x_ptr + token * stride_x + cols, mask=mask, other=0.0).to(tl.float32)
    weight = tl.load(weight_ptr + cols, mask=mask, other=0.0).to(tl.float32)
    tl.store(out_ptr + token * SIZE + cols, (x * scale * weight).to(out_ptr.dtype.element_ty), mask=mask)
