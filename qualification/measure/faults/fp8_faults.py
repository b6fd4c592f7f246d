"""Wrong products with weights of 8 bits that must be refused: faults of scales and roundings that servers have had."""

from dataclasses import replace
from enum import Enum

import torch
from torch import Tensor

from kernels.linear.epilogue import Epilogue
from kernels.linear.formats.fp8_weights import BLOCK, E4M3, LARGEST, Fp8StaticWeight, Fp8Weight, scales_of_rows
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
    ROUNDED_BY_THE_BATCH = "inputs are rounded with the largest scale of the batch"  # a scale per tensor, not per token


def trial_shapes() -> tuple[LinearShape, ...]:
    """Small shapes, of which each fault shows in one at least."""
    sizes = {FP8_ROWS: (72, 40), FP8_STATIC: (72, 40), FP8_BLOCKS: (200, 300)}
    return tuple(LinearShape(Dtype.BF16, *size, LinearRows.LE_8, weight_format=it) for it, size in sizes.items())


def can_show_in(fault: Fp8Fault, shape: LinearShape) -> bool:
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
        product_of(_inputs(x, weight, fault), _numbers(weight, fault), bias, epilogue, out)

    return run


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
