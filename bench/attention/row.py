"""A measured row, and why a contender has none, as data and as JSON. Imports no torch."""

from collections.abc import Iterable
from dataclasses import dataclass

from bench.attention.cases import BenchCase
from kernels.vocabulary.shape import Phase
from qualification.evidence.evidence import Timing

_MAX_NAME = 160  # of the characters of a kernel's name, which are hundreds where a template's arguments are named


@dataclass(frozen=True, slots=True)
class Row:
    """One contender on one case."""

    case: BenchCase
    contender: str
    is_peer: bool
    is_graphed: bool  # timed as the replay of a CUDA graph
    kernels: tuple[str, ...]  # as the profiler saw them, the longest-running first
    timing: Timing
    tflops: float  # causal counted as the visible pairs, half the square
    bytes_per_second: float  # by the IO model: everything read or written once
    floor_us: float | None  # no version runs much faster; None where the machine's ceilings are not known
    temporary_bytes: int | None  # peak, beyond the output; None on a CPU
    max_error: float  # against the fp64 oracle, on sampled rows
    error_share: float  # the largest error as a share of its own limit: above 1 is wrong (docs/limits.md)
    bias_share: float  # the same of the mean signed error
    num_nonfinite: int  # values of the whole output that are NaN or infinite
    best_peer: str | None
    ratio: float | None  # the best peer's time over this one's: above 1 is faster

    @property
    def floor_fraction(self) -> float | None:
        return None if self.floor_us is None else self.floor_us / self.timing.p50_us

    @property
    def is_right(self) -> bool:
        return self.num_nonfinite == 0 and self.error_share <= 1 and self.bias_share <= 1


@dataclass(frozen=True, slots=True)
class Absence:
    """The reason why a contender has no row for a case."""

    case: BenchCase
    contender: str
    reason: str


@dataclass(frozen=True, slots=True)
class Outcome:
    """The results of a run. `unmeasured` cases had no time left, or the device was `lost`."""

    rows: tuple[Row, ...]
    absences: tuple[Absence, ...]
    unmeasured: tuple[BenchCase, ...] = ()
    lost: str | None = None


def sorted_rows(rows: Iterable[Row]) -> list[Row]:
    """Sort rows by case, then paths before peers, then by name."""
    return sorted(rows, key=lambda row: (_case_key(row.case), row.is_peer, row.contender))


def rows_as_json(rows: Iterable[Row]) -> list[dict[str, object]]:
    return [_as_json(row) for row in sorted_rows(rows)]


def absences_as_json(absences: Iterable[Absence]) -> list[dict[str, object]]:
    """Return each contender and reason once, with the cases it holds for."""
    found: dict[tuple[str, str], list[BenchCase]] = {}
    for absence in absences:
        found.setdefault((absence.contender, absence.reason), []).append(absence.case)
    return [
        {"contender": name, "reason": reason, "cases": [str(case) for case in sorted(cases, key=_case_key)]}
        for (name, reason), cases in sorted(found.items())
    ]


def _case_key(case: BenchCase) -> tuple[int, str, int, int, int, float, bool, str, int, int, int]:
    shape = case.shape
    return (
        list(Phase).index(shape.phase),
        shape.dtype.value,
        shape.head_dim,
        -shape.num_heads,
        shape.window or 0,
        shape.softcap or 0.0,
        shape.sinks,
        case.mix,
        max(case.queries) if shape.phase is not Phase.PREFILL else 0,
        len(case.keys) if shape.phase is Phase.DECODE else 0,
        max(case.keys),
    )


def _as_json(row: Row) -> dict[str, object]:
    case, shape = row.case, row.case.shape
    return {
        "phase": shape.phase.value,
        "dtype": shape.dtype.value,
        "heads": shape.num_heads,
        "kv_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "window": shape.window,
        "softcap": shape.softcap,
        "sinks": shape.sinks,
        "page_size": shape.page_size,
        "lengths": case.mix,
        "sequences": len(case.queries),
        "longest_query": max(case.queries),
        "longest_context": max(case.keys),
        "query_tokens": sum(case.queries),
        "context_tokens": sum(case.keys),
        "contender": row.contender,
        "is_peer": row.is_peer,
        "launch": "graph" if row.is_graphed else "eager",
        "kernels": [name[:_MAX_NAME] for name in row.kernels],
        "p50_us": row.timing.p50_us,
        "spread": row.timing.spread,
        "n": row.timing.n,
        "tflops": _digits(row.tflops),
        "bytes_per_second": _digits(row.bytes_per_second),
        "floor_us": _digits(row.floor_us),
        "floor_fraction": _digits(row.floor_fraction),
        "peak_temporary_bytes": row.temporary_bytes,
        "max_error": _digits(row.max_error),
        "error_share": _digits(row.error_share),
        "bias_share": _digits(row.bias_share),
        "nonfinite": row.num_nonfinite,
        "is_right": row.is_right,
        "best_peer": row.best_peer,
        "ratio_to_best_peer": _digits(row.ratio),
    }


def _digits(value: float | None) -> float | None:
    """Four digits: more would only make diffs unreadable. JSON has no NaN: what is no number has no value."""
    return None if value is None or value - value != 0 else float(f"{value:.4g}")
