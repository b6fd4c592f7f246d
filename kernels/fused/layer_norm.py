"""LayerNorm without a bias, and that of a sum that is also the new residual stream. Computed in fp32, rounded once."""

import torch
from torch import Tensor

from kernels.fused.backend import jit, next_power_of_2, overlap, runs_on_triton, tl


def layer_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """(x - mean(x)) / sqrt(variance(x) + eps) * weight over the last dim.

    x [T, H], last dim contiguous; weight [H] of any float dtype. Returns [T, H] of x's dtype, contiguous.
    Source: Ba, Kiros and Hinton 2016.
    """
    return _launch(x, x, weight, eps, has_residual=False) if runs_on_triton(x) else layer_norm_torch(x, weight, eps)


def add_layer_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """residual += x, rounded to its dtype, then the norm of that: returns (normed, residual).

    x, residual [T, H], last dim contiguous, of one dtype, apart in memory; residual is written in place. weight [H].
    """
    if not runs_on_triton(x):
        residual += x
        return layer_norm_torch(residual, weight, eps), residual
    return _launch(x, residual, weight, eps, has_residual=True), residual


def layer_norm_torch(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    precise = x.float()
    centred = precise - precise.mean(dim=-1, keepdim=True)
    norm = torch.linalg.vector_norm(centred, dim=-1, keepdim=True)
    scale = (norm.square_().div_(x.shape[-1]) + eps).rsqrt_()
    return centred.mul_(scale).mul_(weight).to(x.dtype)


def _launch(x: Tensor, residual: Tensor, weight: Tensor, eps: float, *, has_residual: bool) -> Tensor:
    num_tokens, size = x.shape
    out = x.new_empty(num_tokens, size)
    block = next_power_of_2(size)
    _layer_norm_kernel[(num_tokens,)](
        x,
        residual,
        weight,
        out,
        x.stride(0),
        residual.stride(0),
        eps,
        SIZE=size,
        BLOCK=block,
        HAS_RESIDUAL=has_residual,
        num_warps=min(max(block // 512, 1), 16),  # 16 elements a thread, up to 8192
        **overlap(x.device),
    )
    return out


@jit
def _layer_norm_kernel(
    x_ptr,
    residual_ptr,
    weight_ptr,
    out_ptr,
    stride_xt,
    stride_rt,
    eps,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    OVERLAPS: tl.constexpr = False,
):
    """One program a token; its whole row is in registers."""
    token = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    mask = cols < SIZE
    if OVERLAPS:
        tl.extra.cuda.gdc_launch_dependents()
    weight = tl.load(weight_ptr + cols, mask=mask, other=0.0).to(tl.float32)
    if OVERLAPS:
        tl.extra.cuda.gdc_wait()
    x = tl.load(x_ptr + token * stride_xt + cols, mask=mask, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        residual_row = residual_ptr + token * stride_rt + cols
        x += tl.load(residual_row, mask=mask, other=0.0).to(tl.float32)
        rounded = x.to(residual_ptr.dtype.element_ty)
        tl.store(residual_row, rounded, mask=mask)
        x = rounded.to(tl.float32)  # the next layer reads the rounded sum, and so does this norm
    centred = tl.where(mask, x - tl.sum(x, axis=0) / SIZE, 0.0)
    scale = tl.rsqrt(tl.sum(centred * centred, axis=0) / SIZE + eps)
    tl.store(out_ptr + token * SIZE + cols, (centred * scale * weight).to(out_ptr.dtype.element_ty), mask=mask)
