"""Tiles of the products of weights of 8 and 4 bits, by fixed rules of rows and sizes. Imports no torch.

None of them is measured. What serves up to 64 rows is bound by memory: small tiles, so that every multiprocessor has
one, in many stages. The number of rows alone chooses between tiles, so that a bucket of rows has one compiled kernel.
"""

from dataclasses import dataclass

MOST_FEW = 64  # rows that memory bounds
_PROGRAMS = 128  # that fill a GPU: of 132 multiprocessors


@dataclass(frozen=True, slots=True)
class ProductTile:
    """A tile of a product, and Triton's launch options.

    block_n  rows of the weight, of each part
    block_m  rows of x
    block_k  columns of both
    """

    block_n: int
    block_m: int
    block_k: int
    num_warps: int
    num_stages: int


def fp8_tile(num_rows: int, size_out: int, *, parts: int) -> ProductTile:
    """The tile of codes of 8 bits."""
    if num_rows > MOST_FEW:
        return ProductTile(128 // parts, 128, 128, 8, 3)
    rows = _few_rows_of_weight(size_out)
    return ProductTile(rows, _padded(num_rows), 128, 4, 5 if rows == 64 else 8)


def int4_tile(num_rows: int, size_out: int, *, parts: int, group: int, bytes_of_x: int) -> ProductTile:
    """The tile of codes of 4 bits, whose columns are a group that shares a scale."""
    if num_rows > MOST_FEW:
        rows = 128 if bytes_of_x <= 2 else 32  # fp32 is for tests: it has no matrix units
        return ProductTile(128 // parts, rows, group, 8, 3 if bytes_of_x <= 2 else 1)
    rows = _few_rows_of_weight(size_out)
    stages = 1 if bytes_of_x > 2 else 5 if rows == 64 else 8
    return ProductTile(rows, _padded(num_rows), group, 4, stages)


def _padded(num_rows: int) -> int:
    return 16 if num_rows <= 16 else 32 if num_rows <= 32 else MOST_FEW


def _few_rows_of_weight(size_out: int) -> int:
    """Return the most rows that leave a program for each multiprocessor; 16 at least, of a matrix unit."""
    return next((rows for rows in (64, 32) if size_out >= rows * _PROGRAMS), 16)
