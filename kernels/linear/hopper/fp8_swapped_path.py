"""Products of 2 to 128 rows with weights of 8 bits by the kernel of `fp8_swapped.py`: two launches.

The first rounds the inputs, where the norm before them has not.
"""

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from kernels.calls.processors import num_processors
from kernels.linear.epilogue import Epilogue
from kernels.linear.formats.fp8_weights import Fp8BlocksWeight, Fp8Weight
from kernels.linear.hopper.few_bits_tilings import Fp8Scales
from kernels.linear.hopper.fp8_codes import Codes, codes_of
from kernels.linear.hopper.fp8_norm import round_norm
from kernels.linear.hopper.fp8_rounding import PaddedCodes, padded_codes
from kernels.linear.hopper.fp8_skinny_path import scales_of
from kernels.linear.hopper.fp8_swapped import launch_fp8_swapped
from kernels.linear.hopper.fp8_swapped_tilings import Fp8SwappedTiling, fp8_swapped_tiling
from kernels.linear.rounded_input import Input, RoundedInput, TakesRounded

_FEW_ROWS = 16


@dataclass(frozen=True, slots=True)
class RunFp8Swapped(TakesRounded):
    """Products of up to 128 rows: size_in a multiple of 16, size_out of 8, of SwiGLU with scales of blocks of 128."""

    def __call__(self, x: Input, weight: Fp8Weight, bias: Tensor | None, epilogue: Epilogue, out: Tensor, /) -> None:
        """Fill out [rows, size_out] with epilogue(x [rows, size_in] @ weight^T + bias), x rounded as the format says.

        The weight is read without waiting for the kernel before this call, so it must not have come from there. Raises
        ValueError for sizes that the kernel does not take.
        """
        rows, size_in = x.shape
        tiling = _tiling(out.device, rows, out.shape[1], size_in, epilogue.parts, bias is not None, scales_of(weight))
        if tiling is None:
            raise ValueError(f"the swapped matmul of 8 bits does not take {rows} rows of {size_in} columns")
        codes, scales = (x.codes, x.scales) if isinstance(x, RoundedInput) else _codes_of(x, weight)
        launch_fp8_swapped(codes, scales, weight.codes, weight.scales, bias, out, tiling)

    def round_norm(
        self, x: Tensor, residual: Tensor | None, norm: Tensor, eps: float, weight: Fp8Weight, /
    ) -> tuple[Tensor, Tensor]:
        return round_norm(x, residual, norm, eps, weight)


run_fp8_swapped = RunFp8Swapped()


def _codes_of(x: Tensor, weight: Fp8Weight) -> Codes | PaddedCodes:
    """Round x: a few rows, whose tensor map has one box, by several programs each."""
    if x.shape[0] <= _FEW_ROWS and not isinstance(weight, Fp8BlocksWeight):
        return codes_of(x, weight)
    return padded_codes(x, weight)


# A pure function of what it is given: the cache holds no state.
@lru_cache(maxsize=4096)
def _tiling(
    device: torch.device, num_rows: int, size_out: int, size_in: int, parts: int, has_bias: bool, scales: Fp8Scales
) -> Fp8SwappedTiling | None:
    processors = num_processors(device)
    return fp8_swapped_tiling(num_rows, size_out, size_in, processors, parts=parts, has_bias=has_bias, scales=scales)
