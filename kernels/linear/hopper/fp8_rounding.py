"""Inputs of the products of `fp8_wide.py` and `fp8_swapped.py`, rounded to numbers e4m3: a row is read once.

The scales and the roundings are those of `fp8_weights.py`, to the bit. A quotient by IEEE 754 takes an H200 longer than
memory does: r = 1 / scale is rounded once a row, q = x r, and q + (x - q scale) r is the quotient, rounded as IEEE 754
says (Markstein 1990, theorem 8.1 in Muller et al., Handbook of Floating-Point Arithmetic, 2010). The conversion is the
machine's own: to the nearest, ties to even, what is beyond 448 cut off, NaN kept.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
# The signatures of jitted functions are Triton's: only their constexpr parameters are annotated.

from functools import lru_cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.fused.backend import Aligned, Loaded, next_power_of_2, overlap, prepare
from kernels.linear.formats.fp8_weights import BLOCK as _BLOCK
from kernels.linear.formats.fp8_weights import E4M3, Fp8BlocksWeight, Fp8StaticWeight, Fp8Weight
from kernels.linear.portable.fp8_inputs import largest_of, scale_of

RUN = tl.constexpr(_BLOCK)
LIMIT = tl.constexpr(2.0**10)
_COLUMNS = 4096  # of a program whose scales are not a row's
_FEW_ROWS, _MORE_ROWS = 64, 128  # of the largest boxes by which these products read up to 64 rows, and more


class PaddedCodes(NamedTuple):
    """Inputs [rows, size_in] over their scales, in whole boxes of the tensor maps that read them.

    codes   [padded rows, size_in up to the next 128] e4m3, zeros behind the inputs' columns
    scales  fp32: [1, rows], [1] for all, or [runs, padded rows] of 128 columns each
    Rows behind the inputs' are never written: no result that is stored reads them.
    """

    codes: Tensor
    scales: Tensor


def padded_rows(num_rows: int) -> int:
    """Return the rows of whole boxes.

    A box with rows that its map does not have takes longer: the products of a layer of an 8B took 135 us for 72 rows
    and 103 for 128 (H200).
    """
    multiple = _FEW_ROWS if num_rows <= _FEW_ROWS else _MORE_ROWS
    return -(-num_rows // multiple) * multiple


def padded_codes(x: Tensor, weight: Fp8Weight) -> PaddedCodes:
    """Return x [rows, size_in], last dim contiguous, as the weight's format says that it is rounded."""
    num_rows, size_in = x.shape
    num_runs = -(-size_in // _BLOCK)
    columns = num_runs * _BLOCK
    stride = padded_rows(num_rows)
    codes = torch.empty(stride, columns, dtype=E4M3, device=x.device)
    if isinstance(weight, Fp8StaticWeight):
        scales, by = weight.input_scales[0], "given"
    elif isinstance(weight, Fp8BlocksWeight):
        scales, by = torch.empty(num_runs, stride, device=x.device), "runs"
    else:
        scales, by = torch.empty(1, num_rows, device=x.device), "rows"
    block = next_power_of_2(columns) if by == "rows" else min(_COLUMNS, next_power_of_2(columns))
    kernel = _prepared(x.device, x.dtype, by, block)
    sizes = stride, x.stride(0) // 8, size_in // 16, num_runs
    kernel((num_rows, -(-columns // block), 1), (x.data_ptr(), codes.data_ptr(), scales.data_ptr(), *sizes))
    return PaddedCodes(codes, scales)


# A pure function of what is compiled in: the cache holds no state.
@lru_cache(maxsize=64)
def _prepared(device: torch.device, dtype: torch.dtype, by: str, block: int) -> Loaded:
    arguments = Aligned(dtype), Aligned(E4M3), Aligned(torch.float32)
    options = {"BY": by, "BLOCK": block, "num_warps": warps_of(block), **overlap(device)}
    return prepare(hallmark_fp8_round_wide, device, *arguments, 3, 3, 3, 3, **options)


def warps_of(block: int) -> int:
    """Return the warps of a program: 32 numbers a thread, as far as a program may have them."""
    return min(max(block // 1024, 1), 16)


@triton.jit
def code_of(x, scale, reciprocal):
    """The numbers e4m3 nearest to x / scale; all fp32, reciprocal that of scale."""
    # Far beyond what is cut off, so that no quotient is infinite here: its remainder would be NaN.
    quotient = tl.clamp(x * reciprocal, -LIMIT, LIMIT, propagate_nan=tl.PropagateNan.ALL)
    return tl.fma(tl.fma(-quotient, scale, x), reciprocal, quotient).to(tl.float8e4nv)


@triton.jit(do_not_specialize=["stride_scales", "stride_8", "size_in_16", "num_runs"])
def hallmark_fp8_round_wide(
    x_ptr, codes_ptr, scales_ptr, stride_scales, stride_8, size_in_16, num_runs,
    BY: tl.constexpr, BLOCK: tl.constexpr, OVERLAPS: tl.constexpr = False,
):  # fmt: skip
    """One program: BLOCK columns of a row, all of them where the row has one scale.

    Sizes come by their divisors, so that 16 bytes are read and written at once.
    """
    if OVERLAPS:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    stride_x, size_in, columns = stride_8 * 8, size_in_16 * 16, num_runs * RUN
    runs = tl.program_id(1) * (BLOCK // RUN) + tl.arange(0, BLOCK // RUN)
    at = runs[:, None] * RUN + tl.arange(0, RUN)[None, :]
    x = tl.load(x_ptr + row * stride_x + at, mask=at < size_in, other=0.0).to(tl.float32)
    if BY == "rows":
        scale = scale_of(largest_of(largest_of(x, 1), 0))
        tl.store(scales_ptr + row, scale)
        codes = code_of(x, scale, tl.div_rn(1.0, scale))
    elif BY == "runs":
        scales = scale_of(largest_of(x, 1))
        tl.store(scales_ptr + runs.to(tl.int64) * stride_scales + row, scales, mask=runs < num_runs)
        codes = code_of(x, scales[:, None], tl.div_rn(1.0, scales)[:, None])
    else:
        scale = tl.load(scales_ptr)
        codes = code_of(x, scale, tl.div_rn(1.0, scale))
    tl.store(codes_ptr + row * columns + at, codes, mask=at < columns)
