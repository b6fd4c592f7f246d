"""Inputs of a few rows rounded to numbers e4m3, in one launch that overlaps what is beside it.

The scales and the roundings are those of `fp8_weights.py`, to the bit.
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
from kernels.linear.portable.fp8_inputs import largest_of, rounded, scale_of

RUN = tl.constexpr(_BLOCK)
_COLUMNS = 2048  # that a program rounds: quotients take longer than the rest


class Codes(NamedTuple):
    """Inputs [rows, size_in] over their scales.

    codes   [rows, size_in up to the next 128] e4m3, zeros behind the inputs' columns
    scales  fp32: [1, rows], [1] for all, or [runs, rows] of 128 columns each
    """

    codes: Tensor
    scales: Tensor


def codes_of(x: Tensor, weight: Fp8Weight) -> Codes:
    """Return x [rows, size_in], last dim contiguous, as the weight's format says that it is rounded."""
    num_rows, size_in = x.shape
    num_runs = -(-size_in // _BLOCK)
    columns = num_runs * _BLOCK
    codes = torch.empty(num_rows, columns, dtype=E4M3, device=x.device)
    if isinstance(weight, Fp8StaticWeight):
        scales, by = weight.input_scales[0], "given"
    elif isinstance(weight, Fp8BlocksWeight):
        scales, by = torch.empty(num_runs, num_rows, device=x.device), "runs"
    else:
        scales, by = torch.empty(1, num_rows, device=x.device), "rows"
    kernel = _prepared(x.device, x.dtype, by, next_power_of_2(columns) if by == "rows" else _COLUMNS)
    grid = num_rows, -(-columns // _COLUMNS), 1
    sizes = num_rows, x.stride(0) // 8, size_in // 16, num_runs
    kernel(grid, (x.data_ptr(), codes.data_ptr(), scales.data_ptr(), *sizes))
    return Codes(codes, scales)


# A pure function of what is compiled in: the cache holds no state.
@lru_cache(maxsize=64)
def _prepared(device: torch.device, dtype: torch.dtype, by: str, row: int) -> Loaded:
    options = {"BY": by, "BLOCK": _COLUMNS, "ROW": row, "num_warps": 8, **overlap(device)}
    arguments = Aligned(dtype), Aligned(E4M3), Aligned(torch.float32)
    return prepare(hallmark_fp8_codes, device, *arguments, 3, 3, 3, 3, **options)


@triton.jit(do_not_specialize=["num_rows", "stride_8", "size_in_16", "num_runs"])
def hallmark_fp8_codes(
    x_ptr, codes_ptr, scales_ptr, num_rows, stride_8, size_in_16, num_runs,
    BY: tl.constexpr, BLOCK: tl.constexpr, ROW: tl.constexpr, OVERLAPS: tl.constexpr = False,
):  # fmt: skip
    """One program: BLOCK columns of a row. Where the row has one scale, each of its programs finds it.

    Sizes come by their divisors, so that 16 bytes are read and written at once. ROW: at least a row's columns
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
        every = tl.arange(0, ROW)
        whole = tl.load(x_ptr + row * stride_x + every, mask=every < size_in, other=0.0).to(tl.float32)
        scale = scale_of(largest_of(whole, 0))
        tl.store(scales_ptr + row, scale)
        codes = rounded(x, scale)
    elif BY == "runs":
        scales = scale_of(largest_of(x, 1))
        tl.store(scales_ptr + runs.to(tl.int64) * num_rows + row, scales, mask=runs < num_runs)
        codes = rounded(x, scales[:, None])
    else:
        codes = rounded(x, tl.load(scales_ptr))
    tl.store(codes_ptr + row * columns + at, codes, mask=at < columns)
