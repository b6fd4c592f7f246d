"""Evidence as the rows of a matrix file: short enough to be read, and each saying only what is its own."""

import hashlib
from collections.abc import Iterable, Mapping

import msgspec

from kernels.vocabulary.fingerprint import Fingerprint
from qualification.evidence.evidence import Check, Evidence, Invariance, Timing
from qualification.evidence.shape_text import parse_shape


class Run(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True, kw_only=True):
    """The fields that all rows of one measurement share."""

    at: str
    suite: int
    commit: str | None = None
    command: str | None = None
    sources: dict[str, str]  # path -> digest of its source


class _Check(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    measured: float
    limit: float
    unit: str
    case: str
    seed: int


class _Timing(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    p50_us: float
    spread: float
    n: int
    floor_us: float | None = None
    sequences: int = 1


class _Invariance(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True, kw_only=True):
    order: str
    suite: int
    compared: int
    changed: int
    digests: dict[str, str]
    where: str = ""


class Row(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True, kw_only=True):
    """One (shape, path), its fields in the order in which a person reads them."""

    shape: str
    path: str
    run: str
    tokens: tuple[int, int]  # of the longest tested sequence: query, context
    timing: _Timing | None = None
    kernels: tuple[str, ...] | None = None
    kernels_sometimes: tuple[str, ...] = ()
    temporary_bytes: int | None = None
    measured_bytes: int | None = None
    failure: str | None = None
    checks: dict[str, _Check]
    where: dict[str, str] = {}  # of the checks that failed
    invariance: _Invariance | None = None


def rows_of(evidence: Iterable[Evidence]) -> tuple[list[Row], dict[str, Run]]:
    """The sorted rows, and the runs by the name that rows call them.

    Raises ValueError for a shape that its own line does not describe fully.
    """
    ordered = sorted(evidence, key=lambda entry: (str(entry.shape), entry.path))
    runs = {_name(run): run for run in _runs(ordered)}
    rows = []
    for entry in ordered:
        if parse_shape(str(entry.shape)) != entry.shape:
            raise ValueError(f"the line {entry.shape} does not describe the shape fully")
        (name,) = [name for name, run in runs.items() if _belongs(entry, run)]
        rows.append(_row(entry, name))
    return rows, runs


def evidence_of(rows: Iterable[Row], runs: Mapping[str, Run], fingerprint: Fingerprint) -> list[Evidence]:
    """The inverse. Raises ValueError and LookupError for rows that name no shape, no run or no source."""
    return [_evidence(row, runs[row.run], fingerprint) for row in rows]


def _runs(evidence: Iterable[Evidence]) -> list[Run]:
    """Group evidence into the fewest runs that hold one source a path."""
    found: list[Run] = []
    for entry in evidence:
        for run in found:
            if _belongs(entry, run):
                break
            if _heads(entry) == (run.at, run.suite, run.commit, run.command) and entry.path not in run.sources:
                run.sources[entry.path] = entry.source_digest
                break
        else:
            at, suite, commit, command = _heads(entry)
            sources = {entry.path: entry.source_digest}
            found.append(Run(at=at, suite=suite, commit=commit, command=command, sources=sources))
    return found


def _heads(entry: Evidence) -> tuple[str, int, str | None, str | None]:
    return entry.at, entry.suite, entry.commit, entry.command


def _belongs(entry: Evidence, run: Run) -> bool:
    heads = (run.at, run.suite, run.commit, run.command)
    return _heads(entry) == heads and run.sources.get(entry.path) == entry.source_digest


def _name(run: Run) -> str:
    return hashlib.sha256(msgspec.json.encode(run, order="sorted")).hexdigest()[:8]


def _row(entry: Evidence, run: str) -> Row:
    timing = entry.timing
    return Row(
        shape=str(entry.shape),
        path=entry.path,
        run=run,
        tokens=(entry.tested_query_tokens, entry.tested_context_tokens),
        timing=None
        if timing is None
        else _Timing(timing.p50_us, timing.spread, timing.n, entry.floor_us, entry.timed_sequences),
        kernels=entry.kernels,
        kernels_sometimes=entry.kernels_sometimes,
        temporary_bytes=entry.temporary_bytes,
        measured_bytes=entry.measured_bytes,
        failure=entry.failure,
        checks={it.name: _Check(it.measured, it.limit, it.unit, it.case, it.seed) for it in entry.checks},
        where={it.name: it.where for it in entry.checks if it.where},
        invariance=_invariance_row(entry.invariance),
    )


def _evidence(row: Row, run: Run, fingerprint: Fingerprint) -> Evidence:
    timing = row.timing
    return Evidence(
        shape=parse_shape(row.shape),
        path=row.path,
        source_digest=run.sources[row.path],
        fingerprint=fingerprint,
        checks=tuple(
            Check(name, it.case, it.measured, it.limit, it.unit, it.seed, row.where.get(name, ""))
            for name, it in row.checks.items()
        ),
        tested_query_tokens=row.tokens[0],
        tested_context_tokens=row.tokens[1],
        at=run.at,
        timing=None if timing is None else Timing(timing.p50_us, timing.spread, timing.n),
        timed_sequences=1 if timing is None else timing.sequences,
        floor_us=None if timing is None else timing.floor_us,
        kernels=row.kernels,
        kernels_sometimes=row.kernels_sometimes,
        temporary_bytes=row.temporary_bytes,
        measured_bytes=row.measured_bytes,
        failure=row.failure,
        suite=run.suite,
        commit=run.commit,
        command=run.command,
        invariance=_invariance(row.invariance),
    )


def _invariance_row(seen: Invariance | None) -> _Invariance | None:
    if seen is None:
        return None
    return _Invariance(
        order=seen.order,
        suite=seen.suite,
        compared=seen.compared,
        changed=seen.changed,
        digests=dict(seen.digests),
        where=seen.where,
    )


def _invariance(row: _Invariance | None) -> Invariance | None:
    if row is None:
        return None
    return Invariance(row.order, row.compared, row.changed, tuple(sorted(row.digests.items())), row.where, row.suite)
