"""Wrong products with weights of 8 bits that must be refused: faults of scales and roundings that servers have had."""

from dataclasses import replace
from enum import Enum

import torch
from torch import Tensor

from kernels.linear.epilogue import Epilogue
from kernels.linear.formats.fp8_weights import BLOCK, E4M3, LARGEST, Fp8StaticWeight, Fp8Weight, rounded, scales_of_rows
from kernels.linear.paths import RunLinear
from kernels.linear.shape import FP8_BLOCKS, FP8_ROWS, FP8_STATIC, LinearShape
from kernels.vocabulary.row_buckets import LinearRows
from kernels.vocabulary.shape import Dtype
from qualification.measure.faults.linear_faults import product_of


class Fp8Fault(Enum):
    """A fault of a wrong kernel or loader; the comment says how a real one comes by it."""

    NONE = "none"  # the checker must pass this one
    NEIGHBOURS_SCALE = "a row's or block's scale is its neighbour's"  # an index off by one
    STRIDE_SWAPPED = "scales of blocks are read by the stride of the other dim"
    LAST_BLOCK_UNSCALED = "the last block, which is not full, has no scale"  # a loop bound rounded down
    OTHER_EXPONENT = "numbers e4m3 are read as e5m2"
    NO_SATURATION = "inputs beyond the largest number are not cut off"  # a conversion without satfinite
    RECIPROCAL = "numbers are divided by scales"  # as the name of scale_inv says
    INPUTS_AS_THEY_ARE = "inputs are not rounded"
    NEVER_ENDED = "what matrix units of 8 bits sum is never added up in fp32"  # their fast way of adding
    ROUNDED_BY_THE_BATCH = "inputs are rounded with the largest scale of the batch"  # a scale per tensor, not per token


_SUMMED = LinearShape(Dtype.BF16, 1024, 16, LinearRows.LE_128, weight_format=FP8_ROWS)
_STEP, _DIGITS = 32, 13  # of Hopper's matrix units: columns, and bits behind the first one of a step's largest term


def trial_shapes() -> tuple[LinearShape, ...]:
    """Small shapes, of which each fault shows in one at least; matrix units may take 8 bits of the last one's rows."""
    sizes = {FP8_ROWS: (72, 40), FP8_STATIC: (72, 40), FP8_BLOCKS: (200, 300)}
    few = (LinearShape(Dtype.BF16, *size, LinearRows.LE_8, weight_format=it) for it, size in sizes.items())
    return (*few, _SUMMED)


def can_show_in(fault: Fp8Fault, shape: LinearShape) -> bool:
    if shape == _SUMMED or fault is Fp8Fault.NEVER_ENDED:
        return shape == _SUMMED and fault in (Fp8Fault.NONE, Fp8Fault.NEVER_ENDED)
    is_blocks, is_static = shape.weight_format == FP8_BLOCKS, shape.weight_format == FP8_STATIC
    return {
        Fp8Fault.STRIDE_SWAPPED: is_blocks,
        Fp8Fault.LAST_BLOCK_UNSCALED: is_blocks,
        Fp8Fault.NO_SATURATION: is_static,
        Fp8Fault.ROUNDED_BY_THE_BATCH: not is_static,
    }.get(fault, True)


def wrong_fp8(fault: Fp8Fault) -> RunLinear:
    """Return a product with this fault."""

    def run(x: Tensor, weight: Fp8Weight, bias: Tensor | None, epilogue: Epilogue, out: Tensor) -> None:
        if fault is Fp8Fault.NEVER_ENDED:
            out.copy_(summed_by_units(x, weight, x.shape[1]))
        else:
            product_of(_inputs(x, weight, fault), _numbers(weight, fault), bias, epilogue, out)

    return run


def summed_by_units(x: Tensor, weight: Fp8Weight, columns: int) -> Tensor:
    """Return x [n, K] @ weight [m, K]^T, of a scale a row, as Hopper's matrix units of 8 bits sum codes.

    A step cuts its terms, the sum so far among them, and then their sum, to 13 bits behind the first one of the largest
    term. The sums of each `columns` are added up in fp32.
    """
    scales = scales_of_rows(x)
    inputs, numbers = rounded(x.float(), scales).double(), weight.codes.double()
    total = torch.zeros(inputs.shape[0], numbers.shape[0], dtype=torch.float32, device=x.device)
    for start in range(0, x.shape[1], columns):
        sums = torch.zeros_like(total, dtype=torch.float64)
        for first in range(start, min(start + columns, x.shape[1]), _STEP):
            step = slice(first, min(first + _STEP, start + columns))
            terms = torch.cat([inputs[:, None, step] * numbers[None, :, step], sums[..., None]], -1)
            sums = _cut(terms, terms.abs().amax(-1, keepdim=True)).sum(-1)
            sums = _cut(sums, sums.abs())
        total += sums
    return total * scales * weight.scales.T


def _cut(values: Tensor, largest: Tensor) -> Tensor:
    unit = torch.ldexp(torch.ones_like(largest), torch.frexp(largest).exponent - 1 - _DIGITS)
    return torch.where(torch.isfinite(unit), (values / unit).trunc() * unit, torch.nan)


def _numbers(weight: Fp8Weight, fault: Fp8Fault) -> Tensor:
    scales = weight.scales
    match fault:
        case Fp8Fault.NEIGHBOURS_SCALE:
            scales = scales.roll(1, 0)
        case Fp8Fault.STRIDE_SWAPPED:
            scales = scales.T.reshape(scales.shape)
        case Fp8Fault.LAST_BLOCK_UNSCALED:
            scales = scales.clone()
            scales[weight.size[0] // BLOCK :] = 1
        case Fp8Fault.RECIPROCAL:
            scales = 1 / scales
        case Fp8Fault.OTHER_EXPONENT:
            values = weight.codes.view(torch.float8_e5m2).double().nan_to_num()
            ones = replace(weight, codes=torch.ones_like(weight.codes.float()).to(E4M3))
            return values * ones.dequantized()
    return replace(weight, scales=scales).dequantized().double()


def _inputs(x: Tensor, weight: Fp8Weight, fault: Fp8Fault) -> Tensor:
    if fault is Fp8Fault.INPUTS_AS_THEY_ARE:
        return x.double()
    if fault is Fp8Fault.NO_SATURATION and isinstance(weight, Fp8StaticWeight):
        scale = weight.input_scales[0].float()
        values = x.float() / scale
        codes = torch.where(values.abs() > LARGEST, torch.nan, values.clamp(-LARGEST, LARGEST).to(E4M3).float())
        return codes.double() * scale.double()
    if fault is Fp8Fault.ROUNDED_BY_THE_BATCH:
        scale = scales_of_rows(x.nan_to_num()).max()
        return (x.float() / scale).to(E4M3).double() * scale.double()
    return weight.as_multiplied(x).double()
