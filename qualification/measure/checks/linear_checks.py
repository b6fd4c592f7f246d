"""Runs a path of products with weights on hostile inputs and measures its errors against fp64."""

import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from kernels.linear.epilogue import Epilogue
from kernels.linear.paths import RunLinear
from kernels.linear.rounded_input import TakesRounded
from kernels.reference.compare import Reference, errors_of
from kernels.reference.linear import linear_reference, units_may_take_8_bits
from qualification.evidence.evidence import Check
from qualification.measure.checks.checked import checked, one_thread, uniquely_named, worst_of_each
from qualification.measure.checks.norm_checks import num_unequal_behind_a_norm
from qualification.measure.inputs.guard import GUARD_MARK, GUARD_ROWS
from qualification.measure.inputs.linear_inputs import LinearCase

# Numbers of a result that a CPU compares, in some columns of every row: fp64 of all would take it minutes a model.
_MOST_ON_CPU, _LEAST_COLUMNS = 2**17, 64


def check_linear(run: RunLinear | Sequence[RunLinear], cases: Iterable[LinearCase]) -> tuple[Check, ...]:
    """Return, for each measure, the worst check over all cases. Errors of `run` are not caught.

    Of several calls the first two meet all cases, the others some numbers of rows of the one that repeats.

    every_row       the largest error against fp64, on every row, as a share of its limit
    nonfinite       values of the output that are NaN or infinite, rows that were never written included
    guard_writes    values beside the output that were overwritten
    unequal_repeat  values that differ when the same input is run again, or where the norm before a product rounds it
    """
    runs, num_threads = run if isinstance(run, Sequence) else (run,), torch.get_num_threads()
    with one_thread():  # but for the calls themselves
        return worst_of_each(
            check
            for case in uniquely_named(cases)
            for check in _check_case(runs if case.repeats else runs[:2], case, num_threads)
        )


def _check_case(runs: Sequence[RunLinear], case: LinearCase, num_threads: int) -> list[Check]:
    judged = [row for row in range(case.x.shape[0]) if row != case.nan_row]
    columns = _judged_columns(case)
    whole = _reference(case, judged, columns)
    found = []
    calls = [(run, count) for run in runs[:2] for count in case.row_counts]
    calls += [(run, count) for run in runs[2:] for count in some_rows(case.row_counts)]
    for run, num_rows in calls:
        out, guard_writes = _run_case(run, case, num_rows, num_threads)
        rows = [row for row in judged if row < num_rows]
        errors = errors_of(out[rows][:, None, columns], _first_rows(whole, len(rows)))
        row, _, place = errors.worst_at
        column = place if isinstance(columns, slice) else int(columns[place])
        where = f"{num_rows} rows, row {rows[row]}, column {column}: off by {errors.worst_error:.3g}"
        found += [
            checked("every_row", case, errors.worst, f"{where}, at most {errors.worst_limit:.3g} may be"),
            checked("nonfinite", case, int((~torch.isfinite(out[rows])).sum()), f"{num_rows} rows"),
            checked("guard_writes", case, guard_writes, f"{num_rows} rows"),
        ]
        if case.repeats:
            again, _ = _run_case(run, case, num_rows, num_threads)
            found.append(checked("unequal_repeat", case, int((again != out).sum()), f"{num_rows} rows"))
    for run in runs if case.x.is_contiguous() else ():
        if isinstance(run, TakesRounded) and case.x.shape[1] <= run.most_columns:
            found += [
                checked(
                    "unequal_repeat", case, num_unequal_behind_a_norm(run, case, num_rows), f"{num_rows} rows, normed"
                )
                for num_rows in some_rows(case.row_counts)
            ]
    return found


def some_rows(row_counts: Sequence[int]) -> tuple[int, ...]:
    """Return three of the numbers of rows, the most among them; all where there are no more."""
    return tuple(row_counts[:: -max(1, len(row_counts) // 3)])[:3]


def _judged_columns(case: LinearCase) -> slice | Tensor:
    """Columns of the result to compare: all; on a CPU of a large one both ends and, by the seed, some between."""
    size_out = case.operands.weight.size[0] // case.epilogue.parts
    count = max(_LEAST_COLUMNS, _MOST_ON_CPU // case.x.shape[0])
    if case.x.device.type != "cpu" or size_out <= count:
        return slice(None)
    edge = count // 4
    random = torch.Generator().manual_seed(case.seed)
    drawn = edge + torch.randperm(size_out - 2 * edge, generator=random)[: 2 * edge].sort().values
    return torch.cat([torch.arange(edge), drawn, torch.arange(size_out - edge, size_out)])


def _reference(case: LinearCase, rows: list[int], columns: slice | Tensor) -> Reference:
    weight, bias = case.operands.weight, case.operands.bias
    x, dtype = weight.as_multiplied(case.x[rows]), case.x.dtype
    of_8_bits = units_may_take_8_bits(weight.format(), case.x.shape[0])
    if isinstance(columns, slice):
        return linear_reference(x, weight.dequantized(), bias, case.epilogue, dtype, of_8_bits=of_8_bits)
    size_out = weight.size[0] // case.epilogue.parts
    judged = torch.cat([part * size_out + columns for part in range(case.epilogue.parts)])
    of_columns = None if bias is None else bias[columns]
    return linear_reference(x, weight.dequantized(judged), of_columns, case.epilogue, dtype, of_8_bits=of_8_bits)


def _first_rows(reference: Reference, num_rows: int) -> Reference:
    return Reference(reference.truth[:num_rows], reference.limit[:num_rows], None, reference.bias_limit)


def _run_case(run: RunLinear, case: LinearCase, num_rows: int, num_threads: int) -> tuple[Tensor, int]:
    """(the output [num_rows, size_out], NaN where it was not written; the number of guard values overwritten)."""
    operands, epilogue = case.operands, case.epilogue
    size_out = operands.weight.size[0] // epilogue.parts
    dtype = torch.float32 if epilogue is Epilogue.FP32 else case.x.dtype
    shape = num_rows + 2 * GUARD_ROWS, size_out
    storage = torch.full(shape, GUARD_MARK, dtype=dtype, device=case.x.device)
    out = storage[GUARD_ROWS : GUARD_ROWS + num_rows].fill_(math.nan)
    x = case.first_rows(num_rows)
    torch.set_num_threads(num_threads)
    try:
        run(x, operands.weight, operands.bias, epilogue, out)
    finally:
        torch.set_num_threads(1)
    edges = (storage[:GUARD_ROWS], storage[GUARD_ROWS + num_rows :])
    return out, sum(int((edge != GUARD_MARK).sum()) for edge in edges)
