"""Wrong norms that round for a product, which must be refused: faults of fused norms and of scales of inputs."""

from dataclasses import dataclass
from enum import Enum

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.fused.norm import rms_norm
from kernels.linear.epilogue import Epilogue
from kernels.linear.formats.fp8_weights import (
    BLOCK,
    E4M3,
    LARGEST,
    Fp8BlocksWeight,
    Fp8StaticWeight,
    Fp8Weight,
    rounded,
    scales_of_rows,
    scales_of_runs,
    spread,
)
from kernels.linear.rounded_input import Input, RoundedInput, TakesRounded
from kernels.linear.shape import FP8_BLOCKS, FP8_STATIC, LinearShape
from qualification.measure.checks.norm_checks import numbers_of
from qualification.measure.faults.linear_faults import product_of


class NormFault(Enum):
    """A fault of a wrong kernel; the comment says how a real one comes by it."""

    NONE = "none"  # the checker must pass this one
    NO_SATURATION = "inputs beyond the largest number are not cut off"  # a conversion without satfinite
    RECIPROCAL = "inputs are multiplied by scales"  # which the kernel keeps beside their reciprocals
    NEIGHBOURS_SCALE = "a token's scale is its neighbour's"  # an index off by one
    NEXT_BLOCKS_SCALE = "a block's scale is the next one's"  # likewise
    NAN_SPREADS = "the scale of a row behind one that is NaN is NaN"  # a maximum that is not reset
    NAN_LOST = "a row that is NaN is rounded to zeros"  # a maximum that leaves NaN out
    NOT_IN_16_BITS = "the norm is rounded to 8 bits alone"  # kept in fp32 between both
    SUM_IN_32_BITS = "the norm is of a sum that was not rounded"  # which the next layer does not read
    RESIDUAL_KEPT = "the residual is not written"
    PADDING_UNWRITTEN = "codes behind the inputs' columns are what was there"  # a mask by the inputs' columns


def can_show_in(fault: NormFault, shape: LinearShape) -> bool:
    is_blocks, is_static = shape.weight_format == FP8_BLOCKS, shape.weight_format == FP8_STATIC
    return {
        NormFault.NO_SATURATION: is_static,
        NormFault.NEIGHBOURS_SCALE: not is_static,
        NormFault.NEXT_BLOCKS_SCALE: is_blocks,
        NormFault.NAN_SPREADS: not is_static,
    }.get(fault, True)


@dataclass(frozen=True, slots=True)
class WrongNorm(TakesRounded):
    """Right products, whose inputs a norm with this fault rounds."""

    fault: NormFault

    def __call__(self, x: Input, weight: Fp8Weight, bias: Tensor | None, epilogue: Epilogue, out: Tensor, /) -> None:
        inputs = numbers_of(x, weight) if isinstance(x, RoundedInput) else weight.as_multiplied(x).double()
        product_of(inputs, weight.dequantized().double(), bias, epilogue, out)

    def round_norm(
        self, x: Tensor, residual: Tensor | None, norm: Tensor, eps: float, weight: Fp8Weight, /
    ) -> tuple[Tensor, Tensor]:
        total = x.float() if residual is None else (residual.float() + x.float())
        if self.fault is not NormFault.SUM_IN_32_BITS:
            total = total.to(x.dtype)
        if residual is not None and self.fault is not NormFault.RESIDUAL_KEPT:
            residual.copy_(total)
        if self.fault is NormFault.NOT_IN_16_BITS:
            total = total.float()
        normed = rms_norm(total, norm, eps)
        if self.fault is NormFault.SUM_IN_32_BITS:
            normed = normed.to(x.dtype)
        if self.fault is NormFault.NAN_LOST:
            normed = normed.nan_to_num(0)
        return self._rounded(normed.float(), weight)

    def _rounded(self, values: Tensor, weight: Fp8Weight) -> tuple[Tensor, Tensor]:
        scales = self._scales(values, weight)
        of_each = spread(scales, values.shape[1], 1) if isinstance(weight, Fp8BlocksWeight) else scales
        if self.fault is NormFault.RECIPROCAL:
            of_each = 1 / of_each
        codes = rounded(values, of_each)
        if self.fault is NormFault.NO_SATURATION:
            is_beyond = (values / of_each).abs() > LARGEST
            codes = torch.where(is_beyond, torch.nan, codes.float()).to(E4M3)
        if self.fault is NormFault.NEIGHBOURS_SCALE:
            scales = scales.roll(1, 0)
        if self.fault is NormFault.NEXT_BLOCKS_SCALE:
            scales = scales.roll(-1, 1)
        behind = torch.nan if self.fault is NormFault.PADDING_UNWRITTEN else 0.0
        codes = F.pad(codes.float(), (0, -values.shape[1] % BLOCK), value=behind).to(E4M3)
        return codes, scales[0] if isinstance(weight, Fp8StaticWeight) else scales.T.contiguous()

    def _scales(self, values: Tensor, weight: Fp8Weight) -> Tensor:
        """Return the scales [rows, 1], [rows, runs], or [1, 1] that is given."""
        if isinstance(weight, Fp8StaticWeight):
            return weight.input_scales[:1]
        scales = scales_of_runs(values) if isinstance(weight, Fp8BlocksWeight) else scales_of_rows(values)
        if self.fault is NormFault.NAN_SPREADS:
            is_behind = scales.isnan().roll(1, 0)
            is_behind[0] = False
            scales = torch.where(is_behind, torch.nan, scales)
        return scales
