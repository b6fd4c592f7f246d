"""Products of 33 to 128 rows by the kernel of `wide.py`, where it is measured to be ahead of the library."""

from functools import lru_cache
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kernels.calls.processors import num_processors
from kernels.linear.epilogue import Epilogue
from kernels.linear.hopper.tilings import WideTiling, wide_tiling
from kernels.linear.hopper.wide import launch_wide

if TYPE_CHECKING:
    from kernels.linear.weights import PlainWeight


def run_wide(x: Tensor, weight: "PlainWeight", bias: Tensor | None, epilogue: Epilogue, out: Tensor) -> None:
    """Fill out [rows, size_out] with epilogue(x [rows, size_in] @ weight^T + bias), in 16 bits on sm_90.

    The weight is read without waiting for the kernel before this call, so it must not have come from there. Raises
    ValueError for rows that the tilings leave to the library.
    """
    tiling = _tiling(x.device, x.shape[0], out.shape[1], x.shape[1], epilogue.parts, bias is not None)
    if tiling is None:
        raise ValueError(f"the wide matmul leaves {x.shape[0]} rows of {x.shape[1]} columns to the library")
    launch_wide(x, weight.values, bias, out, tiling)


# A pure function of what it is given: the cache holds no state.
@lru_cache(maxsize=4096)
def _tiling(
    device: torch.device, num_rows: int, size_out: int, size_in: int, parts: int, has_bias: bool
) -> WideTiling | None:
    return wide_tiling(num_rows, size_out, size_in, num_processors(device), parts=parts, has_bias=has_bias)
