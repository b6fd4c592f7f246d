"""A matrix as tables for people: for each shape its paths by what orders them, the chosen one marked.

That is the measured time, or the catalog's order where no time chooses (`is_chosen_by_time`).
"""

from collections import Counter
from collections.abc import Callable, Iterable
from itertools import groupby

from kernels.vocabulary.operators import AnyShape, is_bound_by_memory, phase_of
from kernels.vocabulary.path_order import is_chosen_by_time, place_of
from kernels.vocabulary.shape import AttentionShape, Phase
from kernels.vocabulary.value_shape import values_of
from qualification.common.table import table
from qualification.evidence.choice import choice_of, is_left_to_fallback, time_of
from qualification.evidence.evidence import ORDER_SUITE, SUITE, Check, Evidence

Changed = Callable[[Evidence], tuple[str, ...]]  # what has changed since it was measured, by field name

_HEAD = ("phase", "query", "context", "window", "path", "status", "p50", "speed", "order", "worst check, its limit")
_MAX_DETAIL = 60  # characters
OUTCOMES = ("by a wanted path", "by a fallback only", "by nothing")


def unchanged(_: Evidence) -> tuple[str, ...]:
    return ()


def summary(evidence: Iterable[Evidence], changed: Changed = unchanged) -> list[str]:
    """A table for each set of heads, dtypes and flags. `*` marks the path that serves by this evidence."""
    lines: list[str] = []
    for title, entries in groupby(sorted(evidence, key=_order), key=lambda entry: _title(entry.shape)):
        rows = []
        for _, group in groupby(entries, key=lambda entry: entry.shape):
            rows += _rows(list(group), changed)
        lines += [title, *table(_HEAD, rows), ""]
    return lines


def counts(evidence: Iterable[Evidence]) -> str:
    """Return one line, such as "28 shapes, 120 measured: 117 proven, 1 failed, 2 of an older suite"."""
    entries = list(evidence)
    text = f"{len({entry.shape for entry in entries})} shapes, {len(entries)} measured"
    current = [entry for entry in entries if entry.suite == SUITE]
    num_proven = sum(entry.is_proven for entry in current)
    numbers = [f"{num_proven} proven"]
    numbers += [f"{len(current) - num_proven} failed"] if num_proven < len(current) else []
    numbers += [f"{len(entries) - len(current)} of an older suite"] if len(current) < len(entries) else []
    checked = [entry.invariance for entry in current if entry.invariance is not None]
    num_kept = sum(seen.is_passed and seen.suite == ORDER_SUITE for seen in checked)
    numbers += [f"{num_kept} of {len(checked)} keep their order"] if checked else []
    return f"{text}: {', '.join(numbers)}"


def outcomes(evidence: Iterable[Evidence]) -> Counter[str]:
    """Count the shapes that a wanted path serves by this evidence, those left to a fallback, and the rest."""
    by_shape: dict[AnyShape, list[Evidence]] = {}
    for entry in evidence:
        by_shape.setdefault(entry.shape, []).append(entry)
    found: Counter[str] = Counter()
    for entries in by_shape.values():
        chosen = choice_of(entry for entry in entries if entry.suite == SUITE)
        if chosen is None:
            found[OUTCOMES[2]] += 1
        else:
            found[OUTCOMES[int(is_left_to_fallback(chosen, entries))]] += 1
    return found


def status_of(entry: Evidence, changed: tuple[str, ...] = ()) -> str:
    """Return the status; evidence of an older suite of checks is stale, whatever its checks say."""
    if changed or entry.suite != SUITE:
        return f"stale ({', '.join(changed or ('suite',))})"
    return "proven" if entry.is_proven else "failed"


def time_text(p50_us: float | None) -> str:
    if p50_us is None:
        return "-"
    return f"{p50_us:.4g} us" if p50_us < 1000 else f"{p50_us / 1000:.4g} ms"


def measured_text(entry: Evidence) -> str:
    """The time, and whether it is not believed: it chooses no path then."""
    if entry.timing is None or entry.timing_doubt is None:
        return time_text(None if entry.timing is None else entry.timing.p50_us)
    return f"{time_text(entry.timing.p50_us)} not believed ({entry.timing_doubt})"


def check_text(check: Check | None) -> str:
    if check is None:
        return "-"
    return f"{check.name} {check.measured:.3g} of {check.limit:.3g} ({check.case})"


def order_text(entry: Evidence) -> str:
    """Return the order that was checked, and whether bits depend on the batch; "-" where none was."""
    seen = entry.invariance
    if seen is None:
        return "-"
    if seen.suite != ORDER_SUITE:
        return f"{seen.order} (older check)"
    return seen.order if seen.is_passed else f"{seen.order} broken"


def _rows(entries: list[Evidence], changed: Changed) -> list[tuple[str, ...]]:
    chosen = choice_of(entry for entry in entries if not changed(entry) and entry.suite == SUITE)
    place = _place(entries[0].shape)
    ordered = sorted(entries, key=_order_of_paths)
    return [
        (
            *(place if index == 0 else ("",) * len(place)),
            f"{'*' if entry is chosen else ' '} {entry.path}",
            status_of(entry, changed(entry)),
            measured_text(entry),
            _speed(entry),
            order_text(entry),
            check_text(entry.worst_check) if entry.failure is None else _shortened(entry.failure),
        )
        for index, entry in enumerate(ordered)
    ]


def _order_of_paths(entry: Evidence) -> tuple[bool, float, str]:
    order = time_of(entry) if is_chosen_by_time(entry.path) else float(place_of(entry.path))
    return not entry.is_proven, order, entry.path


def _place(shape: AnyShape) -> tuple[str, str, str, str]:
    """Phase, query, context and window; of an operator without context the bucket of its rows in place of queries."""
    if not isinstance(shape, AttentionShape):
        return phase_of(shape), shape.rows.label, "", ""
    window = "" if shape.window is None else str(shape.window)
    return phase_of(shape), shape.query_bucket.label, shape.context_bucket.label, window


def _speed(entry: Evidence) -> str:
    """Return GB/s for what bandwidth bounds, decode for one, else TFLOP/s; and the share of the machine's floor."""
    share = "" if entry.floor_fraction is None else f" ({entry.floor_fraction:.0%})"
    if is_bound_by_memory(entry.shape):
        return "-" if entry.bytes_per_second is None else f"{entry.bytes_per_second / 1e9:.4g} GB/s{share}"
    return "-" if entry.tflops is None else f"{entry.tflops:.4g} TFLOP/s{share}"


def _shortened(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= _MAX_DETAIL else line[: _MAX_DETAIL - 3] + "..."


def _title(shape: AnyShape) -> str:
    """Return what the shapes of one model share. The page size is no part of prefill's shapes."""
    if not isinstance(shape, AttentionShape):
        return shape.kind
    dtype = shape.dtype.value if shape.dtype is shape.kv_dtype else f"{shape.dtype.value}/kv-{shape.kv_dtype.value}"
    parts = [dtype, f"{shape.num_heads}:{shape.num_kv_heads} heads", f"head dim {shape.head_dim}", shape.mask.value]
    parts += [str(values).replace("-", " ")] if (values := values_of(shape)) is not None else []
    parts += [f"softcap {shape.softcap:g}"] if shape.softcap is not None else []
    return " ".join([*parts, *(["sinks"] if shape.sinks else [])])


def _order(entry: Evidence) -> tuple[str, int, int, int, int, int]:
    """Return the sort key: by title, then as the plan lists shapes; paths are ordered within their shape."""
    shape = entry.shape
    if not isinstance(shape, AttentionShape):
        return (_title(shape), 0, 0, shape.rows.lo, 0, 0)
    buckets = (shape.query_bucket.lo, shape.context_bucket.lo)
    return (_title(shape), list(Phase).index(shape.phase), shape.window or 0, *buckets, shape.page_size or 0)
