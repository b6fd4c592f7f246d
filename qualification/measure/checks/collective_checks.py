"""Runs a path of a sum over ranks on hostile inputs and measures its errors against fp64, and rank against rank."""

import math
from collections.abc import Iterable
from dataclasses import replace
from typing import Protocol

import torch
from torch import Tensor

from kernels.collective.peers import AddNorm
from kernels.reference.collective import norm_reference, sum_reference
from kernels.reference.compare import Reference, errors_of
from qualification.evidence.evidence import Check
from qualification.measure.checks.checked import checked, uniquely_named, worst_of_each
from qualification.measure.inputs.collective_inputs import CollectiveCase
from qualification.measure.inputs.guard import GUARD_MARK, GUARD_ROWS, guarded

_REPEATED = frozenset({"most", "order"})  # cases that run twice: the same input must give the same bits


class RunOnRanks(Protocol):
    """A path, of which every rank makes the same calls. This process is rank 0."""

    def __call__(self, case: CollectiveCase, part: Tensor, follows: AddNorm | None, out: Tensor, /) -> None:
        """Fill out with the result of a case. part: rank 0's, which may be written over; follows: rank 0's."""

    def everywhere(self, own: Tensor) -> Tensor:
        """[ranks, *own's shape]: what each rank got from the last call, of which rank 0 got `own`."""


def check_collective(run: RunOnRanks, cases: Iterable[CollectiveCase]) -> tuple[Check, ...]:
    """Return, for each measure, the worst check over all cases. Errors of `run` are not caught.

    every_row       the largest error against fp64, on every row, as a share of its limit; of the residual too
    nonfinite       values that are NaN or infinite, rows that were never written included
    guard_writes    values beside the output that were overwritten
    unequal_repeat  values that differ when the same input is run again
    unequal_ranks   values in which a rank has other bits than rank 0
    """
    return worst_of_each(check for case in uniquely_named(cases) for check in _check_case(run, case))


def _check_case(run: RunOnRanks, case: CollectiveCase) -> list[Check]:
    out, follows, guard_writes = _run_case(run, case)
    others = run.everywhere(out)
    found = [
        checked("guard_writes", case, guard_writes),
        checked("unequal_ranks", case, int((bits(others) != bits(out)).sum())),
    ]
    if case.follows is None or follows is None:
        found += _errors(case, "sum", out, sum_reference(case.parts))
    else:
        found += _errors(case, "residual", follows.residual, sum_reference(case.parts, case.follows.residual))
        found += _errors(case, "norm", out, norm_reference(case.parts, case.follows))
    if case.name in _REPEATED:
        again, _, _ = _run_case(run, case)
        found.append(checked("unequal_repeat", case, int((bits(again) != bits(out)).sum())))
    return found


def _errors(case: CollectiveCase, what: str, found: Tensor, reference: Reference) -> list[Check]:
    errors = errors_of(found[:, None], reference)
    row, _, column = errors.worst_at
    where = (
        f"{what}, row {row}, column {column}: off by {errors.worst_error:.3g}, at most {errors.worst_limit:.3g} may be"
    )
    return [checked("every_row", case, errors.worst, where), checked("nonfinite", case, errors.num_nonfinite)]


def bits(values: Tensor) -> Tensor:
    """The same bits as integers: NaN differs from nothing but other bits."""
    return values.contiguous().view(torch.int32 if values.element_size() == 4 else torch.int16)


def _run_case(run: RunOnRanks, case: CollectiveCase) -> tuple[Tensor, AddNorm | None, int]:
    """(the output, NaN where it was not written; what followed; the number of guard values overwritten)."""
    storage, out = guarded(case.parts.shape[1], case.parts[0], math.nan, GUARD_MARK)
    _, part = guarded(case.parts.shape[1], case.parts[0], math.nan, math.nan)
    part.copy_(case.parts[0])
    follows = copied(case.follows)
    run(case, part, follows, out)
    edges = (storage[:GUARD_ROWS], storage[GUARD_ROWS + out.shape[0] :])
    return out, follows, sum(int((edge != GUARD_MARK).sum()) for edge in edges)


def copied(follows: AddNorm | None) -> AddNorm | None:
    """Return a copy with a residual of its own, which the call writes to."""
    return None if follows is None else replace(follows, residual=follows.residual.clone())
