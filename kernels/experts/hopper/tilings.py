"""Constants of the Gluon products of a mixture, chosen by rows an expert. Imports no torch."""

from dataclasses import dataclass

ROWS = 64  # of a consumer, wgmma's M
STEP = 64  # columns of the inner dim of a box: 128 bytes
COLUMNS = 256  # of a tile of many rows: rows of weights
FOLDS = 4
FOLDED = 8 * FOLDS  # divides the inner dims where tiles are folded: tensor maps have strides of 16 bytes
_MOST_STAGES = 12  # hardware barriers
_RING_BYTES = 225_280  # of shared memory; the rest of the 232,448 is for conversions of layouts


@dataclass(frozen=True, slots=True)
class ManyTiling:
    """A product of tiles of 128 rows by 256 rows of weights.

    gathers     whether rows are gathered from tokens; otherwise they lie together
    parts       2 where a tile holds gate and up, whose activated product is stored
    group       tiles of rows whose columns are computed one after the other
    """

    gathers: bool
    parts: int
    has_bias: bool
    activation: str
    consumers: int = 2
    stages: int = 4
    group: int = 8


@dataclass(frozen=True, slots=True)
class FewTiling:
    """A product of tiles of 128 rows of weights by a few sorted slots, or of 64 by one slot.

    folds    segments of the inner dim that a tile's rows are of: 1 where slots are sorted, else a tile is one slot's
    parts    2 where a tile holds gate and up, whose activated product is stored
    pad      slots of a tile; of one slot 2, the second of which is dropped: wgmma's N is a multiple of 8
    boxes    of 64 columns, in a stage of the ring
    is_even  whether steps of boxes divide the inner dim
    """

    folds: int
    parts: int
    pad: int
    boxes: int
    stages: int
    has_bias: bool
    activation: str
    is_even: bool

    @property
    def consumers(self) -> int:
        return 2 if self.folds == 1 else 1

    @property
    def gathers(self) -> bool:
        """Return whether x is gathered by order."""
        return self.folds == 1 and self.parts == 2

    @property
    def columns(self) -> int:
        """Return the columns of x in a step, wgmma's N."""
        return self.folds * self.pad

    @property
    def rows(self) -> int:
        """Columns of the result in a tile."""
        return self.consumers * ROWS // (self.folds * self.parts)

    @property
    def weights_box(self) -> list[int]:
        if self.folds == 1:
            return [1, self.rows // 8, 2, 8, STEP] if self.parts == 2 else [1, self.rows, STEP]
        return [1, self.folds, 2, self.rows, STEP] if self.parts == 2 else [1, self.folds, self.rows, STEP]

    @property
    def inputs_box(self) -> list[int]:
        return [self.pad, STEP] if self.folds == 1 else [self.pad, self.folds, STEP]


def few_tiling(rows: int, parts: int, size_in: int, has_bias: bool, activation: str) -> FewTiling:
    """The tiling of one product for tiles of so many slots; of 1, unsorted ones."""
    folds, pad, consumers = (FOLDS, 2, 1) if rows == 1 else (1, rows, 2)
    segment = size_in // folds
    boxes = 3 if rows == 1 and segment % (3 * STEP) == 0 else 2
    bytes_of_stage = (consumers * ROWS + folds * pad) * boxes * STEP * 2
    stages = min(_MOST_STAGES, _RING_BYTES // bytes_of_stage)
    return FewTiling(folds, parts, pad, boxes, stages, has_bias, activation, segment % (boxes * STEP) == 0)
