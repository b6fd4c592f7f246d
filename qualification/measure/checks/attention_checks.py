"""Runs one path on hostile inputs and measures its errors by the rule of `kernels.reference.compare`."""

import math
from collections.abc import Iterable
from dataclasses import replace

import torch
from torch import Tensor

from kernels.calls.batch import AttentionFlags
from kernels.calls.indexed import IndexedFlags
from kernels.reference.compare import Errors, errors_of
from kernels.vocabulary.path import RunAttention
from qualification.evidence.evidence import Check
from qualification.measure.checks.checked import checked, one_thread, uniquely_named, worst_of_each
from qualification.measure.checks.references import References
from qualification.measure.inputs.attention_inputs import Case
from qualification.measure.inputs.guard import GUARD_MARK, GUARD_ROWS, guarded
from qualification.measure.inputs.index_inputs import unwritten

_REPEATED = frozenset({"ragged", "long"})  # cases that run twice: the same input must give the same bits


def check_path(run: RunAttention, cases: Iterable[Case], references: References | None = None) -> tuple[Check, ...]:
    """Return, for each measure, the worst check over all cases. Errors of `run` are not caught.

    `references` are of these cases, kept by who checks several paths on them.

    drawn_rows      the largest error against the fp64 oracle, on the rows that are drawn, as a share of its limit
    every_row       the same on all rows, against attention in fp32 and its wider limits
    bias            the mean signed error along the truth, as a share of its limit
    nonfinite       values of the output that are NaN or infinite, rows that were never written included
    guard_writes    values beside the output that were overwritten
    unequal_repeat  values that differ when the same input is run again
    choice          rows with other keys than those that an indexer chooses, of shapes with one
    """
    references = references or References()
    return worst_of_each(check for case in uniquely_named(cases) for check in _check_case(run, case, references))


def run_case(run: RunAttention, case: Case, flags: AttentionFlags | None = None) -> tuple[Tensor, int]:
    """(the output [tokens, heads, head_dim], NaN where it was not written; the number of guard values overwritten).

    flags  in place of those of the case
    """
    storage, out = guarded(case.q.shape[0], case.q[..., : case.v.shape[-1]], math.nan, GUARD_MARK)
    run(case.q, case.k, case.v, case.batch, case.flags if flags is None else flags, out)
    edges = (storage[:GUARD_ROWS], storage[GUARD_ROWS + out.shape[0] :])
    return out, sum(int((edge != GUARD_MARK).sum()) for edge in edges)


def _check_case(run: RunAttention, case: Case, references: References) -> list[Check]:
    with one_thread():
        reference = references.of(case)  # before the path runs, which may spoil what it should only read
    flags = _unwritten(case.flags)
    out, guard_writes = run_case(run, case, flags)
    with one_thread():
        drawn, every = errors_of(out[case.rows], reference.drawn), errors_of(out, reference.every)
    found = [
        checked("drawn_rows", case, drawn.worst, _place(drawn, case.rows)),
        checked("every_row", case, every.worst, _place(every, None)),
        checked("bias", case, abs(drawn.bias) / drawn.bias_limit, f"the output is {1 + drawn.bias:.6g} of the truth"),
        checked("nonfinite", case, int((~torch.isfinite(out)).sum())),
        checked("guard_writes", case, guard_writes),
    ]
    if isinstance(flags, IndexedFlags) and isinstance(case.flags, IndexedFlags):
        found.append(_check_choice(case, flags.index.chosen, case.flags.index.chosen))
    if case.name in _REPEATED:
        again, _ = run_case(run, case, _unwritten(case.flags))
        found.append(checked("unequal_repeat", case, int((again != out).sum())))
    return found


def _unwritten(flags: AttentionFlags) -> AttentionFlags:
    """Return flags whose choice of keys, where there is one to make, is still to be written."""
    return replace(flags, index=unwritten(flags.index)) if isinstance(flags, IndexedFlags) else flags


def _check_choice(case: Case, chosen: Tensor, expected: Tensor) -> Check:
    """Compare the choice of all rows with the only one: the scores of the input are exact."""
    wrong = (chosen != expected).any(dim=1).nonzero()[:, 0]
    if wrong.numel() == 0:
        return checked("choice", case, 0)
    row = int(wrong[0])
    found, wanted = (set(it[row].tolist()) - {-1} for it in (chosen, expected))
    where = f"row {row}: chosen in vain {sorted(found - wanted)[:4]}, left out {sorted(wanted - found)[:4]}"
    return checked("choice", case, wrong.numel(), where)


def _place(errors: Errors, rows: Tensor | None) -> str:
    row, head, column = errors.worst_at
    row = row if rows is None or rows.numel() == 0 else int(rows[row])
    limit = f"at most {errors.worst_limit:.3g} may be"
    return f"row {row}, head {head}, column {column}: off by {errors.worst_error:.3g}, {limit}"
