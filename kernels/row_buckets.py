"""Buckets of rows: the half-open intervals of tokens in one call that products are proven for.

They are finer at the small end than those of lengths (`kernels/buckets.py`): up to 16 rows a product reads weights and
little else, and other kernels and tiles serve it than 128 rows.
"""

from bisect import bisect_left
from enum import Enum


class RowBucket(Enum):
    """`(lo, hi]` rows; the value is the label used in metrics, the matrix and the plan."""

    LE_16 = "le_16"
    LE_128 = "le_128"
    LE_512 = "le_512"
    LE_2K = "le_2k"
    LE_8K = "le_8k"
    GT_8K = "gt_8k"

    @property
    def label(self) -> str:
        return self.value

    @property
    def lo(self) -> int:
        """The largest number of rows that is still below this bucket."""
        index = _ORDER.index(self)
        return 0 if index == 0 else _EDGES[index - 1]

    @property
    def hi(self) -> int | None:
        """The largest number of rows in this bucket; None for the last one, which has no end."""
        index = _ORDER.index(self)
        return _EDGES[index] if index < len(_EDGES) else None


_ORDER = tuple(RowBucket)
_EDGES = (16, 128, 512, 2048, 8192)


def row_bucket_index(num_rows: int) -> int:
    """Return the bucket of a positive number of rows, counted from 0."""
    return bisect_left(_EDGES, num_rows)


def row_buckets_up_to(num_rows: int) -> tuple[RowBucket, ...]:
    """Every bucket that 1..num_rows rows fall into, fewest first."""
    return tuple(bucket for bucket in RowBucket if bucket.lo < num_rows)
