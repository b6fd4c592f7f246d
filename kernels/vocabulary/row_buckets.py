"""Buckets of rows: the half-open intervals of tokens in one call that products are proven for.

They are finer at the small end than those of lengths (`kernels/vocabulary/buckets.py`): up to 16 rows a product reads
weights and little else, and other kernels and tiles serve it than 128 rows.
"""

from enum import Enum
from typing import Self


class _RowRange(Enum):
    """`(lo, hi]` rows; the value is the label used in metrics, the matrix and the plan.

    lo  the largest number of rows that is still below
    hi  the largest number of rows within; None for the last one, which has no end
    """

    lo: int
    hi: int | None

    def __new__(cls, label: str, lo: int = 0, hi: int | None = None) -> Self:
        member = object.__new__(cls)
        member._value_ = label
        member.lo, member.hi = lo, hi
        return member

    @property
    def label(self) -> str:
        return str(self.value)

    def holds(self, num_rows: int) -> bool:
        return self.lo < num_rows and (self.hi is None or num_rows <= self.hi)

    @classmethod
    def of(cls, num_rows: int) -> Self:
        """Return the bucket of a positive number of rows. Raises ValueError below 1."""
        if num_rows < 1:
            raise ValueError(f"a product must have at least 1 row, got {num_rows}")
        return next(bucket for bucket in cls if bucket.holds(num_rows))

    @classmethod
    def up_to(cls, num_rows: int) -> tuple[Self, ...]:
        """Return every bucket that 1..num_rows rows fall into, the fewest rows first."""
        return tuple(bucket for bucket in cls if bucket.lo < num_rows)


class TokenRows(_RowRange):
    """Tokens of a call of a mixture, whatever experts they visit, or rows of a sum over ranks."""

    LE_16 = "le_16", 0, 16
    LE_128 = "le_128", 16, 128
    LE_512 = "le_512", 128, 512
    LE_2K = "le_2k", 512, 2048
    LE_8K = "le_8k", 2048, 8192
    GT_8K = "gt_8k", 8192, None


class LinearRows(_RowRange):
    """Rows of a product with a weight. The borders are those of `kernels/linear/hopper/tilings.py`.

    So one bucket never holds two variants of a kernel: skinny with 8, 16 and 32 padded rows, wide with 64 and 128.
    Above them are powers of two.
    """

    LE_1 = "le_1", 0, 1
    LE_8 = "le_8", 1, 8
    LE_16 = "le_16", 8, 16
    LE_32 = "le_32", 16, 32
    LE_64 = "le_64", 32, 64
    LE_112 = "le_112", 64, 112
    LE_128 = "le_128", 112, 128
    LE_256 = "le_256", 128, 256
    LE_512 = "le_512", 256, 512
    LE_1K = "le_1k", 512, 1024
    LE_2K = "le_2k", 1024, 2048
    LE_8K = "le_8k", 2048, 8192
    GT_8K = "gt_8k", 8192, None
