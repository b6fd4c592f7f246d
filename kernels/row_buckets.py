"""Buckets of rows: the half-open intervals of tokens in one call that products are proven for.

They are finer at the small end than those of lengths (`kernels/buckets.py`): up to 16 rows a product reads weights and
little else, and other kernels and tiles serve it than 128 rows.
"""

from bisect import bisect_left
from enum import Enum
from itertools import pairwise


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


class LinearRows(Enum):
    """`(lo, hi]` rows. The borders are those at which `kernels/linear/tilings.py` changes kernels, then powers of two.

    So one bucket never holds two variants of a kernel: skinny with 8, 16 and 32 padded rows, wide with 64 and 128.
    """

    LE_1 = "le_1"
    LE_8 = "le_8"
    LE_16 = "le_16"
    LE_32 = "le_32"
    LE_64 = "le_64"
    LE_112 = "le_112"
    LE_128 = "le_128"
    LE_256 = "le_256"
    LE_512 = "le_512"
    LE_1K = "le_1k"
    LE_2K = "le_2k"
    LE_8K = "le_8k"
    GT_8K = "gt_8k"

    @property
    def label(self) -> str:
        return self.value

    @property
    def lo(self) -> int:
        """The largest number of rows that is still below this bucket."""
        return _LINEAR_EDGES[self][0]

    @property
    def hi(self) -> int | None:
        """The largest number of rows in this bucket; None for the last one, which has no end."""
        return _LINEAR_EDGES[self][1]

    def holds(self, num_rows: int) -> bool:
        return self.lo < num_rows and (self.hi is None or num_rows <= self.hi)


_BORDERS = (0, 1, 8, 16, 32, 64, 112, 128, 256, 512, 1024, 2048, 8192, None)
_LINEAR_EDGES: dict[LinearRows, tuple[int, int | None]] = {
    bucket: (lo or 0, hi) for bucket, (lo, hi) in zip(LinearRows, pairwise(_BORDERS), strict=True)
}


def linear_rows_of(num_rows: int) -> LinearRows:
    """Return the bucket of a positive number of rows. Raises ValueError below 1."""
    if num_rows < 1:
        raise ValueError(f"a product must have at least 1 row, got {num_rows}")
    return next(bucket for bucket in LinearRows if bucket.holds(num_rows))


def linear_rows_up_to(num_rows: int) -> tuple[LinearRows, ...]:
    """Every bucket that 1..num_rows fall into, the fewest rows first."""
    return tuple(bucket for bucket in LinearRows if bucket.lo < num_rows)
