"""Runs a path of products with weights on hostile inputs and measures its errors against fp64."""

import math
from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from kernels.linear.shape import Epilogue
from kernels.reference.compare import Reference, errors_of
from kernels.reference.linear import linear_reference
from qualification.evidence.evidence import CHECK_LIMITS, Check, strain
from qualification.measure.inputs import GUARD_MARK, GUARD_ROWS
from qualification.measure.linear_inputs import LinearCase

# Fills `out` [rows, size_out], its last argument, with epilogue(x @ weight^T + bias).
RunLinear = Callable[[Tensor, Tensor, Tensor | None, Epilogue, Tensor], None]


def check_linear(run: RunLinear, cases: Iterable[LinearCase]) -> tuple[Check, ...]:
    """Return, for each measure, the worst check over all cases. Errors of `run` are not caught.

    every_row       the largest error against fp64, on every row, as a share of its limit
    nonfinite       values of the output that are NaN or infinite, rows that were never written included
    guard_writes    values beside the output that were overwritten
    unequal_repeat  values that differ when the same input is run again
    """
    worst: dict[str, Check] = {}
    for case in cases:
        for check in _check_case(run, case):
            known = worst.get(check.name)
            if known is None or strain(check.measured, check.limit) > strain(known.measured, known.limit):
                worst[check.name] = check
    return tuple(worst[name] for name in sorted(worst))


def _check_case(run: RunLinear, case: LinearCase) -> list[Check]:
    judged = [row for row in range(case.x.shape[0]) if row != case.nan_row]
    whole = linear_reference(case.x[judged], case.operands.weight, case.operands.bias, case.epilogue)
    found = []
    for num_rows in case.row_counts:
        out, guard_writes = _run_case(run, case, num_rows)
        rows = [row for row in judged if row < num_rows]
        errors = errors_of(out[rows][:, None], _first_rows(whole, len(rows)))
        row, _, column = errors.worst_at
        where = f"{num_rows} rows, row {rows[row]}, column {column}: off by {errors.worst_error:.3g}"
        found += [
            _check("every_row", case, errors.worst, f"{where}, at most {errors.worst_limit:.3g} may be"),
            _check("nonfinite", case, errors.num_nonfinite, f"{num_rows} rows"),
            _check("guard_writes", case, guard_writes, f"{num_rows} rows"),
        ]
        if case.repeats:
            again, _ = _run_case(run, case, num_rows)
            found.append(_check("unequal_repeat", case, int((again != out).sum()), f"{num_rows} rows"))
    return found


def _first_rows(reference: Reference, num_rows: int) -> Reference:
    return Reference(reference.truth[:num_rows], reference.limit[:num_rows], None, reference.bias_limit)


def _run_case(run: RunLinear, case: LinearCase, num_rows: int) -> tuple[Tensor, int]:
    """(the output [num_rows, size_out], NaN where it was not written; the number of guard values overwritten)."""
    operands, epilogue = case.operands, case.epilogue
    size_out = operands.weight.shape[0] // epilogue.parts
    dtype = torch.float32 if epilogue is Epilogue.FP32 else case.x.dtype
    shape = num_rows + 2 * GUARD_ROWS, size_out
    storage = torch.full(shape, GUARD_MARK, dtype=dtype, device=case.x.device)
    out = storage[GUARD_ROWS : GUARD_ROWS + num_rows].fill_(math.nan)
    run(case.first_rows(num_rows), operands.weight, operands.bias, epilogue, out)
    edges = (storage[:GUARD_ROWS], storage[GUARD_ROWS + num_rows :])
    return out, sum(int((edge != GUARD_MARK).sum()) for edge in edges)


def _check(name: str, case: LinearCase, measured: float, where: str = "") -> Check:
    limit, unit = CHECK_LIMITS[name]
    number = float(f"{measured:.6g}") if math.isfinite(measured) else torch.finfo(torch.float64).max
    is_passed = number <= limit
    return Check(name, case.name, number, limit, unit, case.seed, "" if is_passed else where)
