"""Running one path on hostile inputs and measuring what it did against the rule of `kernels.attention.compare`."""

import math
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from kernels.attention.compare import errors_of
from kernels.path import RunAttention
from qualification.evidence import Check, strain
from qualification.inputs import GUARD_MARK, GUARD_ROWS, Case, guarded
from qualification.references import References
from qualification.rows import row_error

_REPEATED = frozenset({"ragged", "long"})  # cases that run twice: the same input must give the same bits


def check_path(run: RunAttention, cases: Iterable[Case], references: References | None = None) -> tuple[Check, ...]:
    """For each measure the worst check over all cases. What `run` raises goes through.

    `references` are of these cases, kept by who checks several paths on them.

    max_error, mean_error  against the fp64 oracle; limits are 2x and 1.5x of naive attention's in the same dtype
    absolute_error         the maximum error on inputs of unit variance; the limit is a constant of the dtype
    row_error              of every row and head, not only of those drawn: see `qualification/rows.py`
    nonfinite              values of the output that are NaN or infinite, rows that were never written included
    guard_writes           values beside the output that were overwritten
    unequal_repeat         values that differ when the same input is run again
    """
    worst: dict[str, Check] = {}
    references = references or References()
    for case in cases:
        for check in _check_case(run, case, references):
            known = worst.get(check.name)
            if known is None or strain(check.measured, check.limit) > strain(known.measured, known.limit):
                worst[check.name] = check
    return tuple(worst[name] for name in sorted(worst))


def run_case(run: RunAttention, case: Case) -> tuple[Tensor, int]:
    """(the output [tokens, heads, head_dim], NaN where it was not written; the number of guard values overwritten)."""
    storage, out = guarded(case.q.shape[0], case.q, math.nan, GUARD_MARK)
    run(case.q, case.k, case.v, case.batch, case.flags, out)
    edges = (storage[:GUARD_ROWS], storage[GUARD_ROWS + out.shape[0] :])
    return out, sum(int((edge != GUARD_MARK).sum()) for edge in edges)


@contextmanager
def one_thread() -> Iterator[None]:
    """For thousands of tiny operations on a CPU: on a busy 2-core machine two threads took 27 s, one takes 1.2 s."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(num_threads)


def _check_case(run: RunAttention, case: Case, references: References) -> list[Check]:
    with one_thread():
        reference = references.of(case)  # before the path runs, which may spoil what it should only read
    out, guard_writes = run_case(run, case)
    with one_thread():
        errors = errors_of(out[case.rows], reference.drawn, case.flags)
    nonfinite = int((~torch.isfinite(out)).sum())
    found = [
        _check("max_error", case, errors.max_error, errors.max_limit),
        _check("mean_error", case, errors.mean_error, errors.mean_limit),
        _check("nonfinite", case, nonfinite, 0, "values"),
        _check("guard_writes", case, guard_writes, 0, "values"),
    ]
    if case.is_unit_variance:
        found.append(_check("absolute_error", case, errors.max_error, errors.absolute_cap))
    if reference.rows is not None:
        found.append(_check("row_error", case, row_error(out, reference.rows), reference.rows.limit, "rel"))
    if case.name in _REPEATED:
        again, _ = run_case(run, case)
        found.append(_check("unequal_repeat", case, int((again != out).sum()), 0, "values"))
    return found


def _check(name: str, case: Case, measured: float, limit: float, unit: str = "abs") -> Check:
    allowed = _finite(limit) if math.isfinite(limit) else 0.0  # where nobody knows what to allow, nothing is
    return Check(name, case.name, _finite(measured), allowed, unit, case.seed)


def _finite(value: float) -> float:
    """Six digits, for readable diffs. JSON has no NaN: what is no number becomes the largest, which passes no limit."""
    return float(f"{value:.6g}") if math.isfinite(value) else sys.float_info.max
