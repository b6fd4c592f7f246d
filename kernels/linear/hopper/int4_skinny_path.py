"""Products of up to 16 rows with weights of 4 bits: one launch."""

from functools import lru_cache

import torch
from torch import Tensor

from kernels.calls.processors import num_processors
from kernels.linear.epilogue import Epilogue
from kernels.linear.formats.int4_weights import Int4Weight
from kernels.linear.hopper.few_bits_tilings import Int4SkinnyTiling, int4_skinny_tiling
from kernels.linear.hopper.int4_one_row import launch_int4_one_row
from kernels.linear.hopper.int4_one_row_tilings import one_row_tiling
from kernels.linear.hopper.int4_skinny import launch_int4_skinny


def run_int4_skinny(x: Tensor, weight: Int4Weight, bias: Tensor | None, epilogue: Epilogue, out: Tensor) -> None:
    """Fill out [rows, size_out] with epilogue(x [rows, size_in] @ weight^T + bias).

    The weight is read without waiting for the kernel before this call, so it must not have come from there. Raises
    ValueError for sizes that the kernel does not take.
    """
    sizes = x.shape[0], out.shape[1], x.shape[1]
    tiling = _tiling(x.device, *sizes, epilogue.parts, bias is not None, weight.group)
    if tiling is None:
        raise ValueError(f"the skinny matmul of 4 bits does not take {x.shape[0]} rows of {x.shape[1]} columns")
    if x.shape[0] == 1:
        of_one = one_row_tiling(tiling, *sizes[1:], num_processors(x.device))
        launch_int4_one_row(x, weight.codes, weight.scales, weight.zeros, bias, out, of_one)
        return
    launch_int4_skinny(x, weight.codes, weight.scales, weight.zeros, bias, out, tiling)


# A pure function of what it is given: the cache holds no state.
@lru_cache(maxsize=4096)
def _tiling(
    device: torch.device, num_rows: int, size_out: int, size_in: int, parts: int, has_bias: bool, group: int
) -> Int4SkinnyTiling | None:
    return int4_skinny_tiling(num_rows, size_out, size_in, num_processors(device), parts, has_bias, group)
