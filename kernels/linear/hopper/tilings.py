"""Tilings of the products of `skinny.py` and `wide.py`, by fixed rules: nothing is tuned in service."""

from dataclasses import dataclass
from math import ceil

ROW_COUNTS = (8, 16, 32)  # rows of x, padded
MAX_ROWS = ROW_COUNTS[-1]  # 4 to 30% ahead of cuBLAS still; of more rows, x would take more of a box than the weights
WIDE_ROW_COUNTS = (64, 128)  # the same of the wide matmul
BOX = 64  # rows (of all folds and parts together) and columns of a box: 8 KB, a swizzle atom wide
_BYTES_OF_COLUMN = BOX * 2  # of a box, and of a row
# What a byte of weights costs with folds, whose boxes hold more of x than of new weights (one H200, batch 1 to 32).
_COST_OF_FOLDS = {1: 1.0, 2: 1.05, 4: 1.35}
# Of the 227 KB a program may have; the rest is for barriers and for sums across warps. One program a multiprocessor
# with a deep ring beats two with half of it by 1 to 13% (one H200, batch 1 to 32).
_RING_BYTES = 200 * 1024

_SIZE_TO_SPLIT = 2048  # of the inner dim: below, the exchange of sums costs more than it saves
# Share of the multiprocessors that clusters can hold at once: 30 of 4 programs fit where 33 would (one H200).
_IN_CLUSTERS_OF = {2: 1.0, 4: 0.9}
_FEWEST_OF_128 = 112  # fewer leave too much padding: 96 rows took 4 to 20% longer than 128 (one H200, 8B)


@dataclass(frozen=True, slots=True)
class SkinnyTiling:
    """The compiled constants of `hallmark_skinny_matmul`.

    rows    of a tile, of each part
    folds   segments of the inner dim in a box: rows * folds * parts = 64
    parts   2 where the weight is a gate and an up projection, and y is SwiGLU of them
    pad     rows of x, rounded up to a wgmma's N
    boxes   of a stage of the ring
    stages  of the ring
    """

    rows: int
    folds: int
    parts: int
    pad: int
    boxes: int
    stages: int
    has_bias: bool


def skinny_tiling(
    num_rows: int, size_out: int, size_in: int, processors: int, *, parts: int = 1, has_bias: bool = False
) -> SkinnyTiling | None:
    """The tiling for x [num_rows, size_in] and y [num_rows, size_out]; None where another matmul must serve.

    The least work for the busiest program: few rows to a tile spread them well, many read x less often.
    """
    if not 0 < num_rows <= MAX_ROWS:
        return None
    pad = next(pad for pad in ROW_COUNTS if num_rows <= pad)
    fitting = [folds for folds in _COST_OF_FOLDS if size_in % (8 * folds) == 0 and BOX // folds // parts >= 16]
    if not fitting:
        return None

    def busiest(folds: int) -> float:
        rows = BOX // folds // parts
        return ceil(ceil(size_out / rows) / processors) * rows * _COST_OF_FOLDS[folds]

    # 64 programs that find their whole tile in the ring beat more with less: 3.0 against 3.3 us (N 4096, K 1024, H200).
    is_held = size_in * _BYTES_OF_COLUMN <= _RING_BYTES and size_out >= 64 * (BOX // parts)
    folds = 1 if is_held else min(fitting, key=busiest)
    bytes_of_box = (BOX + folds * pad) * _BYTES_OF_COLUMN
    boxes = 4 if bytes_of_box * 16 <= _RING_BYTES else 2
    return SkinnyTiling(
        BOX // folds // parts, folds, parts, pad, boxes, _RING_BYTES // (bytes_of_box * boxes), has_bias
    )


@dataclass(frozen=True, slots=True)
class WideTiling:
    """The compiled constants of `hallmark_wide_matmul`.

    rows    of weights in a tile, of both parts together
    parts   2 where the weight is a gate and an up projection, and y is SwiGLU of them
    pad     rows of x, rounded up
    splits  of the inner dim: programs of a cluster that share a tile
    boxes   of a stage of the ring
    stages  of the ring
    """

    rows: int
    parts: int
    pad: int
    splits: int
    boxes: int
    stages: int
    has_bias: bool

    @property
    def ring_bytes(self) -> int:
        return self.stages * self.boxes * (self.rows + self.pad) * _BYTES_OF_COLUMN

    @property
    def reducers(self) -> int:
        """Programs of a cluster that get a part of the sums: each some rows of x, by groups of 8."""
        return min(1 << self.splits.bit_length() - 1, self.pad // 8)


def tiling_for(
    num_rows: int, size_out: int, size_in: int, processors: int, *, parts: int = 1, has_bias: bool = False
) -> SkinnyTiling | WideTiling | None:
    """The tiling for x [num_rows, size_in] and y [num_rows, size_out]; None where another matmul must serve."""
    tiling = wide_tiling if num_rows > MAX_ROWS else skinny_tiling
    return tiling(num_rows, size_out, size_in, processors, parts=parts, has_bias=has_bias)


def wide_tiling(
    num_rows: int, size_out: int, size_in: int, processors: int, *, parts: int = 1, has_bias: bool = False
) -> WideTiling | None:
    """The same for more rows than the skinny matmul takes.

    As measured against cuBLAS on one H200 for two models, 48 to 128 rows. From 65 rows on a program reads more of x
    than of weights: only products that the library spreads badly, or whose gate and up it cannot join, are faster here,
    and only if few of the rows are padding.
    """
    if not MAX_ROWS < num_rows <= WIDE_ROW_COUNTS[-1] or size_out % 8 or size_in % 8:
        return None
    pad = next(pad for pad in WIDE_ROW_COUNTS if num_rows <= pad)
    tiles = ceil(size_out * parts / BOX)
    rows = BOX if tiles <= processors else 2 * BOX
    splits = 1
    while splits < 4 and size_in >= _SIZE_TO_SPLIT and tiles * 2 * splits <= _IN_CLUSTERS_OF[2 * splits] * processors:
        splits *= 2
    if num_rows > WIDE_ROW_COUNTS[0] and (num_rows <= _FEWEST_OF_128 or (splits == 1 and parts == 1)):
        return None
    bytes_of_box = (rows + pad) * _BYTES_OF_COLUMN
    boxes = 2 if bytes_of_box * 8 <= _RING_BYTES else 1  # 256 bytes of a row of weights at once
    return WideTiling(rows, parts, pad, splits, boxes, _RING_BYTES // (bytes_of_box * boxes), has_bias)
