"""Products of 2 to 256 rows with weights of 4 bits by the kernel of `int4_swapped.py`: one launch."""

from functools import lru_cache

import torch
from torch import Tensor

from kernels.calls.processors import num_processors
from kernels.linear.epilogue import Epilogue
from kernels.linear.formats.int4_weights import Int4Weight
from kernels.linear.hopper.int4_swapped import launch_int4_swapped
from kernels.linear.hopper.int4_swapped_tilings import Int4SwappedTiling, int4_swapped_tiling


def run_int4_swapped(x: Tensor, weight: Int4Weight, bias: Tensor | None, epilogue: Epilogue, out: Tensor) -> None:
    """Fill out [rows, size_out] with epilogue(x [rows, size_in] @ weight^T + bias).

    The weight is read without waiting for the kernel before this call, so it must not have come from there. Raises
    ValueError for sizes that the kernel does not take.
    """
    sizes = x.shape[0], out.shape[1], x.shape[1]
    tiling = _tiling(x.device, *sizes, epilogue.parts, bias is not None, weight.group)
    if tiling is None:
        raise ValueError(f"the swapped matmul of 4 bits does not take {x.shape[0]} rows of {x.shape[1]} columns")
    launch_int4_swapped(x, weight.codes, weight.scales, weight.zeros, bias, out, tiling)


# A pure function of what it is given: the cache holds no state.
@lru_cache(maxsize=4096)
def _tiling(
    device: torch.device, num_rows: int, size_out: int, size_in: int, parts: int, has_bias: bool, group: int
) -> Int4SwappedTiling | None:
    processors = num_processors(device)
    return int4_swapped_tiling(num_rows, size_out, size_in, processors, parts=parts, has_bias=has_bias, group=group)
