"""Inputs of products rounded to numbers e4m3, in Triton: a row, 128 numbers, or all by one scale.

The scales and the roundings are those of `fp8_weights.py`, to the bit: a product is judged by the numbers that it was
given. So quotients are rounded as IEEE 754 says, and a number to the nearest e4m3, ties to even, by fp32 sums, whatever
the machine's own conversion does.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
# The signatures of jitted functions are Triton's: only their constexpr parameters are annotated.

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.linear.formats.fp8_weights import BLOCK as _BLOCK
from kernels.linear.formats.fp8_weights import E4M3, Fp8RowsWeight, Fp8StaticWeight, Fp8Weight
from kernels.linear.formats.fp8_weights import LARGEST as _LARGEST
from kernels.linear.formats.fp8_weights import LEAST_SCALE as _LEAST_SCALE
from kernels.linear.portable.launches import Launch

RUN = tl.constexpr(_BLOCK)
LARGEST = tl.constexpr(_LARGEST)
LEAST_SCALE = tl.constexpr(_LEAST_SCALE)
_LEAST_NORMAL = tl.constexpr(2.0**-6)  # of e4m3: below, numbers are as far apart as there
# A sum with 1.5 * 2^20 times the power of two below a number is rounded where e4m3 rounds that number.
_ROUNDING = tl.constexpr(1.5 * 2.0**20)

_COLUMNS = 4096  # that a program holds at once
_RUNS = 16  # that a program of a part of a row rounds


@triton.jit
def largest_of(x, AXIS: tl.constexpr):
    """The largest magnitude along an axis; NaN where one is."""
    has_nan = tl.max((x != x).to(tl.int32), AXIS) > 0  # noqa: PLR0124 -- true of NaN alone
    return tl.where(has_nan, float("nan"), tl.max(tl.abs(x), AXIS))


@triton.jit
def scale_of(largest):
    """The scale by which a largest magnitude becomes 448."""
    scale = tl.div_rn(largest, LARGEST)
    return tl.maximum(scale, LEAST_SCALE, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def rounded(x, scale):
    """The numbers e4m3 nearest to x / scale, those beyond 448 cut off; both fp32."""
    values = tl.div_rn(x, scale)
    values = tl.minimum(values, LARGEST, propagate_nan=tl.PropagateNan.ALL)
    values = tl.maximum(values, -LARGEST, propagate_nan=tl.PropagateNan.ALL)
    power = (values.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
    by = tl.maximum(power, _LEAST_NORMAL) * _ROUNDING
    return ((values + by) - by).to(tl.float8e4nv)


@triton.jit
def hallmark_fp8_round_rows(x_ptr, codes_ptr, scales_ptr, stride_x, size_in, columns, BLOCK: tl.constexpr):
    """One program: a row by its largest. codes [rows, columns], zeros from size_in on; scales [1, rows]."""
    row = tl.program_id(0).to(tl.int64)
    offsets = tl.arange(0, BLOCK)
    largest = tl.full([1], 0.0, tl.float32)
    for first in range(0, size_in, BLOCK):
        at = first + offsets
        x = tl.load(x_ptr + row * stride_x + at, mask=at < size_in, other=0.0).to(tl.float32)
        largest = tl.maximum(largest, largest_of(x, 0), propagate_nan=tl.PropagateNan.ALL)
    scale = scale_of(largest)
    tl.store(scales_ptr + row + tl.arange(0, 1), scale)
    for first in range(0, columns, BLOCK):
        at = first + offsets
        x = tl.load(x_ptr + row * stride_x + at, mask=at < size_in, other=0.0).to(tl.float32)
        tl.store(codes_ptr + row * columns + at, rounded(x, scale), mask=at < columns)


@triton.jit(do_not_specialize=["num_rows"])
def hallmark_fp8_round_runs(
    x_ptr, codes_ptr, scales_ptr, num_rows, stride_x, size_in, columns,
    RUNS: tl.constexpr, HAS_GIVEN: tl.constexpr,
):  # fmt: skip
    """One program: RUNS runs of 128 numbers of a row, each by its largest; or all by the scale that is given.

    codes [rows, columns], zeros from size_in on; scales [columns / 128, rows], or [1] that is given.
    """
    row = tl.program_id(0).to(tl.int64)
    runs = tl.program_id(1) * RUNS + tl.arange(0, RUNS)
    at = runs[:, None] * RUN + tl.arange(0, RUN)[None, :]
    x = tl.load(x_ptr + row * stride_x + at, mask=at < size_in, other=0.0).to(tl.float32)
    if HAS_GIVEN:
        scale = tl.full([RUNS], 0.0, tl.float32) + tl.load(scales_ptr)
    else:
        scale = scale_of(largest_of(x, 1))
        tl.store(scales_ptr + runs.to(tl.int64) * num_rows + row, scale, mask=runs * RUN < columns)
    tl.store(codes_ptr + row * columns + at, rounded(x, scale[:, None]), mask=at < columns)


class RoundedInputs(NamedTuple):
    """Inputs [rows, size_in] as a product multiplies them, once `launch` has run.

    codes   [rows, size_in up to the next 128] e4m3, zeros behind the inputs' columns
    scales  fp32: [1, rows], [1] for all, or [runs, rows] of 128 columns each
    """

    codes: Tensor
    scales: Tensor
    launch: Launch


def rounded_inputs(x: Tensor, weight: Fp8Weight) -> RoundedInputs:
    """Return x [rows, size_in], last dim contiguous, as the weight's format says that it is rounded."""
    num_rows, size_in = x.shape
    num_runs = triton.cdiv(size_in, _BLOCK)
    columns = num_runs * _BLOCK
    codes = torch.empty(num_rows, columns, dtype=E4M3, device=x.device)
    sizes = x.stride(0), size_in, columns
    if isinstance(weight, Fp8RowsWeight):
        scales = torch.empty(1, num_rows, device=x.device)
        block = {"BLOCK": min(_COLUMNS, triton.next_power_of_2(columns))}
        launch = Launch(hallmark_fp8_round_rows, (num_rows,), (x, codes, scales, *sizes), block)
        return RoundedInputs(codes, scales, launch)
    given = weight.input_scales[0] if isinstance(weight, Fp8StaticWeight) else None
    scales = torch.empty(num_runs, num_rows, device=x.device) if given is None else given
    runs = min(_RUNS, triton.next_power_of_2(num_runs))
    grid = num_rows, triton.cdiv(num_runs, runs)
    options = {"RUNS": runs, "HAS_GIVEN": given is not None}
    arguments = x, codes, scales, num_rows, *sizes
    return RoundedInputs(codes, scales, Launch(hallmark_fp8_round_runs, grid, arguments, options))
