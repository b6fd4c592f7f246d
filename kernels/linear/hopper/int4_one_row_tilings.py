"""Tilings of the products of `int4_one_row.py`, by fixed rules: nothing is tuned in service. Imports no torch."""

from dataclasses import astuple, dataclass, replace

from kernels.linear.hopper.few_bits_tilings import COLUMNS, Int4SkinnyTiling, int4_one_row_tiling

_MOST_PROGRAMS = 4  # that share a multiprocessor
_SHARED_BYTES = 212 * 1024  # of all of them: their rings and the rows of x that they keep


@dataclass(frozen=True, slots=True)
class Int4OneRowTiling(Int4SkinnyTiling):
    """The compiled constants of `hallmark_int4_one_row_matmul`; programs: that share a multiprocessor."""

    programs: int = 1


def one_row_tiling(tiling: Int4SkinnyTiling, size_out: int, size_in: int, processors: int) -> Int4OneRowTiling:
    """The tiling of a few rows for one that each program keeps itself, whose ring holds weights alone.

    Of a weight of many rows several programs share a multiprocessor, so that one widens codes while another waits:
    gate and up of an 8B in 25 us in place of 30 (H200).
    """
    half = Int4OneRowTiling(*astuple(replace(tiling, rows=tiling.rows // 2)))
    tiles = -(-size_out // half.rows)
    for programs in range(min(_MOST_PROGRAMS, tiles // processors), 1, -1):
        stages = (_SHARED_BYTES // programs - 2 * size_in) // (half.boxes * half.box_rows * COLUMNS)
        if tiling.folds == 1 and stages >= 2:
            return replace(half, stages=stages, programs=programs)
    return Int4OneRowTiling(*astuple(int4_one_row_tiling(tiling, size_in)))
