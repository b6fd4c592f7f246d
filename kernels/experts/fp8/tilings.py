"""Constants of the Gluon products of experts in 8 bits, chosen by rows an expert. Imports no torch."""

from dataclasses import dataclass, replace
from math import ceil

STEP = 128  # columns of a step: 128 bytes, and those that share a scale in blocks
ROWS = 64  # of a consumer, wgmma's M
HEIGHT = 128  # rows of weights of a tile of few slots
MANY = 128  # slots of a tile of many, beside twice as many rows of weights
PAD = 8  # rows of x beside one slot, wgmma's least N
_MOST_STAGES = 12  # hardware barriers
_RING_BYTES = 221_184  # of shared memory; the rest of the 232,448 is for conversions of layouts
_MANY_STAGES = 4
_HEIGHTS = (32, 64, 96, 128)  # rows of weights of a tile of one slot
# Of each of two programs, but for barriers: one fills its ring while the other ends.
_SHARED_BYTES_OF_TWO = 233_472 // 2 - 6144
_MOST_STAGES_OF_SLOT = 16


@dataclass(frozen=True, slots=True)
class TileTiling:
    """A product of tiles of sorted slots.

    rows       slots of a tile: 16, 32 or 64 beside 128 rows of weights, or 128 beside 256
    parts      2 where a tile holds gate and up, whose activated product is stored
    in_blocks  whether 128 columns have scales of their own; otherwise a row has one
    group      tiles of rows whose columns are computed one after the other, of many rows
    """

    rows: int
    parts: int
    in_blocks: bool
    activation: str
    stages: int
    group: int = 8

    @property
    def gathers(self) -> bool:
        """Return whether x is gathered by order."""
        return self.parts == 2

    @property
    def is_many(self) -> bool:
        return self.rows == MANY

    @property
    def height(self) -> int:
        """Return the rows of weights of a tile."""
        return 2 * HEIGHT if self.is_many else HEIGHT

    @property
    def num_scales(self) -> int:
        """Return the scales of weights in a stage: of many slots a tile has two, which a warp copies."""
        return 32 if self.is_many else HEIGHT

    @property
    def rounds(self) -> bool:
        """Return whether a tile's results, whole runs of 128, are stored rounded to 8 bits."""
        return self.is_many and self.parts == 2 and self.in_blocks

    @property
    def columns(self) -> int:
        """Columns of the result in a tile."""
        return self.height // self.parts

    @property
    def weights_box(self) -> list[int]:
        return [1, self.height // 16, 2, 8, STEP] if self.parts == 2 else [1, self.height, STEP]


@dataclass(frozen=True, slots=True)
class SlotTiling:
    """A product of tiles of so many rows of weights by one slot, whose x is rounded by each program.

    height     rows of weights of a tile, of both parts together
    parts      2 where a tile holds gate and up, whose activated product is stored
    in_blocks  whether 128 columns have scales of their own; otherwise a row has one
    steps      of 128 columns of x, as a power of two
    """

    height: int
    parts: int
    in_blocks: bool
    activation: str
    steps: int
    stages: int

    @property
    def unit(self) -> int:
        """Return the rows of a box, a power of two: the largest that divides the height."""
        return self.height & -self.height

    @property
    def units(self) -> int:
        """Return the boxes of a tile, one below the other."""
        return self.height // self.unit

    @property
    def groups(self) -> int:
        """Return the groups of 4 warps, each of which multiplies 64 rows."""
        return ceil(self.height / ROWS)

    @property
    def rows(self) -> int:
        """Return the rows that wgmma multiplies, those behind a tile's last included."""
        return self.groups * ROWS

    @property
    def slack(self) -> int:
        """Return the boxes behind the ring that the last stage's wgmma reads, whatever they hold."""
        return (self.rows - self.height) // self.unit

    @property
    def columns(self) -> int:
        """Return the columns of the result in a tile."""
        return self.height // self.parts

    @property
    def weights_box(self) -> list[int]:
        return [1, self.unit // 16, 2, 8, STEP] if self.parts == 2 else [1, self.unit, STEP]


def tile_tiling(rows: int, parts: int, in_blocks: bool, activation: str) -> TileTiling:
    """The tiling of one product for tiles of so many slots."""
    of_scale = 4 if in_blocks else 0  # bytes
    stages = _MANY_STAGES if rows == MANY else min(_MOST_STAGES, _RING_BYTES // ((HEIGHT + rows) * (STEP + of_scale)))
    return TileTiling(rows, parts, in_blocks, activation, stages)


def slot_tiling(
    num_active: int, num_rows: int, size_in: int, processors: int, parts: int, in_blocks: bool, activation: str
) -> SlotTiling:
    """The tiling of weights [num_rows, size_in] of one expert, by the height that leaves the busiest the least.

    That of one token's slots: two tokens have the same, so that one kernel is compiled for both.
    """

    def busiest(height: int) -> tuple[int, int]:
        return ceil(ceil(num_rows / height) * num_active / processors) * height, -height

    height, num_steps = min(_HEIGHTS, key=busiest), size_in // STEP
    steps = 1 << (num_steps - 1).bit_length()
    one = SlotTiling(height, parts, in_blocks, activation, steps, 1)
    free = _SHARED_BYTES_OF_TWO - one.slack * one.unit * STEP - steps * PAD * STEP
    return replace(one, stages=max(2, min(_MOST_STAGES_OF_SLOT, free // (height * STEP), num_steps)))
