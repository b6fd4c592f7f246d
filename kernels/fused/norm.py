"""RMSNorm, and RMSNorm of a sum that is also the new residual stream. Computed in fp32, rounded once."""

from functools import lru_cache

import torch
from torch import Tensor

from kernels.fused.backend import Aligned, Loaded, jit, next_power_of_2, overlap, prepare, runs_on_triton, tl


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last dim.

    x [T, H], last dim contiguous; weight [H] of any float dtype. Returns [T, H] of x's dtype, contiguous.
    Source: Zhang and Sennrich 2019.
    """
    if not runs_on_triton(x):
        return rms_norm_torch(x, weight, eps)
    return _launch(x, x, weight, eps, has_residual=False)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """residual += x, rounded to its dtype, then the norm of that: returns (normed, residual).

    x, residual [T, H], last dim contiguous, of one dtype, apart in memory; residual is written in place, and so may x
    be: normed may lie there. weight [H].
    """
    if not runs_on_triton(x):
        return add_rms_norm_torch(x, residual, weight, eps)
    return _launch(x, residual, weight, eps, has_residual=True), residual


def rms_norm_torch(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    precise = x.float()
    # Not F.rms_norm, which is nine operations on a CPU: 17 us in place of 29 for 8 x 256 (one busy core, torch 2.13).
    norm = torch.linalg.vector_norm(precise, dim=-1, keepdim=True)
    scale = torch.addcmul(_scalar(eps, x.device), norm, norm, value=1 / x.shape[-1]).rsqrt_()
    return torch.mul(precise, scale).mul_(weight).to(x.dtype)


@lru_cache(maxsize=16)
def _scalar(value: float, device: torch.device) -> Tensor:
    return torch.tensor(value, device=device)


def add_rms_norm_torch(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    residual += x
    return rms_norm_torch(residual, weight, eps), residual


def _launch(x: Tensor, residual: Tensor, weight: Tensor, eps: float, *, has_residual: bool) -> Tensor:
    num_tokens, size = x.shape
    stride_x, stride_residual = x.stride()[0], residual.stride()[0]
    if has_residual and stride_x == size:
        out = x  # a program holds its whole row: to allocate an output takes the host 1.7 us (one H200's)
    else:
        out = x.new_empty(num_tokens, size)  # of x.shape itself it takes 2.0 us in place of 0.8 (one core, torch 2.13)
    x_at, residual_at, weight_at = x.data_ptr(), residual.data_ptr(), weight.data_ptr()
    if x.is_cuda and (x_at | residual_at | weight_at) % 16 == 0:  # as what torch allocates is
        kernel = _prepared(
            x.device, x.dtype, residual.dtype, weight.dtype, size, stride_x, stride_residual, has_residual
        )
        kernel((num_tokens, 1, 1), (x_at, residual_at, weight_at, out.data_ptr(), stride_x, stride_residual, eps))
    else:
        _rms_norm_kernel[(num_tokens,)](
            x, residual, weight, out, stride_x, stride_residual, eps, **_options(x.device, size, has_residual)
        )
    return out


# A pure function of what is compiled in: the cache holds no state.
@lru_cache(maxsize=256)
def _prepared(
    device: torch.device,
    x: torch.dtype,
    residual: torch.dtype,
    weight: torch.dtype,
    size: int,
    stride_x: int,
    stride_residual: int,
    has_residual: bool,
) -> Loaded:
    """The kernel for aligned tensors of these dtypes, the output's as x's."""
    tensors = (Aligned(x), Aligned(residual), Aligned(weight), Aligned(x))
    options = _options(device, size, has_residual)
    return prepare(_rms_norm_kernel, device, *tensors, stride_x, stride_residual, 0.0, **options)


def _options(device: torch.device, size: int, has_residual: bool) -> dict[str, int]:
    block = next_power_of_2(size)
    num_warps = min(max(block // 512, 1), 16)  # 16 elements a thread, up to 8192
    return {"SIZE": size, "BLOCK": block, "HAS_RESIDUAL": has_residual, "num_warps": num_warps, **overlap(device)}


@jit
def _rms_norm_kernel(
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
    scale = tl.rsqrt(tl.sum(x * x, axis=0) / SIZE + eps)
    tl.store(out_ptr + token * SIZE + cols, (x * scale * weight).to(out_ptr.dtype.element_ty), mask=mask)
