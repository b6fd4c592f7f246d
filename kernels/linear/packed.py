"""Products of few rows with small weights on a CPU: weights stay in 16 bits, activations and sums are fp32.

FBGEMM multiplies fp32 rows with a matrix that it has packed into panels of fp16. It reads half the bytes and packs
once, where MKL packs a matrix again in each call: 8 rows take 23 us in place of 46 (256 x 512) and 175 in place of
380 (256 x 4096) on one core (AMD Milan, AVX2, torch 2.13). A packed weight has exactly the values of the fp32 one:
those of a checkpoint in 16 bits fit after a shift by a power of two, and where one does not nothing is packed.
"""

import math
import warnings
from dataclasses import dataclass

import torch
from torch import Tensor

# One core does 50 of these a nanosecond; beyond 0.7 ms a product is worth sharing among cores, which this one is not.
# A step of one prompt of 64 tokens of the demo model takes 10.6 ms so, and with a bound of 2^24 (51 rows) 16.2.
MAX_MULTIPLY_ADDS = 2**25
MIN_ROWS = 16  # a matrix that may not even have so many is left to all cores
_MAX_FP16_EXPONENT = 15  # values below 2^15 leave room for any rounding


@dataclass(frozen=True, slots=True)
class PackedWeight:
    """A weight [size_out, size_in], as fp16 panels of weight / unit."""

    panels: Tensor
    unit: float  # a power of two
    max_rows: int  # more are faster by a matmul that uses all cores

    def takes(self, x: Tensor) -> bool:
        """Whether `product` is the way for these rows."""
        return 0 < x.shape[0] <= self.max_rows

    def product(self, x: Tensor) -> Tensor:
        """x [M, size_in] fp32 @ weight^T: [M, size_out] fp32."""
        y = product_in_units(x, self.panels)
        return y if self.unit == 1 else y.mul_(self.unit)


def product_in_units(x: Tensor, panels: Tensor) -> Tensor:
    """`PackedWeight.product` over its unit."""
    return torch.fbgemm_linear_fp16_weight_fp32_activation(x, panels, None)


def product_in_units_into(x: Tensor, panels: Tensor, out: Tensor) -> None:
    """As `product_in_units`, into `out` [M, size_out] fp32, contiguous. Raises TypeError where torch cannot."""
    torch.fbgemm_linear_fp16_weight_fp32_activation(x, panels, None, out)


def packed(weight: Tensor) -> PackedWeight | None:
    """weight [size_out, size_in] packed; None where that would lose a bit, be no faster, or where torch cannot."""
    if weight.device.type != "cpu" or weight.dtype is not torch.float32 or not weight.numel():
        return None
    max_rows = MAX_MULTIPLY_ADDS // weight.numel()
    if max_rows < MIN_ROWS:
        return None
    largest = float(weight.abs().max())
    if not 0 < largest < math.inf:
        return None
    unit = 2.0 ** (math.frexp(largest)[1] - _MAX_FP16_EXPONENT)
    if not 2.0**-100 < unit < 2.0**100:  # products must neither overflow nor vanish
        return None
    shifted = weight / unit
    if not torch.equal(shifted.half().float(), shifted):
        return None
    panels = _panels(shifted)
    return None if panels is None else PackedWeight(panels, unit, max_rows)


def _panels(weight: Tensor) -> Tensor | None:
    """None where this torch or this CPU has no FBGEMM: it wants AVX2."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # once a process torch tells that these functions will go some day
        try:
            panels = torch.fbgemm_pack_gemm_matrix_fp16(weight.contiguous())
            product_in_units(weight[:1], panels)
        except (AttributeError, RuntimeError):
            return None
    return panels
