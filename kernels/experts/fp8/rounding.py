"""Inputs of experts rounded to 8 bits, in Triton: each kernel starts while the one before it ends.

Scales and codes are those of `kernels/linear/portable/fp8_inputs.py`, to the bit.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
# The signatures of jitted functions are Triton's: only their constexpr parameters are annotated.

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.experts.routing.dependent import begin, launches_ahead
from kernels.linear.formats.fp8_weights import BLOCK as _BLOCK
from kernels.linear.formats.fp8_weights import E4M3
from kernels.linear.portable.fp8_inputs import RUN, largest_of, rounded, scale_of

_COLUMNS = 4096  # that a program holds at once
_RUNS = 16  # that a program of a part of a row rounds


@triton.jit(do_not_specialize=["num_rows"])
def hallmark_experts_round_runs(
    x_ptr, codes_ptr, scales_ptr, num_rows, stride_x, size_in, RUNS: tl.constexpr, IS_DEPENDENT: tl.constexpr
):
    """One program: RUNS runs of 128 numbers of a row. codes [rows, size_in]; scales [size_in / 128, rows]."""
    begin(IS_DEPENDENT)
    row = tl.program_id(0).to(tl.int64)
    runs = tl.program_id(1) * RUNS + tl.arange(0, RUNS)
    columns = runs[:, None] * RUN + tl.arange(0, RUN)[None, :]
    is_inside = columns < size_in
    x = tl.load(x_ptr + row * stride_x + columns, mask=is_inside, other=0.0).to(tl.float32)
    scales = scale_of(largest_of(x, 1))
    tl.store(scales_ptr + runs * num_rows + row, scales, mask=runs * RUN < size_in)
    tl.store(codes_ptr + row * size_in + columns, rounded(x, scales[:, None]), mask=is_inside)


@triton.jit
def hallmark_experts_round_rows(
    x_ptr, codes_ptr, scales_ptr, stride_x, size_in, BLOCK: tl.constexpr, IS_DEPENDENT: tl.constexpr
):
    """One program: a row by its largest. codes [rows, size_in]; scales [rows]."""
    begin(IS_DEPENDENT)
    row = tl.program_id(0).to(tl.int64)
    offsets = tl.arange(0, BLOCK)
    largest = tl.full([1], 0.0, tl.float32)
    for first in range(0, size_in, BLOCK):
        at = first + offsets
        x = tl.load(x_ptr + row * stride_x + at, mask=at < size_in, other=0.0).to(tl.float32)
        largest = tl.maximum(largest, largest_of(x, 0), propagate_nan=tl.PropagateNan.ALL)
    scale = scale_of(largest)
    tl.store(scales_ptr + row + tl.arange(0, 1), scale)
    for first in range(0, size_in, BLOCK):
        at = first + offsets
        x = tl.load(x_ptr + row * stride_x + at, mask=at < size_in, other=0.0).to(tl.float32)
        tl.store(codes_ptr + row * size_in + at, rounded(x, scale), mask=at < size_in)


def empty_rounded(num_rows: int, size_in: int, device: torch.device, *, in_blocks: bool) -> tuple[Tensor, Tensor]:
    """Return codes and scales as those of `rounded_rows`, not yet filled."""
    scales = torch.empty((size_in // _BLOCK, num_rows) if in_blocks else num_rows, device=device)
    return torch.empty(num_rows, size_in, dtype=E4M3, device=device), scales


def rounded_rows(x: Tensor, *, in_blocks: bool) -> tuple[Tensor, Tensor]:
    """Return the codes of x [rows, size_in], whose last dim is contiguous and whole blocks of 128, and its scales.

    codes [rows, size_in] e4m3; scales fp32 [size_in / 128, rows] in blocks, else [rows].
    """
    (num_rows, size_in), device = x.shape, x.device
    codes, scales = empty_rounded(num_rows, size_in, device, in_blocks=in_blocks)
    ahead = launches_ahead(device)
    options = {"IS_DEPENDENT": ahead, "launch_pdl": ahead}
    if not in_blocks:
        block = min(_COLUMNS, triton.next_power_of_2(size_in))
        hallmark_experts_round_rows[(num_rows,)](x, codes, scales, x.stride(0), size_in, BLOCK=block, **options)
        return codes, scales
    num_runs = size_in // _BLOCK
    runs = min(_RUNS, triton.next_power_of_2(num_runs))
    hallmark_experts_round_runs[(num_rows, triton.cdiv(num_runs, runs))](
        x, codes, scales, num_rows, x.stride(0), size_in, RUNS=runs, num_warps=max(1, runs // 4), **options
    )
    return codes, scales
