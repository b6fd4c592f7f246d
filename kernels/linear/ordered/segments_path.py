"""Products with small weights, summed in one order of four segments of the inner dim: "k16x4".

A small weight is few tiles, whose time is that of one wgmma behind the other: as many as the inner dim has steps of 16.
Four segments side by side take a fourth of it. Up to 32 rows of x the kernel of `skinny.py` multiplies, by its folds;
more rows that of `ordered.py`.
"""

from functools import lru_cache
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kernels.calls.processors import num_processors
from kernels.linear.epilogue import Epilogue
from kernels.linear.hopper.skinny import launch_skinny
from kernels.linear.hopper.tilings import BOX, MAX_ROWS, ROW_COUNTS, SkinnyTiling
from kernels.linear.ordered.matmul import launch_ordered
from kernels.linear.ordered.tilings import SEGMENTS, OrderedTiling, num_programs, ordered_tiling

if TYPE_CHECKING:
    from kernels.linear.weights import PlainWeight

_RING_BYTES = 200 * 1024


def run_segments(
    x: Tensor,
    weight: "PlainWeight",
    bias: Tensor | None,
    epilogue: Epilogue,  # noqa: ARG001  `out` has the dtype that it asks for
    out: Tensor,
) -> None:
    """Fill out [rows, size_out] with epilogue(x [rows, size_in] @ weight^T + bias), in 16 bits on sm_90.

    The epilogue is no SwiGLU, size_in a multiple of 32. The weight is read without waiting for the kernel before this
    call, so it must not have come from there.
    """
    num_rows = x.shape[0]
    if num_rows <= MAX_ROWS:
        launch_skinny(x, weight.values, bias, out, folded_tiling(num_rows, has_bias=bias is not None))
        return
    tiling, programs = _tiling(x.device, num_rows, out.shape[1], x.shape[1], out.element_size(), bias is not None)
    launch_ordered(x, weight.values, bias, out, tiling, programs)


# A pure function of what it is given: the cache holds no state.
@lru_cache(maxsize=256)
def folded_tiling(num_rows: int, *, has_bias: bool) -> SkinnyTiling:
    """The tiling of up to 32 rows: boxes of 16 rows of each of four segments."""
    pad = next(pad for pad in ROW_COUNTS if num_rows <= pad)
    bytes_of_box = (BOX + SEGMENTS * pad) * BOX * 2
    boxes = 4 if bytes_of_box * 16 <= _RING_BYTES else 2
    return SkinnyTiling(BOX // SEGMENTS, SEGMENTS, 1, pad, boxes, _RING_BYTES // (bytes_of_box * boxes), has_bias)


@lru_cache(maxsize=4096)
def _tiling(
    device: torch.device, num_rows: int, size_out: int, size_in: int, bytes_out: int, has_bias: bool
) -> tuple[OrderedTiling, int]:
    processors = num_processors(device)
    tiling = ordered_tiling(
        num_rows, size_out, size_in, processors, segments=SEGMENTS, has_bias=has_bias, bytes_out=bytes_out
    )
    return tiling, num_programs(tiling, num_rows, size_out, processors)
