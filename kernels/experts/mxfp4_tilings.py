"""Constants of the Gluon products of mxfp4 weights, chosen by rows an expert. Imports no torch."""

from dataclasses import dataclass, replace

from kernels.experts.tiles import hopper_rows, is_few

ROWS = 64  # of weights of a consumer, wgmma's M
BOX = 64  # columns of x in a box: 128 bytes
BOXES = 2  # of a stage of the ring: four lanes of 32 columns, which have one scale each
STEP = BOXES * BOX
_MOST_STAGES = 9  # hardware barriers
_SHARED_BYTES = 232_448  # of one program


@dataclass(frozen=True, slots=True)
class CodesTiling:
    """A product of tiles of `tokens` sorted slots by 128 or 256 rows of weights.

    parts      2 where a tile holds gate and up, whose activated product is stored in the order of mxfp4_order.py
    tokens     slots of a tile, wgmma's N: 8 to 128
    consumers  2 or 4, of 64 rows of weights each
    registers  of a thread of each consumer, and of the producer
    """

    parts: int
    tokens: int
    consumers: int
    stages: int
    registers: tuple[int, int]
    has_bias: bool
    activation: str

    @property
    def rows(self) -> int:
        """Rows of weights of a tile."""
        return self.consumers * ROWS

    @property
    def columns(self) -> int:
        """Columns of the result in a tile."""
        return self.rows // self.parts

    @property
    def threads(self) -> int:
        return self.consumers * 128 + 32

    @property
    def weights_box(self) -> list[int]:
        """Return the box of weights: numbers of 16 bits, each four codes."""
        if self.parts == 2:
            return [1, self.rows // 16, 2, 8, STEP // 4]
        return [1, self.rows, STEP // 4]

    @property
    def inputs_box(self) -> list[int]:
        return [self.tokens, BOX]

    @property
    def bytes_of_stage(self) -> int:
        """Return the bytes of a stage: of codes, and of x."""
        return self.rows * STEP // 2 + self.tokens * STEP * 2

    @property
    def stored_together(self) -> int:
        """Slots whose results are converted for the store at once: more would take stages of the ring."""
        return min(self.tokens, 32)


def codes_tiling(parts: int, tokens: int, consumers: int, has_bias: bool, activation: str) -> CodesTiling:
    """The tiling with as many stages as shared memory holds beside conversions of results and 1 KiB of barriers.

    Triton knows a compiled kernel by the fields of its tiling: what is not one must follow from them.
    """
    # 504 of three groups of 4 warps, 480 of five. Where one has too few ptxas waits for each wgmma before the next one:
    # with four consumers, whose other warps work meanwhile.
    registers = (104, 64) if consumers == 4 else (192, 120)
    one = CodesTiling(parts, tokens, consumers, 1, registers, has_bias, activation)
    conversions = one.columns * one.stored_together * 2
    return replace(one, stages=min(_MOST_STAGES, (_SHARED_BYTES - 1024 - conversions) // one.bytes_of_stage))


@dataclass(frozen=True, slots=True)
class CodesTiles:
    """Both products' tiles, which share their slots."""

    tokens: int
    consumers: int

    def gate_up(self, *, has_bias: bool, activation: str) -> CodesTiling:
        return codes_tiling(2, self.tokens, self.consumers, has_bias, activation)

    def down(self, *, has_bias: bool) -> CodesTiling:
        return codes_tiling(1, self.tokens, self.consumers, has_bias, "")


_LOWEST = CodesTiles(8, 4)
_BY_ROWS = {16: CodesTiles(16, 4), 32: CodesTiles(32, 4), 64: CodesTiles(64, 4), 128: CodesTiles(128, 2)}
ALL_TILES = (_LOWEST, *_BY_ROWS.values())


def codes_tiles(num_tokens: int, num_active: int, num_experts: int) -> CodesTiles | None:
    """The tiles for so many tokens, whatever experts they visit; None where Triton's products of each slot take less.

    One tile holds most experts' rows, so that a row of weights becomes numbers once. Borders are those of `tiles.py`,
    whose numbers of tokens are compiled before the first ready, and tested.
    """
    rows = hopper_rows(num_tokens, num_active, num_experts)
    if rows == 1:
        return None
    return _LOWEST if is_few(num_tokens * num_active, num_experts) else _BY_ROWS[rows]
