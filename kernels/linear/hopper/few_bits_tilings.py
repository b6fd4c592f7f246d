"""Tilings of the products of `fp8_skinny.py`, by fixed rules: nothing is tuned in service."""

from dataclasses import dataclass, replace
from enum import Enum

_MOST_BYTES = 212 * 1024  # of the ring and a row of x together: what is kept of one is rounded up to whole chunks
COLUMNS = 128  # of a box: a swizzle atom of 8 bits, and the columns that share a scale of blocks
ROW_COUNTS = (8, 16, 32, 64)  # rows of x, padded
MOST_OF_4_BITS = 16  # rows of x: a stage's x is in registers, which has no room for those of more
_RING_BYTES = 200 * 1024  # of the 227 KB a program may have, as in `tilings.py`


class Fp8Scales(Enum):
    """Scales of a product with a weight of 8 bits.

    ROWS    w [parts * N], x [M]
    STATIC  w [parts * N], x [1]
    BLOCKS  w [parts * N / 128, K / 128], x [K / 128, M]
    """

    ROWS = "rows"
    STATIC = "static"
    BLOCKS = "blocks"


@dataclass(frozen=True, slots=True)
class Fp8SkinnyTiling:
    """The compiled constants of `hallmark_fp8_skinny_matmul`.

    rows    of a tile, of each part
    folds   segments of the inner dim in a box
    parts   2 where the weight is a gate and an up projection, and y is SwiGLU of them
    pad     rows of x, rounded up to a wgmma's N
    boxes   of a stage of the ring
    stages  of the ring
    scales  a value of `Fp8Scales`
    """

    rows: int
    folds: int
    parts: int
    pad: int
    boxes: int
    stages: int
    has_bias: bool
    scales: str

    @property
    def box_rows(self) -> int:
        """Rows of a box, 64 for each warpgroup."""
        return self.rows * self.folds * self.parts

    @property
    def runs_of_chunk(self) -> int:
        """Runs of 128 columns of each fold that a program rounds at once: 16 columns a thread."""
        return self.box_rows // 16 * 4 // self.folds


def tiling_of(
    rows: int,
    folds: int,
    parts: int,
    num_rows: int,
    boxes: int,
    has_bias: bool,
    scales: Fp8Scales,
    ring_bytes: int = _RING_BYTES,
) -> Fp8SkinnyTiling:
    """The tiling with as many stages as the ring has room for."""
    pad = next(pad for pad in ROW_COUNTS if num_rows <= pad)
    bytes_of_stage = boxes * (rows * folds * parts + folds * pad) * COLUMNS
    return Fp8SkinnyTiling(rows, folds, parts, pad, boxes, ring_bytes // bytes_of_stage, has_bias, scales.value)


def one_row_tiling(tiling: Fp8SkinnyTiling, size_in: int, ring_bytes: int = _RING_BYTES) -> Fp8SkinnyTiling:
    """The same for the kernel that rounds one row itself, whose ring holds weights alone, beside codes and scales."""
    return replace(tiling, stages=_stages(tiling, size_in + size_in // 32, ring_bytes))


def fp8_skinny_tiling(
    num_rows: int, size_out: int, size_in: int, processors: int, parts: int, has_bias: bool, scales: Fp8Scales
) -> Fp8SkinnyTiling | None:
    """The tiling for x [num_rows, size_in] and y [num_rows, size_out]; None where another matmul must serve."""
    if not 0 < num_rows <= ROW_COUNTS[-1] or size_in % 16:
        return None
    columns = 16 if scales is not Fp8Scales.BLOCKS else COLUMNS
    rows, folds = _rows_and_folds(size_out, size_in, processors, parts, columns)
    if 16 < num_rows <= 32 and (rows, folds, parts) == (64, 1, 2):
        rows = (
            128  # gate and up of an 8B 48 us in place of 53 (H200): x is read half as often; of 64 rows it has no room
        )
    return tiling_of(rows, folds, parts, num_rows, 2 if num_rows <= 16 else 1, has_bias, scales)


@dataclass(frozen=True, slots=True)
class Int4SkinnyTiling:
    """The compiled constants of `hallmark_int4_skinny_matmul`: those of 8 bits, and of groups.

    group      columns that share a scale and a zero point; a stage has at least 4
    has_fours  whether each fold's groups are a multiple of 4
    """

    rows: int
    folds: int
    parts: int
    pad: int
    boxes: int
    stages: int
    has_bias: bool
    group: int
    has_fours: bool

    @property
    def box_rows(self) -> int:
        """Rows of a box, 64 for each warpgroup."""
        return self.rows * self.folds * self.parts

    @property
    def groups_of_chunk(self) -> int:
        """Groups of each fold of one row that a program copies at once: 8 columns a thread."""
        return max(1, self.box_rows // 16 * 256 // (self.group * self.folds))


def int4_tiling_of(
    rows: int,
    folds: int,
    parts: int,
    num_rows: int,
    boxes: int,
    has_bias: bool,
    group: int,
    size_in: int,
    ring_bytes: int = _RING_BYTES,
) -> Int4SkinnyTiling:
    """The tiling with as many stages as the ring has room for."""
    boxes = max(boxes, 4 * group // 256)
    pad = next(pad for pad in ROW_COUNTS if num_rows <= pad)
    bytes_of_stage = boxes * (rows * folds * parts // 2 + 2 * folds * pad) * 256
    has_fours = size_in % (4 * group * folds) == 0
    return Int4SkinnyTiling(rows, folds, parts, pad, boxes, ring_bytes // bytes_of_stage, has_bias, group, has_fours)


def int4_one_row_tiling(tiling: Int4SkinnyTiling, size_in: int, ring_bytes: int = _RING_BYTES) -> Int4SkinnyTiling:
    """The same for the kernel that keeps one row itself, whose ring holds weights alone."""
    return replace(tiling, stages=_stages(tiling, 2 * size_in, ring_bytes))


def _stages(tiling: Fp8SkinnyTiling | Int4SkinnyTiling, kept_bytes: int, ring_bytes: int) -> int:
    """Stages of weights, of 128 bytes a row of a box, beside what is kept of a row of x; 2 at least."""
    left = min(ring_bytes, _MOST_BYTES - kept_bytes)
    return max(2, left // (tiling.boxes * tiling.box_rows * COLUMNS))


def int4_skinny_tiling(
    num_rows: int, size_out: int, size_in: int, processors: int, parts: int, has_bias: bool, group: int
) -> Int4SkinnyTiling | None:
    """The tiling for x [num_rows, size_in] and y [num_rows, size_out]; None where another matmul must serve."""
    if not 0 < num_rows <= MOST_OF_4_BITS or size_in % 32:
        return None
    most = 4 if num_rows <= ROW_COUNTS[0] else 2  # more of x than of codes has no room
    rows, folds = _rows_and_folds(size_out, size_in, processors, parts, group, most)
    return int4_tiling_of(rows, folds, parts, num_rows, 1, has_bias, group, size_in)


def _rows_and_folds(
    size_out: int, size_in: int, processors: int, parts: int, columns: int, most: int = 4
) -> tuple[int, int]:
    """Rows of a tile and segments of the inner dim, at most so many, of whole `columns`.

    As many rows as leave tiles to seven of eight multiprocessors.
    """
    rows, folds = 128 // parts, 1
    while -(-size_out // rows) * 8 < 7 * processors:
        if folds < most and size_in % (columns * 2 * folds) == 0:
            folds *= 2
        elif rows * folds * parts <= 64:  # rows of a box, of 4 warps
            break
        rows //= 2
    return rows, folds
