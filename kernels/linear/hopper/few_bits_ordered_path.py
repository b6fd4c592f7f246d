"""Products with weights of 8 and 4 bits whose sums have one order, whatever the number of rows.

64 rows at a time (of 4 bits 16) by the kernels for a few rows, with tiles that the weight's sizes alone choose. A
matrix unit sums 16 columns after 16 of a half of the inner dim (of 4 bits: of a group, and group after group), and
both halves are added in the end; a row is rounded by itself. More rows read the weight again and again: the price.
"""

from torch import Tensor

from kernels.linear.epilogue import Epilogue
from kernels.linear.formats.fp8_weights import Fp8Weight
from kernels.linear.formats.int4_weights import Int4Weight
from kernels.linear.hopper.few_bits_tilings import (
    COLUMNS,
    MOST_OF_4_BITS,
    ROW_COUNTS,
    int4_tiling_of,
    tiling_of,
)
from kernels.linear.hopper.fp8_codes import codes_of
from kernels.linear.hopper.fp8_skinny import launch_fp8_skinny
from kernels.linear.hopper.fp8_skinny_path import scales_of
from kernels.linear.hopper.int4_skinny import launch_int4_skinny

_MOST = ROW_COUNTS[-1]
HALVES = 2


def run_fp8_ordered(x: Tensor, weight: Fp8Weight, bias: Tensor | None, epilogue: Epilogue, out: Tensor) -> None:
    """Fill out [rows, size_out] with epilogue(x [rows, size_in] @ weight^T + bias), x rounded as the format says."""
    rows = COLUMNS // HALVES // epilogue.parts
    for start in range(0, x.shape[0], _MOST):
        some, to = x[start : start + _MOST], out[start : start + _MOST]
        tiling = tiling_of(rows, HALVES, epilogue.parts, some.shape[0], 1, bias is not None, scales_of(weight))
        codes = codes_of(some, weight)
        launch_fp8_skinny(codes.codes, codes.scales, weight.codes, weight.scales, bias, to, tiling)


def run_int4_ordered(x: Tensor, weight: Int4Weight, bias: Tensor | None, epilogue: Epilogue, out: Tensor) -> None:
    """Fill out [rows, size_out] with epilogue(x [rows, size_in] @ weight^T + bias)."""
    rows = COLUMNS // HALVES // epilogue.parts
    for start in range(0, x.shape[0], MOST_OF_4_BITS):
        some, to = x[start : start + MOST_OF_4_BITS], out[start : start + MOST_OF_4_BITS]
        sizes = some.shape[0], 1, bias is not None, weight.group, x.shape[1]
        tiling = int4_tiling_of(rows, HALVES, epilogue.parts, *sizes)
        launch_int4_skinny(some, weight.codes, weight.scales, weight.zeros, bias, to, tiling)
