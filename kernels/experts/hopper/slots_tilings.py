"""Constants of the products of single slots, chosen by sizes. Imports no torch."""

from dataclasses import dataclass, replace
from math import ceil

BOX = 64  # columns of a box: 128 bytes
PAD = 8  # rows of x, wgmma's least N
_ROWS_OF_GROUP = 64
_HEIGHTS = (32, 64, 96, 128)  # rows of weights of a tile
# Of each of two programs, but for barriers: one fills its ring while the other ends.
_SHARED_BYTES_OF_TWO = 233_472 // 2 - 5120
_BOXES = 2  # of a stage of the ring
_MOST_STAGES = 16


@dataclass(frozen=True, slots=True)
class SlotsTiling:
    """A product of tiles of so many rows of weights by one slot.

    height  rows of weights of a tile, of both parts together
    parts   2 where a tile holds gate and up, whose activated product is stored
    boxes   of 64 columns, in a stage of the ring
    """

    height: int
    parts: int
    boxes: int
    stages: int
    has_bias: bool
    activation: str

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
        return ceil(self.height / _ROWS_OF_GROUP)

    @property
    def rows(self) -> int:
        """Return the rows that wgmma multiplies, those behind a tile's last included."""
        return self.groups * _ROWS_OF_GROUP

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
        return [1, self.unit // 16, 2, 8, BOX] if self.parts == 2 else [1, self.unit, BOX]


def slots_tiling(
    num_active: int, num_rows: int, size_in: int, processors: int, parts: int, has_bias: bool, activation: str
) -> SlotsTiling:
    """The tiling of weights [num_rows, size_in] of one expert, by the height that leaves the busiest the least.

    That of one token's slots: two tokens have the same, so that one kernel is compiled for both.
    """

    def busiest(height: int) -> tuple[int, int]:
        return ceil(ceil(num_rows / height) * num_active / processors) * height, -height

    height = min(_HEIGHTS, key=busiest)
    one = SlotsTiling(height, parts, _BOXES, 1, has_bias, activation)
    free = _SHARED_BYTES_OF_TWO - one.slack * one.unit * BOX * 2
    stages = free // ((height + PAD) * BOX * 2 * _BOXES)
    return replace(one, stages=min(_MOST_STAGES, stages, ceil(size_in / (_BOXES * BOX))))
