"""Tilings of the products of `ordered.py`, by fixed rules. Every one of them sums in the same order."""

from dataclasses import dataclass, replace
from math import ceil

from kernels.vocabulary.row_buckets import LinearRows

BOX = 64  # columns of a box: a swizzle atom of 16-bit numbers
SEGMENTS = 4  # of the inner dim, where an order has them
_ROWS_OF_GROUP = 64  # wgmma's M
_BYTES_OF_COLUMN = BOX * 2  # of one row of a box
_SHARED_BYTES = 232_448 - 2048  # of one program, but for barriers
_MOST_STAGES = 16
_MOST_CONVERTED = 16 * 1024  # bytes of results of 16 bits

_MOST_OF_FEW, _MOST_OF_SHARES = 32, 128  # rows of x
_MOST_OF_BUCKETS = 8192
_HALF = 32  # rows of a tile
# What reading x for half as many rows of the weight costs, by the rows of x (one H200: 8B, Qwen3-30B-A3B).
_COST_OF_HALF = {8: 1.05, 16: 1.08, 32: 1.2}
_FEWEST_OF_SHORT, _SHORT = 64, 4096  # programs, and columns of the inner dim


@dataclass(frozen=True, slots=True)
class OrderedTiling:
    """The compiled constants of `hallmark_ordered_matmul`.

    height    rows of the weight in a tile, of both parts together: a power of two
    groups    of 4 warps: each multiplies 64 rows, of which those behind the tile's last are dropped
    parts     2 where the weight is a gate and an up projection, and y is SwiGLU of them
    segments  of the inner dim that are summed apart: 1 or 4
    pad       rows of x of a program, rounded up to a wgmma's N
    boxes     of a stage of the ring, side by side
    stages    of the ring
    multiple  of which N is one: 8, else 1
    """

    height: int
    groups: int
    parts: int
    segments: int
    pad: int
    boxes: int
    stages: int
    has_bias: bool
    multiple: int = 8

    @property
    def rows(self) -> int:
        """Return the rows that wgmma multiplies, those behind a tile's last included."""
        return self.groups * _ROWS_OF_GROUP

    @property
    def slack(self) -> int:
        """Return the boxes behind the ring that the last stage's wgmma reads, whatever they hold."""
        return self.rows // self.height - 1

    @property
    def weights_box(self) -> list[int]:
        if self.parts == 2:
            return [self.height // 16, 2, 8, BOX]
        return [self.height, BOX] if self.segments == 1 else [1, self.height, BOX]

    @property
    def inputs_box(self) -> list[int]:
        return [self.pad, BOX] if self.segments == 1 else [1, self.pad, BOX]


def with_ring(
    height: int,
    groups: int,
    parts: int,
    segments: int,
    pad: int,
    boxes: int,
    *,
    has_bias: bool,
    bytes_out: int = 2,
    multiple: int = 8,
) -> OrderedTiling:
    """Return the tiling with as many stages as shared memory holds beside the conversion of a tile's results."""
    one = OrderedTiling(height, groups, parts, segments, pad, boxes, 1, has_bias, multiple)
    conversion = one.rows // parts * pad * bytes_out
    if bytes_out == 2:  # of more than 8 KB Triton exchanges some at a time
        conversion = min(conversion, _MOST_CONVERTED)
    free = _SHARED_BYTES - conversion - one.slack * height * _BYTES_OF_COLUMN
    stages = free // ((height + pad) * _BYTES_OF_COLUMN * boxes)
    return replace(one, stages=min(_MOST_STAGES, stages))


def num_programs(tiling: OrderedTiling, num_rows: int, size_out: int, processors: int) -> int:
    """Return the programs that share the weight's rows: of many rows of x as many as there are tiles."""
    tiles = ceil(size_out * tiling.parts / tiling.height)
    return tiles if num_rows > _MOST_OF_SHARES else ceil(tiles / ceil(tiles / processors))


def ordered_tiling(
    num_rows: int,
    size_out: int,
    size_in: int,
    processors: int,
    *,
    parts: int = 1,
    segments: int = 1,
    has_bias: bool = False,
    bytes_out: int = 2,
) -> OrderedTiling:
    """The tiling for x [num_rows, size_in] and y [num_rows, size_out]; of equal segments, all give the same bits.

    One for each bucket of rows, so that all are compiled before the first step is served. As measured on one H200 for
    two models.
    """
    height = parts * size_out
    if num_rows <= _MOST_OF_FEW:
        pad = next(pad for pad in (8, 16, 32) if num_rows <= pad)
        rows, groups, boxes = _height_of_few(pad, height, size_in, processors), 1, 4
    elif num_rows <= _MOST_OF_SHARES:
        rows, groups, pad, boxes = _of_some(num_rows, ceil(height / _ROWS_OF_GROUP), processors)
    else:
        are_small = bytes_out == 4 or segments > 1  # else the ring had two stages, or accumulators no registers
        rows, groups, pad, boxes = _of_many(LinearRows.of(num_rows), height, processors, are_small=are_small)
    multiple = 1 if size_out % 8 else 8
    return with_ring(
        rows, groups, parts, segments, pad, boxes, has_bias=has_bias, bytes_out=bytes_out, multiple=multiple
    )


def _height_of_few(pad: int, height: int, size_in: int, processors: int) -> int:
    """Rows of a tile of up to 32 rows of x: 64, or 32 where that leaves fewer of them to the busiest program.

    A tile of 32 rows reads x twice as often. 64 programs with a short inner dim beat 128 all the same.
    """
    tiles = ceil(height / _ROWS_OF_GROUP)
    if _FEWEST_OF_SHORT <= tiles <= processors and size_in <= _SHORT and pad < _MOST_OF_FEW:
        return _ROWS_OF_GROUP
    whole = ceil(tiles / processors) * _ROWS_OF_GROUP
    half = ceil(ceil(height / _HALF) / processors) * _HALF
    return _HALF if half * _COST_OF_HALF[pad] < whole else _ROWS_OF_GROUP


def _of_some(num_rows: int, tiles: int, processors: int) -> tuple[int, int, int, int]:
    """Rows of a tile, groups, rows of x and boxes, of 33 to 128 rows of x; `tiles`: of 64 rows of the weight."""
    is_narrow, is_wide = 2 * tiles <= processors, tiles > (1 if num_rows > 64 else 2) * processors
    if num_rows <= 64:
        return (_HALF, 1, 64, 2) if is_narrow else (128, 2, 64, 2) if is_wide else (64, 1, 64, 2)
    return (64, 1, 64, 2) if is_narrow else (128, 2, 128, 1) if is_wide else (64, 1, 128, 1)


def _of_many(rows: LinearRows, height: int, processors: int, *, are_small: bool) -> tuple[int, int, int, int]:
    """The same of more rows of x. are_small: whether tiles must be of at most 128 rows of x."""
    num_rows = _MOST_OF_BUCKETS if rows.hi is None else rows.hi
    tiles = ceil(height / 128) * ceil(num_rows / 128)
    if tiles >= 2 * processors and not are_small:
        return 128, 2, 256, 1
    return (128, 2, 128, 1) if 2 * tiles >= processors else (64, 1, 128, 2)
