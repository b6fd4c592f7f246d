"""Products of up to 64 rows with weights of 8 bits: one launch of one row, two of more.

The first of two rounds the inputs.
"""

from functools import lru_cache

import torch
from torch import Tensor

from kernels.calls.processors import num_processors
from kernels.linear.epilogue import Epilogue
from kernels.linear.formats.fp8_weights import Fp8BlocksWeight, Fp8StaticWeight, Fp8Weight
from kernels.linear.hopper.few_bits_tilings import Fp8Scales, Fp8SkinnyTiling, fp8_skinny_tiling, one_row_tiling
from kernels.linear.hopper.fp8_codes import codes_of
from kernels.linear.hopper.fp8_one_row import launch_fp8_one_row
from kernels.linear.hopper.fp8_skinny import launch_fp8_skinny


def run_fp8_skinny(x: Tensor, weight: Fp8Weight, bias: Tensor | None, epilogue: Epilogue, out: Tensor) -> None:
    """Fill out [rows, size_out] with epilogue(x [rows, size_in] @ weight^T + bias), x rounded as the format says.

    The weight is read without waiting for the kernel before this call, so it must not have come from there. Raises
    ValueError for sizes that the kernel does not take.
    """
    scales = scales_of(weight)
    sizes = x.shape[0], out.shape[1], x.shape[1]
    tiling = _tiling(x.device, *sizes, epilogue.parts, bias is not None, scales)
    if tiling is None:
        raise ValueError(f"the skinny matmul of 8 bits does not take {x.shape[0]} rows of {x.shape[1]} columns")
    if x.shape[0] == 1:
        given = weight.input_scales if isinstance(weight, Fp8StaticWeight) else None
        launch_fp8_one_row(x, given, weight.codes, weight.scales, bias, out, one_row_tiling(tiling, x.shape[1]))
        return
    codes = codes_of(x, weight)
    launch_fp8_skinny(codes.codes, codes.scales, weight.codes, weight.scales, bias, out, tiling)


def scales_of(weight: Fp8Weight) -> Fp8Scales:
    if isinstance(weight, Fp8BlocksWeight):
        return Fp8Scales.BLOCKS
    return Fp8Scales.STATIC if isinstance(weight, Fp8StaticWeight) else Fp8Scales.ROWS


# A pure function of what it is given: the cache holds no state.
@lru_cache(maxsize=4096)
def _tiling(
    device: torch.device, num_rows: int, size_out: int, size_in: int, parts: int, has_bias: bool, scales: Fp8Scales
) -> Fp8SkinnyTiling | None:
    return fp8_skinny_tiling(num_rows, size_out, size_in, num_processors(device), parts, has_bias, scales)
