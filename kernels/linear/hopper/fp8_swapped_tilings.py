"""Tilings of the products of `fp8_swapped.py`, by fixed rules: nothing is tuned in service. Imports no torch."""

from dataclasses import dataclass

from kernels.linear.hopper.few_bits_tilings import COLUMNS, Fp8Scales

PADS = (8, 16, 32, 64, 128)  # rows of x, padded to an N of wgmma
_RING_BYTES = 192 * 1024  # of the 227 KB a program may have: the rest is for conversions of layouts
_FEWEST_ROWS = 64  # of a tile: wgmma's M
_MOST_SPLITS = 4
# Share of the multiprocessors that clusters can hold at once, as in `tilings.py`.
_IN_CLUSTERS_OF = {2: 1.0, 4: 0.9}


@dataclass(frozen=True, slots=True)
class Fp8SwappedTiling:
    """The compiled constants of `hallmark_fp8_swapped_matmul`.

    rows    of weights in a tile, of both parts together: 64 for each group of 4 warps
    parts   2 where the weight is a gate and an up projection, and y is SwiGLU of them
    pad     rows of x, rounded up to an N of wgmma
    splits  of the inner dim: programs of a cluster that share a tile
    boxes   of 128 columns, of a stage of the ring
    scales  a value of `Fp8Scales`
    """

    rows: int
    parts: int
    pad: int
    splits: int
    boxes: int
    has_bias: bool
    scales: str

    @property
    def stages(self) -> int:
        return _RING_BYTES // (self.boxes * (self.rows + self.pad) * COLUMNS)

    @property
    def ring_bytes(self) -> int:
        return self.stages * self.boxes * (self.rows + self.pad) * COLUMNS

    @property
    def reducers(self) -> int:
        """Programs of a cluster that get a part of the sums: each some rows of x, by groups of 8."""
        return min(1 << self.splits.bit_length() - 1, self.pad // 8)

    @property
    def is_blocks(self) -> bool:
        return self.scales == Fp8Scales.BLOCKS.value

    @property
    def is_static(self) -> bool:
        return self.scales == Fp8Scales.STATIC.value


def fp8_swapped_tiling(
    num_rows: int, size_out: int, size_in: int, processors: int, *, parts: int, has_bias: bool, scales: Fp8Scales
) -> Fp8SwappedTiling | None:
    """The tiling for x [num_rows, size_in] and y [num_rows, size_out]; None where another matmul must serve.

    As measured on one H200 for the products of an 8B and of a rank of two of a 70B: of 4 to 64 rows within 3% of the
    fastest of 14 tilings each; of 128 rows with scales of rows within 1%, but for SwiGLU, which `fp8_wide.py` serves.
    """
    if not 0 < num_rows <= PADS[-1] or size_out % 8 or size_in % 16:
        return None
    pad = next(pad for pad in PADS if num_rows <= pad)
    boxes = 4 if pad < 64 else 2
    if pad == PADS[-1] and scales is Fp8Scales.BLOCKS:  # a thread has no registers for the scales of two boxes
        boxes = 1
    tiles = -(-size_out * parts // _FEWEST_ROWS)
    if tiles > 2 * processors and pad > PADS[0]:
        return Fp8SwappedTiling(2 * _FEWEST_ROWS, parts, pad, 1, min(2, boxes), has_bias, scales.value)
    splits = 1
    while splits < _MOST_SPLITS and 2 * splits * tiles <= _IN_CLUSTERS_OF[2 * splits] * processors:
        if size_in < 4 * splits * boxes * COLUMNS:  # two steps of each program
            break
        splits *= 2
    return Fp8SwappedTiling(_FEWEST_ROWS, parts, pad, splits, boxes, has_bias, scales.value)
