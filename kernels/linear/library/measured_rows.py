"""The numbers of rows that cuBLASLt's algorithms are measured for, and which of them stands for a number of rows."""

from collections.abc import Iterable

FEWEST_ROWS = 65  # of fewer, matmuls of our own are ahead
MOST_ROWS = 8192
_MOST_EXACT, _MOST_FINE = 1024, 2048  # rows
_TILE = 128  # rows that a program takes at least, of so many


def measured_rows(num_rows: int) -> int:
    """Return the number of rows whose algorithm serves so many.

    Up to 1024 the number itself, for what is best changes with each: of 384 rows by what is best for 512 a layer takes
    1.3 of its time (one H200, 8B). Of more, one with as many tiles of 128.
    """
    return num_rows if num_rows <= _MOST_EXACT else -(-num_rows // _TILE) * _TILE


def sizes_up_to(most: int, exact: Iterable[int]) -> list[int]:
    """Return the numbers of rows to measure, ascending: up to 1024 those in `exact`, then tiles up to `most`.

    From 2048 on every other tile: an odd last one is left to PyTorch.
    """
    most = min(most, MOST_ROWS)
    fine = range(_MOST_EXACT + _TILE, min(most, _MOST_FINE) + 1, _TILE)
    coarse = range(_MOST_FINE + 2 * _TILE, most + 1, 2 * _TILE)
    few = {size for size in exact if FEWEST_ROWS <= size <= min(most, _MOST_EXACT)}
    return sorted(few.union(fine, coarse))
