"""RMSNorm whose result is rounded to numbers e4m3 at once, for the products of `fp8_wide.py` and `fp8_swapped.py`.

A row is normed as by `kernels/fused/norm.py`, in that kernel's order of sums, and rounded to its own dtype; then as
`fp8_rounding.py` rounds it. So the codes and the scales are those of both kernels one after the other, to the bit.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
# The signatures of jitted functions are Triton's: only their constexpr parameters are annotated.

from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.fused.backend import Aligned, Loaded, next_power_of_2, overlap, prepare
from kernels.linear.formats.fp8_weights import BLOCK as _BLOCK
from kernels.linear.formats.fp8_weights import E4M3, Fp8BlocksWeight, Fp8StaticWeight, Fp8Weight
from kernels.linear.hopper.fp8_rounding import PaddedCodes, code_of, padded_rows
from kernels.linear.portable.fp8_inputs import largest_of, scale_of

RUN = tl.constexpr(_BLOCK)
_ALIGNMENT = 16  # bytes of one access


def round_norm(x: Tensor, residual: Tensor | None, norm: Tensor, eps: float, weight: Fp8Weight) -> PaddedCodes:
    """Return what `TakesRounded.round_norm` does."""
    num_rows, size = x.shape
    total, has_residual = x if residual is None else residual, residual is not None
    num_runs = -(-size // _BLOCK)
    stride = padded_rows(num_rows)
    codes = torch.empty(stride, num_runs * _BLOCK, dtype=E4M3, device=x.device)
    if isinstance(weight, Fp8StaticWeight):
        scales, by = weight.input_scales[0], "given"
    elif isinstance(weight, Fp8BlocksWeight):
        scales, by = torch.empty(num_runs, stride, device=x.device), "runs"
    else:
        scales, by = torch.empty(1, num_rows, device=x.device), "rows"
    x_at, total_at, norm_at = x.data_ptr(), total.data_ptr(), norm.data_ptr()
    if x.is_cuda and (x_at | total_at | norm_at) % _ALIGNMENT == 0:  # as what torch allocates is
        kernel = _prepared(x.device, x.dtype, norm.dtype, size, by, has_residual)
        kernel((num_rows, 1, 1), (x_at, total_at, norm_at, codes.data_ptr(), scales.data_ptr(), stride, eps))
    else:
        options = {**options_of(size, by, has_residual), **overlap(x.device)}
        hallmark_fp8_norm[(num_rows,)](x, total, norm, codes, scales, stride, eps, **options)
    return PaddedCodes(codes, scales)


# A pure function of what is compiled in: the cache holds no state.
@lru_cache(maxsize=256)
def _prepared(
    device: torch.device, dtype: torch.dtype, of_norm: torch.dtype, size: int, by: str, has_residual: bool
) -> Loaded:
    tensors = Aligned(dtype), Aligned(dtype), Aligned(of_norm), Aligned(E4M3), Aligned(torch.float32)
    options = {**options_of(size, by, has_residual), **overlap(device)}
    return prepare(hallmark_fp8_norm, device, *tensors, 3, 0.0, **options)


def options_of(size: int, by: str, has_residual: bool) -> dict[str, int | str | bool]:
    """Return the constexprs of rows of so many numbers, and the warps of `kernels/fused/norm.py`."""
    block = max(next_power_of_2(size), _BLOCK)
    return {
        "SIZE": size,
        "COLUMNS": -(-size // _BLOCK) * _BLOCK,
        "BLOCK": block,
        "BY": by,
        "HAS_RESIDUAL": has_residual,
        "num_warps": min(max(block // 512, 1), 16),
    }


@triton.jit(do_not_specialize=["stride_scales"])
def hallmark_fp8_norm(
    x_ptr, residual_ptr, weight_ptr, codes_ptr, scales_ptr, stride_scales, eps,
    SIZE: tl.constexpr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr, BY: tl.constexpr, HAS_RESIDUAL: tl.constexpr,
    OVERLAPS: tl.constexpr = False,
):  # fmt: skip
    """One program a token; its whole row is in registers. x and residual [rows, SIZE] of one dtype.

    codes [rows, COLUMNS], zeros from SIZE on; scales [rows], [1] that is given, or [COLUMNS / 128, stride_scales]
    """
    token = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    mask = cols < SIZE
    if OVERLAPS:
        tl.extra.cuda.gdc_launch_dependents()
    weight = tl.load(weight_ptr + cols, mask=mask, other=0.0).to(tl.float32)
    if OVERLAPS:
        tl.extra.cuda.gdc_wait()
    x = tl.load(x_ptr + token * SIZE + cols, mask=mask, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        residual_row = residual_ptr + token * SIZE + cols
        x += tl.load(residual_row, mask=mask, other=0.0).to(tl.float32)
        sums = x.to(residual_ptr.dtype.element_ty)
        tl.store(residual_row, sums, mask=mask)
        x = sums.to(tl.float32)
    factor = tl.rsqrt(tl.sum(x * x, axis=0) / SIZE + eps)
    normed = (x * factor * weight).to(x_ptr.dtype.element_ty).to(tl.float32)
    normed = tl.where(mask, normed, 0.0)  # a row that is not finite has NaN here
    if BY == "rows":
        scale = scale_of(largest_of(normed, 0))
        tl.store(scales_ptr + token, scale)
        codes = code_of(normed, scale, tl.div_rn(1.0, scale))
    elif BY == "runs":
        of_runs = tl.reshape(normed, [BLOCK // RUN, RUN])
        scales = scale_of(largest_of(of_runs, 1))
        runs = tl.arange(0, BLOCK // RUN)
        at = scales_ptr + runs.to(tl.int64) * stride_scales + token
        tl.store(at, scales, mask=runs < COLUMNS // RUN)
        codes = code_of(of_runs, scales[:, None], tl.div_rn(1.0, scales)[:, None])
        codes = tl.reshape(codes, [BLOCK])
    else:
        scale = tl.load(scales_ptr)
        codes = code_of(normed, scale, tl.div_rn(1.0, scale))
    # 8 codes an access, as many as numbers of 16 bits: else all of the kernel has 16 in a row a thread, and other sums.
    places = tl.max_contiguous(tl.arange(0, BLOCK), 8)
    tl.store(codes_ptr + token * COLUMNS + places, codes, mask=places < COLUMNS)
