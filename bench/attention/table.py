"""Rows as tables for terminals, and what they come to. Imports no torch."""

import math
from collections.abc import Iterable
from itertools import groupby

from bench.attention.row import Absence, Row, sorted_rows
from kernels.driver.kernel_names import short_name
from kernels.vocabulary.shape import Phase
from qualification.common.table import table
from qualification.evidence.summary import time_text

_HEAD = (
    "case",
    "by",
    "p50",
    "+-",
    "n",
    "TFLOP/s",
    "TB/s",
    "of floor",
    "temporary",
    "error, its limit",
    "x peer",
    "kernel",
)
_SUMMARY_HEAD = ("phase", "dtype", "head dim", "flags", "lengths", "path", "cases", "x best peer", "worst", "in")
_MAX_KERNEL = 44  # characters


def rows_table(rows: Iterable[Row]) -> list[str]:
    """A line for each row; `x peer` is the best peer's time over this one's, above 1 is faster."""
    lines: list[tuple[str, ...]] = []
    for case, group in groupby(sorted_rows(rows), key=lambda row: row.case):
        for index, row in enumerate(group):
            lines.append((str(case) if index == 0 else "", *_cells(row)))
    return table(_HEAD, lines)


def summary_table(rows: Iterable[Row]) -> list[str]:
    """Give each path's geometric mean of its ratios to the best peer, and its worst ratio; wrong rows count as 0."""
    groups: dict[tuple[str, ...], list[Row]] = {}
    for row in sorted_rows(rows):
        if not row.is_peer and row.ratio is not None:
            shape = row.case.shape
            place = (shape.phase.value, shape.dtype.value, f"{shape.head_dim}", row.case.flag_text, row.case.mix)
            groups.setdefault((*place, row.contender), []).append(row)
    lines: list[tuple[str, ...]] = []
    for key, group in groups.items():
        worst = min(group, key=_ratio)
        ratios = [_ratio(row) for row in group]
        mean = math.exp(math.fsum(map(math.log, ratios)) / len(ratios)) if min(ratios) > 0 else 0.0
        lines.append((*key, f"{len(group)}", f"{mean:.3f}", f"{_ratio(worst):.3f}", str(worst.case)))
    return table(_SUMMARY_HEAD, lines)


def absences_lines(absences: Iterable[Absence]) -> list[str]:
    """Print each contender and reason once, with the number of cases."""
    counts: dict[tuple[str, str], int] = {}
    for absence in absences:
        key = (absence.contender, absence.reason)
        counts[key] = counts.get(key, 0) + 1
    return [f"{name}: not in {count} cases: {reason}" for (name, reason), count in sorted(counts.items())]


def _ratio(row: Row) -> float:
    return row.ratio if row.ratio is not None and row.is_right else 0.0


def _cells(row: Row) -> tuple[str, ...]:
    is_wrong = "" if row.is_right else " WRONG"
    return (
        row.contender,
        time_text(row.timing.p50_us),
        f"{100 * row.timing.spread:.1f} %",
        f"{row.timing.n}",
        f"{row.tflops:.4g}",
        f"{row.bytes_per_second / 1e12:.3g}",
        "-" if row.floor_fraction is None else f"{100 * row.floor_fraction:.0f} %",
        "-" if row.temporary_bytes is None else f"{row.temporary_bytes / 2**20:.4g} MiB",
        f"{row.max_error:.2g} ({row.error_share:.2g} of its limit){is_wrong}",
        "-" if row.ratio is None else f"{row.ratio:.3f}",
        short_name(row.kernels[0])[:_MAX_KERNEL] if row.kernels else "-",
    )


def speed_of(row: Row) -> float:
    """Return TFLOP/s; TB/s for decode, which bandwidth bounds."""
    return row.bytes_per_second / 1e12 if row.case.shape.phase is Phase.DECODE else row.tflops
