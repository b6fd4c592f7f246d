"""Products of up to 32 rows by the kernel of `skinny.py`."""

from functools import lru_cache
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kernels.calls.processors import num_processors
from kernels.linear.epilogue import Epilogue
from kernels.linear.hopper.skinny import launch_skinny
from kernels.linear.hopper.tilings import SkinnyTiling, skinny_tiling

if TYPE_CHECKING:
    from kernels.linear.weights import PlainWeight


def run_skinny(x: Tensor, weight: "PlainWeight", bias: Tensor | None, epilogue: Epilogue, out: Tensor) -> None:
    """Fill out [rows, size_out] with epilogue(x [rows, size_in] @ weight^T + bias), in 16 bits on sm_90.

    The weight is read without waiting for the kernel before this call, so it must not have come from there. Raises
    ValueError for more rows than the kernel takes.
    """
    tiling = _tiling(x.device, x.shape[0], out.shape[1], x.shape[1], epilogue.parts, bias is not None)
    if tiling is None:
        raise ValueError(f"the skinny matmul does not take {x.shape[0]} rows of {x.shape[1]} columns")
    launch_skinny(x, weight.values, bias, out, tiling)


# A pure function of what it is given: the cache holds no state.
@lru_cache(maxsize=4096)
def _tiling(
    device: torch.device, num_rows: int, size_out: int, size_in: int, parts: int, has_bias: bool
) -> SkinnyTiling | None:
    return skinny_tiling(num_rows, size_out, size_in, num_processors(device), parts=parts, has_bias=has_bias)
