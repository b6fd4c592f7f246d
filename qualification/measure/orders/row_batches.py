"""Batches of operators that compute each row by itself: the same few rows everywhere among hostile neighbours."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

POOL_ROWS = 24  # rows that come again in every batch
_EACH_UP_TO = 128  # rows: a GPU tries every number of them
_AND = (129, 130, 144, 159, 160, 161, 191, 192, 193, 224, 255, 256)  # rows: edges of tiles beyond
_CPU_FLOPS = 2**32  # of one shape on a CPU: half a second or less
_COUNTS_CPU = 16
_CALLS_A_COUNT = 4


@dataclass(frozen=True, slots=True)
class RowBatch:
    """`source` [rows] int64: below POOL_ROWS a row of the pool, from there on a hostile row."""

    name: str
    source: Tensor
    is_strided: bool = False

    @property
    def judged(self) -> Tensor:
        """Return the places of the rows of the pool, [n] int64."""
        return (self.source < POOL_ROWS).nonzero()[:, 0]


def hostile_rows(columns: int, dtype: torch.dtype, random: torch.Generator) -> Tensor:
    """[n, columns]: rows that must not be seen from another, the first of them of ordinary numbers."""
    device, limits = random.device, torch.finfo(dtype)

    def randn() -> Tensor:
        return torch.randn(columns, generator=random, device=device)

    spotted = randn()
    spotted[columns // 2] = torch.nan
    sign = torch.where(torch.arange(columns, device=device) % 2 == 0, 1.0, -1.0)
    rows = [randn(), torch.full_like(sign, torch.nan), sign * limits.max, torch.full_like(sign, torch.inf)]
    rows += [torch.zeros_like(sign), spotted, randn() * 1000, sign * limits.smallest_normal, randn() * 1e-3]
    return torch.stack(rows).to(dtype)


NUM_HOSTILE = 9


def row_batches(counts: Sequence[int], device: torch.device) -> Iterator[RowBatch]:
    """Every batch of these numbers of rows, ascending; the first ones hold all rows of the pool.

    pool        rows of the pool alone
    odd, even   each second row is hostile, so that every place has a row of the pool with hostile rows on both sides
    crowd       one row of four is of the pool, all others are the same
    """
    for first in range(0, POOL_ROWS, counts[0]):
        yield _batch(f"pool from {first}", _pool(counts[0], first, device))
    for turn, count in enumerate(counts):
        pool = _pool(count, 7 * turn + 1, device)
        place = torch.arange(count, device=device)
        hostile = POOL_ROWS + (place + turn) % NUM_HOSTILE
        yield _batch("pool", pool)
        if count == 1:
            continue
        yield _batch("odd", torch.where(place % 2 == 1, hostile, pool))
        yield _batch("even", torch.where(place % 2 == 0, hostile, pool), is_strided=True)
        yield _batch("crowd", torch.where((place + turn) % 4 == 0, pool, POOL_ROWS))


def order_counts(lo: int, hi: int | None, flops_of_row: int, *, is_cpu: bool) -> tuple[int, ...]:
    """Numbers of rows of the bucket `(lo, hi]` to try, ascending: all up to 128, edges up to 256 and of the bucket.

    On a CPU the fewest, the most up to 256, and as many as cost little of about 16 between.
    """
    first, last = lo + 1, lo + 129 if hi is None else hi
    if not is_cpu:
        wanted = {
            first,
            first + 1,
            (first + last) // 2 | 1,
            last - 1,
            last,
            *range(first, min(last, _EACH_UP_TO) + 1),
            *(it for it in _AND if first <= it <= last),
        }
        return tuple(sorted(it for it in wanted if first <= it <= last))
    most = max(first, min(last, 256))
    found, left = {first}, _CPU_FLOPS - first * flops_of_row * (POOL_ROWS // first + _CALLS_A_COUNT)
    step = max(1, (most - first) // _COUNTS_CPU)
    for count in (most, first + 1, (first + most) // 2 | 1, most - 1, *range(first + 2, most - 1, step)):
        cost = _CALLS_A_COUNT * count * flops_of_row
        if first < count <= most and count not in found and cost <= left:
            found.add(count)
            left -= cost
    return tuple(sorted(found))


def _pool(count: int, first: int, device: torch.device) -> Tensor:
    return (torch.arange(count, device=device) + first) % POOL_ROWS


def _batch(layout: str, source: Tensor, *, is_strided: bool = False) -> RowBatch:
    return RowBatch(f"{source.numel()} rows, {layout}", source, is_strided)
