"""Runs a path of a mixture's products on hostile inputs and measures its errors against fp64."""

import math
from collections.abc import Iterable

from torch import Tensor

from kernels.experts.paths import RunExperts
from kernels.reference.compare import errors_of
from qualification.evidence.evidence import Check
from qualification.measure.checks.checked import checked, uniquely_named, worst_of_each
from qualification.measure.checks.references import References
from qualification.measure.inputs.experts_inputs import ExpertsCase
from qualification.measure.inputs.guard import GUARD_MARK, GUARD_ROWS, guarded

_REPEATED = frozenset({"even", "edges", "most"})  # cases that run twice: the same input must give the same bits


def check_experts(
    run: RunExperts, cases: Iterable[ExpertsCase], references: References | None = None
) -> tuple[Check, ...]:
    """Return, for each measure, the worst check over all cases. Errors of `run` are not caught.

    `references` are of these cases, kept by who checks several paths on them.

    every_row       the largest error against fp64, on every row, as a share of its limit
    nonfinite       values of the output that are NaN or infinite, rows that were never written included
    guard_writes    values beside the output that were overwritten
    unequal_repeat  values that differ when the same input is run again
    """
    references = references or References()
    return worst_of_each(check for case in uniquely_named(cases) for check in _check_case(run, case, references))


def _check_case(run: RunExperts, case: ExpertsCase, references: References) -> list[Check]:
    reference = references.of_experts(case)
    out, guard_writes = _run_case(run, case)
    errors = errors_of(out[:, None], reference)
    row, _, column = errors.worst_at
    where = f"row {row}, column {column}: off by {errors.worst_error:.3g}, at most {errors.worst_limit:.3g} may be"
    found = [
        checked("every_row", case, errors.worst, where),
        checked("nonfinite", case, errors.num_nonfinite),
        checked("guard_writes", case, guard_writes),
    ]
    if case.name in _REPEATED:
        again, _ = _run_case(run, case)
        found.append(checked("unequal_repeat", case, int((again != out).sum())))
    return found


def _run_case(run: RunExperts, case: ExpertsCase) -> tuple[Tensor, int]:
    """(the output [T, H], NaN where it was not written; the number of guard values overwritten)."""
    storage, out = guarded(case.hidden.shape[0], case.hidden, math.nan, GUARD_MARK)
    run(case.hidden, case.experts, case.weights, case.expert_weights, case.activation, out)
    edges = (storage[:GUARD_ROWS], storage[GUARD_ROWS + out.shape[0] :])
    return out, sum(int((edge != GUARD_MARK).sum()) for edge in edges)
