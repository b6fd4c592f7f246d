"""Products of any number of rows by the kernel of `ordered.py`, whose sums all have one order."""

from functools import lru_cache
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kernels.calls.processors import num_processors
from kernels.linear.epilogue import Epilogue
from kernels.linear.ordered.matmul import launch_ordered
from kernels.linear.ordered.tilings import OrderedTiling, num_programs, ordered_tiling

if TYPE_CHECKING:
    from kernels.linear.weights import PlainWeight


def run_ordered(x: Tensor, weight: "PlainWeight", bias: Tensor | None, epilogue: Epilogue, out: Tensor) -> None:
    """Fill out [rows, size_out] with epilogue(x [rows, size_in] @ weight^T + bias), in 16 bits on sm_90.

    The weight is read without waiting for the kernel before this call, so it must not have come from there.
    """
    tiling, programs = _tiling(x.device, x.shape[0], out.shape[1], x.shape[1], epilogue, bias is not None)
    launch_ordered(x, weight.values, bias, out, tiling, programs)


# A pure function of what it is given: the cache holds no state.
@lru_cache(maxsize=4096)
def _tiling(
    device: torch.device, num_rows: int, size_out: int, size_in: int, epilogue: Epilogue, has_bias: bool
) -> tuple[OrderedTiling, int]:
    processors = num_processors(device)
    bytes_out = 4 if epilogue is Epilogue.FP32 else 2
    tiling = ordered_tiling(
        num_rows, size_out, size_in, processors, parts=epilogue.parts, has_bias=has_bias, bytes_out=bytes_out
    )
    return tiling, num_programs(tiling, num_rows, size_out, processors)
