"""Runs one path on hostile inputs and measures its errors by the rule of `kernels.reference.compare`."""

import math
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Protocol

import torch
from torch import Tensor

from kernels.reference.compare import Errors, errors_of
from kernels.vocabulary.path import RunAttention
from qualification.evidence.evidence import CHECK_LIMITS, Check, strain
from qualification.measure.checks.references import References
from qualification.measure.inputs.attention_inputs import GUARD_MARK, GUARD_ROWS, Case, guarded

_REPEATED = frozenset({"ragged", "long"})  # cases that run twice: the same input must give the same bits


class AnyCase(Protocol):
    """One input, of any operator."""

    @property
    def name(self) -> str: ...
    @property
    def seed(self) -> int: ...


def check_path(run: RunAttention, cases: Iterable[Case], references: References | None = None) -> tuple[Check, ...]:
    """Return, for each measure, the worst check over all cases. Errors of `run` are not caught.

    `references` are of these cases, kept by who checks several paths on them.

    drawn_rows      the largest error against the fp64 oracle, on the rows that are drawn, as a share of its limit
    every_row       the same on all rows, against attention in fp32 and its wider limits
    bias            the mean signed error along the truth, as a share of its limit
    nonfinite       values of the output that are NaN or infinite, rows that were never written included
    guard_writes    values beside the output that were overwritten
    unequal_repeat  values that differ when the same input is run again
    """
    references = references or References()
    return worst_of_each(check for case in cases for check in _check_case(run, case, references))


def worst_of_each(checks: Iterable[Check]) -> tuple[Check, ...]:
    """Return the worst check of each name, sorted by name; of equally bad ones the first."""
    worst: dict[str, Check] = {}
    for check in checks:
        known = worst.get(check.name)
        if known is None or strain(check.measured, check.limit) > strain(known.measured, known.limit):
            worst[check.name] = check
    return tuple(worst[name] for name in sorted(worst))


def checked(name: str, case: AnyCase, measured: float, where: str = "") -> Check:
    """Return a measured value as a check against its limit; `where` is kept if it fails."""
    limit, unit = CHECK_LIMITS[name]
    check = Check(name, case.name, _finite(measured), limit, unit, case.seed)
    return check if check.is_passed else replace(check, where=where)


def run_case(run: RunAttention, case: Case) -> tuple[Tensor, int]:
    """(the output [tokens, heads, head_dim], NaN where it was not written; the number of guard values overwritten)."""
    storage, out = guarded(case.q.shape[0], case.q, math.nan, GUARD_MARK)
    run(case.q, case.k, case.v, case.batch, case.flags, out)
    edges = (storage[:GUARD_ROWS], storage[GUARD_ROWS + out.shape[0] :])
    return out, sum(int((edge != GUARD_MARK).sum()) for edge in edges)


@contextmanager
def one_thread() -> Iterator[None]:
    """Use one thread for thousands of tiny CPU operations: on a busy 2-core machine two took 27 s, one takes 1.2 s."""
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
        drawn, every = errors_of(out[case.rows], reference.drawn), errors_of(out, reference.every)
    found = [
        checked("drawn_rows", case, drawn.worst, _place(drawn, case.rows)),
        checked("every_row", case, every.worst, _place(every, None)),
        checked("bias", case, abs(drawn.bias) / drawn.bias_limit, f"the output is {1 + drawn.bias:.6g} of the truth"),
        checked("nonfinite", case, int((~torch.isfinite(out)).sum())),
        checked("guard_writes", case, guard_writes),
    ]
    if case.name in _REPEATED:
        again, _ = run_case(run, case)
        found.append(checked("unequal_repeat", case, int((again != out).sum())))
    return found


def _place(errors: Errors, rows: Tensor | None) -> str:
    row, head, column = errors.worst_at
    row = row if rows is None or rows.numel() == 0 else int(rows[row])
    limit = f"at most {errors.worst_limit:.3g} may be"
    return f"row {row}, head {head}, column {column}: off by {errors.worst_error:.3g}, {limit}"


def _finite(value: float) -> float:
    """Six digits, for readable diffs. JSON has no NaN: what is no number becomes the largest, which passes no limit."""
    return float(f"{value:.6g}") if math.isfinite(value) else sys.float_info.max
