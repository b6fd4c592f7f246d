"""Tilings of the products of `int4_swapped.py`, by fixed rules: nothing is tuned in service. Imports no torch."""

from dataclasses import dataclass
from math import ceil

PADS = (8, 16, 32, 64, 128)  # rows of x, padded to an N of wgmma
COLUMNS = 128  # of a box
_MOST_TILES_OF_ROWS = 2
MOST_ROWS = _MOST_TILES_OF_ROWS * PADS[-1]
_ROWS = 64  # of a tile: wgmma's M
# Share of the multiprocessors that clusters can hold at once, as in `tilings.py`.
_IN_CLUSTERS_OF = {1: 1.0, 2: 1.0, 4: 0.9}
_RING_BYTES = 200 * 1024  # of the 227 KB a multiprocessor has: the rest is for conversions of layouts


@dataclass(frozen=True, slots=True)
class Int4SwappedTiling:
    """The compiled constants of `hallmark_int4_swapped_matmul`.

    parts     2 where the weight is a gate and an up projection, and y is SwiGLU of them
    pad       rows of x in a tile, rounded up to an N of wgmma
    splits    of the inner dim: programs of a cluster that share a tile
    boxes     of 128 columns, of a stage of the ring
    programs  that share a multiprocessor
    group     columns that share a scale and a zero point
    """

    parts: int
    pad: int
    splits: int
    boxes: int
    programs: int
    has_bias: bool
    group: int

    @property
    def rows(self) -> int:
        """Rows of weights in a tile, of both parts together."""
        return _ROWS

    @property
    def groups(self) -> int:
        """Groups of a stage."""
        return self.boxes * COLUMNS // self.group

    @property
    def halves(self) -> int:
        """Parts of a box of x: of more rows than half of them hold."""
        return 1 if self.pad == PADS[0] else 2

    @property
    def half(self) -> int:
        """Rows of a part of a box of x."""
        return self.pad // self.halves

    @property
    def groups_at_once(self) -> int:
        """Groups whose sums a thread has registers for beside the whole ones."""
        return min(self.groups, max(1, _most_padded(self.programs) // self.pad))

    @property
    def registers(self) -> int:
        """Registers of a thread: of 65,536 those that the programs of a multiprocessor leave it."""
        return min(255, 65536 // (self.programs * self.rows * 2) // 8 * 8)

    @property
    def stages(self) -> int:
        return _RING_BYTES // self.programs // self._bytes_of_stage

    @property
    def ring_bytes(self) -> int:
        return self.stages * self._bytes_of_stage

    @property
    def reducers(self) -> int:
        """Programs of a cluster that get a part of the sums: each some rows of x, by groups of 8."""
        return min(self.splits, self.pad // 8)

    @property
    def _bytes_of_stage(self) -> int:
        return self.boxes * (self.rows // 2 + 2 * self.pad) * COLUMNS


def _most_padded(programs: int) -> int:
    """Rows of x, padded, of all sums of groups that a thread has registers for at once, beside the whole ones."""
    return 64 if programs <= 2 else 8


def int4_swapped_tiling(
    num_rows: int, size_out: int, size_in: int, processors: int, *, parts: int, has_bias: bool, group: int
) -> Int4SwappedTiling | None:
    """The tiling for x [num_rows, size_in] and y [num_rows, size_out]; None where another matmul must serve.

    As measured on one H200 for the products of an 8B in groups of 128, with 8 to 128 rows: within 7% of the fastest of
    up to 40 tilings each.
    """
    if not 0 < num_rows <= MOST_ROWS or size_out % 8 or size_in % 32:
        return None
    pad = next((pad for pad in PADS if num_rows <= pad), PADS[-1])
    tiles = -(-size_out * parts // _ROWS) * -(-num_rows // pad)
    splits = _splits(tiles, size_in, processors)
    if tiles > 2 * processors and pad <= 32:  # programs that come and go, so that none has a tile more
        splits = 2
    most = 2 if pad == PADS[-1] or pad * COLUMNS // group > 128 else 4  # whose threads have registers for all sums
    programs = min(most, ceil(tiles * splits / (_IN_CLUSTERS_OF[splits] * processors)))
    boxes = 2 if pad * COLUMNS // group <= 2 * _most_padded(programs) and pad < PADS[-1] else 1
    return Int4SwappedTiling(parts, pad, splits, boxes, programs, has_bias, group)


def _splits(tiles: int, size_in: int, processors: int) -> int:
    """Return the splits of the inner dim: as many, of eight boxes or more, as leave two programs a multiprocessor.

    Four splits are taken where they leave one.
    """
    if 4 * tiles <= processors and size_in >= 32 * COLUMNS:
        return 4
    return 2 if tiles <= processors and size_in >= 16 * COLUMNS else 1
