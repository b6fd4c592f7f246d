"""Constants compiled into the Gluon products of mxfp4 weights, chosen by rows an expert. Imports no torch."""

from dataclasses import dataclass, replace

from kernels.experts.tiles import codes_rows, is_few

ROWS = 64  # of weights of a consumer, wgmma's M
BOX = 64  # columns of x in a box: 128 bytes
BOXES = 2  # of a stage of the ring: four lanes of 32 columns, which have one scale each
STEP = BOXES * BOX
_MOST_STAGES = 9  # hardware barriers
_SHARED_BYTES = 232_448  # of one program
_SHARED_BYTES_OF_TWO = 233_472 // 2 - 1024  # of each of two, beside 1 KiB that the system takes


@dataclass(frozen=True, slots=True)
class CodesTiling:
    """A product of tiles of `tokens` sorted slots by 64 rows of weights a consumer.

    parts             2 where a tile holds gate and up, whose activated product is stored in the order of order.py
    tokens            slots of a tile, wgmma's N: 8 to 256
    consumers         2 or 3
    registers         of a thread of each consumer, and of the producer
    max_registers     of a thread at launch where a multiprocessor holds two programs; None where one has all
    has_large_scales  a scale may be above 2, which takes a second multiplication
    """

    parts: int
    tokens: int
    consumers: int
    stages: int
    registers: tuple[int, int]
    max_registers: int | None
    has_bias: bool
    activation: str
    has_large_scales: bool

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
        """Return a consumer's box of weights: numbers of 16 bits, each four codes."""
        return [1, ROWS // 16, 2, 8, STEP // 4] if self.parts == 2 else [1, ROWS, STEP // 4]

    @property
    def inputs_box(self) -> list[int]:
        return [self.tokens, BOX]

    @property
    def bytes_of_stage(self) -> int:
        """Bytes of codes, and of x."""
        return self.rows * STEP // 2 + self.tokens * STEP * 2

    @property
    def stored_together(self) -> int:
        """Slots whose results are converted for the store at once: more would take stages of the ring."""
        return min(self.tokens, 32)


# Of a thread of a consumer and of the producer: together what a multiprocessor has for 3 or 4 groups of 4 warps.
_REGISTERS = {2: (216, 72), 3: (152, 56)}
_REGISTERS_OF_TWO = (104, 32)  # of each of two programs, of two consumers
_MOST_OF_TWO = 80


def codes_tiling(
    parts: int, tiles: "CodesTiles", has_bias: bool, activation: str, has_large_scales: bool
) -> CodesTiling:
    """The tiling with as many stages as shared memory holds beside conversions of results and 1 KiB of barriers.

    Triton's cache finds a compiled kernel by the fields of its tiling: what is not one must follow from them.
    """
    registers, most, shared = _REGISTERS[tiles.consumers], None, _SHARED_BYTES
    if tiles.programs == 2:
        registers, most, shared = _REGISTERS_OF_TWO, _MOST_OF_TWO, _SHARED_BYTES_OF_TWO
    one = CodesTiling(parts, tiles.tokens, tiles.consumers, 1, registers, most, has_bias, activation, has_large_scales)
    conversions = one.columns * one.stored_together * 2
    return replace(one, stages=min(_MOST_STAGES, (shared - 1024 - conversions) // one.bytes_of_stage))


@dataclass(frozen=True, slots=True)
class CodesTiles:
    """Both products' tiles, which share their slots. programs: that a multiprocessor holds."""

    tokens: int
    consumers: int
    programs: int = 1

    def gate_up(self, *, has_bias: bool, activation: str, has_large_scales: bool) -> CodesTiling:
        return codes_tiling(2, self, has_bias, activation, has_large_scales)

    def down(self, *, has_bias: bool, has_large_scales: bool) -> CodesTiling:
        return codes_tiling(1, self, has_bias, "", has_large_scales)


_LOWEST = CodesTiles(8, 2, programs=2)
_BY_ROWS = {
    16: CodesTiles(16, 2, programs=2),
    32: CodesTiles(32, 2, programs=2),
    64: CodesTiles(64, 2, programs=2),
    128: CodesTiles(128, 3),
    256: CodesTiles(256, 2),
}
ALL_TILES = (_LOWEST, *_BY_ROWS.values())


def codes_tiles(num_tokens: int, num_active: int, num_experts: int) -> CodesTiles | None:
    """The tiles for so many tokens, whatever experts they visit; None where Triton's products of each slot take less.

    Up to 128 slots one tile holds most experts' rows, so that a row of weights becomes numbers once. Borders are those
    of `tiles.py`, whose numbers of tokens are compiled before the first ready, and tested.
    """
    rows = codes_rows(num_tokens, num_active, num_experts)
    if rows == 1:
        return None
    return _LOWEST if is_few(num_tokens * num_active, num_experts) else _BY_ROWS[rows]
