"""Tilings of the products of `fp8_wide.py`, by fixed rules: nothing is tuned in service. Imports no torch."""

from dataclasses import dataclass
from enum import Enum

BOX = 128  # columns of a box: 128 bytes, and those of a block that has a scale
_CONSUMER_ROWS = 64  # of a consumer, wgmma's M
_MOST_STAGES = 7  # hardware barriers
_RING_BYTES = 192 * 1024  # of the 227 KB a program may have: the rest is for conversions of layouts


class WideScales(Enum):
    """Kinds of scales of a product with a weight of 8 bits.

    ROWS    w [parts * N], x [M]
    STATIC  w [parts * N], x [1]
    BLOCKS  w [parts * N / 128, K / 128], x [K / 128, M up to the next 4]
    """

    ROWS = "rows"
    STATIC = "static"
    BLOCKS = "blocks"


@dataclass(frozen=True, slots=True)
class Fp8WideTiling:
    """The compiled constants of `hallmark_fp8_wide_matmul`.

    scales     a value of `WideScales`
    parts      2 where the weight is a gate and an up projection, and y is SwiGLU of them
    columns    rows of weights in a tile, of both parts together
    consumers  groups of 4 warps
    waves      times 64 rows of x of a consumer
    group      tiles of rows whose columns are computed one after the other
    """

    scales: str
    parts: int
    has_bias: bool
    columns: int = 128
    consumers: int = 2
    waves: int = 1
    group: int = 8

    @property
    def rows(self) -> int:
        """Rows of x in a tile."""
        return self.consumers * self.consumer_rows

    @property
    def consumer_rows(self) -> int:
        return self.waves * _CONSUMER_ROWS

    @property
    def stages(self) -> int:
        return min(_MOST_STAGES, _RING_BYTES // ((self.rows + self.columns) * BOX))

    @property
    def registers(self) -> int:
        """Registers of a consumer's thread: what 24 of a producer's leave of 64 K."""
        return 240 if self.consumers == 2 else 160

    @property
    def is_blocks(self) -> bool:
        return self.scales == WideScales.BLOCKS.value

    @property
    def is_static(self) -> bool:
        return self.scales == WideScales.STATIC.value


_Tile = tuple[int, int, int]  # consumers, waves, columns

# Time of a tile over its rows and columns, as a share of the first's: 256 to 8,192 rows of four products of an 8B, one
# H200. Tiles of few columns serve few rows, where others leave multiprocessors idle.
_TILES: dict[_Tile, float] = {
    (3, 1, 128): 1.0, (2, 1, 128): 1.09, (2, 2, 128): 1.045, (2, 1, 64): 1.5, (2, 1, 32): 1.7
}  # fmt: skip


def _tiles(scales: WideScales) -> dict[_Tile, float]:
    """The tiles of these scales: with those of blocks, a thread of two waves has no registers for both sums."""
    return {tile: time for tile, time in _TILES.items() if scales is not WideScales.BLOCKS or tile[1] == 1}


def fp8_wide_tilings(*, parts: int, has_bias: bool, scales: WideScales) -> tuple[Fp8WideTiling, ...]:
    """Every tiling of such products, whatever their sizes."""
    return tuple(_tiling(tile, parts, has_bias, scales) for tile in _tiles(scales))


def fp8_wide_tiling(
    num_rows: int, size_out: int, processors: int, *, parts: int, has_bias: bool, scales: WideScales
) -> Fp8WideTiling:
    """The tiling for x [num_rows, any] and y [num_rows, size_out]: the least time of the busiest program."""
    tiles = _tiles(scales)

    def cost(tile: _Tile) -> float:
        consumers, waves, columns = tile
        rows = consumers * waves * _CONSUMER_ROWS
        num_tiles = -(-num_rows // rows) * -(-size_out * parts // columns)
        return -(-num_tiles // processors) * rows * columns * tiles[tile]

    return _tiling(min(tiles, key=cost), parts, has_bias, scales)


def _tiling(tile: _Tile, parts: int, has_bias: bool, scales: WideScales) -> Fp8WideTiling:
    consumers, waves, columns = tile
    return Fp8WideTiling(scales.value, parts, has_bias, columns, consumers, waves)
