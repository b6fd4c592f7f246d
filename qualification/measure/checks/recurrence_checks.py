"""Runs a path of a recurrence on hostile inputs and measures its errors against fp64, results and states."""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.recurrence.calls import RunRecurrence
from kernels.recurrence.sizes import CHUNK
from kernels.reference.compare import Errors, Reference, errors_of
from kernels.reference.recurrence import RecurrenceReference, write_kept_state
from kernels.vocabulary.shape import Phase
from qualification.evidence.evidence import Check
from qualification.measure.checks.checked import checked, uniquely_named, worst_of_each
from qualification.measure.checks.references import References
from qualification.measure.inputs.recurrence_inputs import NUM_DRAFTED, RecurrenceCase, Segment
from qualification.measure.inputs.recurrence_slots import Part, Slots

_REPEATED = frozenset({"short", "borders", "most"})  # cases that run twice: the same input must give the same bits


def check_recurrence(
    run: RunRecurrence, cases: Iterable[RecurrenceCase], references: References | None = None
) -> tuple[Check, ...]:
    """Return, for each measure, the worst check over all cases. Errors of `run` are not caught.

    `references` are of these cases, kept by who checks several paths on them.

    every_row       the largest error against fp64, of every result and of the states behind the last call, as a share
                    of its limit
    nonfinite       values of results and states that are NaN or infinite, what was never written included
    guard_writes    values beside the results, and of the slot that stays zero, that were overwritten
    unequal_repeat  values that differ when the same input is run again
    """
    references = references or References()
    return worst_of_each(check for case in uniquely_named(cases) for check in _check_case(run, case, references))


def _check_case(run: RunRecurrence, case: RecurrenceCase, references: References) -> list[Check]:
    reference = references.of_recurrence(case)
    found = run_case(run, case, reference)
    out = errors_of(found.out, _chosen(reference.out, found.out_rows))
    states = errors_of(found.states, _chosen(reference.states, found.state_rows))
    worst = max(
        (states, _where_of_state(found, states)), (out, _where_of_out(found, case, out)), key=lambda it: it[0].worst
    )
    checks = [
        checked("every_row", case, worst[0].worst, worst[1]),
        checked("nonfinite", case, out.num_nonfinite + states.num_nonfinite),
        checked("guard_writes", case, found.num_stray),
    ]
    if case.name in _REPEATED:
        again = run_case(run, case, reference)
        differing = int((again.out != found.out).sum()) + int((again.states != found.states).sum())
        checks.append(checked("unequal_repeat", case, differing))
    return checks


@dataclass(frozen=True, slots=True)
class Found:
    """out        [n, value_heads, value_dim]: results of all calls, without those that were taken back
    out_rows      [n] int64: sequence * T + position
    states        [n, key_dim, value_dim]: of all rows and heads behind the last call
    state_rows    [n] int64: sequence * value_heads + head
    """

    out: Tensor
    out_rows: Tensor
    states: Tensor
    state_rows: Tensor
    num_stray: int


def run_case(run: RunRecurrence, case: RecurrenceCase, reference: RecurrenceReference) -> Found:
    """Make the calls of a case, one behind the other; states before the first one are those of a right path."""
    device, num_rows = case.qkv.device, len(case.rows)
    slots = Slots(case.shape, case.weights, 3 * num_rows, NUM_DRAFTED, device)
    own = list(range(num_rows - 1, -1, -1))  # no row has the slot of its own number
    sources, folded = [], []
    for row, sequence in enumerate(case.rows):
        before = case.sequences[sequence].segments[0].first
        sources.append(own[row] if before else slots.zero)
        folded.append(before // CHUNK * CHUNK)
        if before:
            write_kept_state(slots.state, own[row], reference.kept, case.qkv, sequence, before)
    targets = [own[row] if row % 2 or sources[row] == slots.zero else num_rows + row for row in range(num_rows)]
    outs: list[Tensor] = []
    out_rows: list[Tensor] = []
    for call in range(len(case.sequences[0].segments)):
        segments = [case.sequences[sequence].segments[call] for sequence in case.rows]
        parts = [
            _part(case, sequence, segment, sources[row], targets[row], folded[row], 2 * num_rows + row)
            for row, (sequence, segment) in enumerate(zip(case.rows, segments, strict=True))
        ]
        found = slots.call(run, parts)
        for row, (sequence, segment) in enumerate(zip(case.rows, segments, strict=True)):
            outs.append(found[row][: segment.kept - segment.first])
            out_rows.append(sequence * case.qkv.shape[1] + torch.arange(segment.first, segment.kept, device=device))
            is_verified = case.shape.phase is Phase.VERIFY
            folded[row] = (segment.first if is_verified else segment.next_first) // CHUNK * CHUNK
            sources[row] = targets[row] if segment.snapshot is None else 2 * num_rows + row
    heads = torch.arange(case.shape.num_value_heads, device=device)
    state_rows = [sequence * case.shape.num_value_heads + heads for sequence in case.rows]
    return Found(
        torch.cat(outs), torch.cat(out_rows), slots.state.states[targets].flatten(0, 1), torch.cat(state_rows),
        slots.num_stray,
    )  # fmt: skip


def _part(
    case: RecurrenceCase, sequence: int, segment: Segment, source: int, target: int, folded: int, snapshot: int
) -> Part:
    """Return a row of a call; tokens that will be taken back are others than the sequence's."""
    own, num_kept = slice(segment.first, segment.stop), segment.kept - segment.first
    tokens = [it[sequence, own].clone() for it in (case.qkv, case.a, case.b)]
    for each in tokens:
        each[num_kept:] = 0.5 - each[num_kept:]
    writes = () if segment.snapshot is None else ((segment.snapshot, snapshot),)
    return Part(tokens[0], tokens[1], tokens[2], segment.first, source, target, folded, writes)


def _chosen(reference: Reference, rows: Tensor) -> Reference:
    return Reference(reference.truth[rows], reference.limit[rows], None, float("inf"))


def _where_of_out(found: Found, case: RecurrenceCase, errors: Errors) -> str:
    row, head, column = errors.worst_at
    sequence, position = divmod(int(found.out_rows[row]) if found.out_rows.numel() else 0, case.qkv.shape[1])
    place = f"sequence {sequence}, token {position}, head {head}, column {column}"
    return f"{place}: off by {errors.worst_error:.3g}, at most {errors.worst_limit:.3g} may be"


def _where_of_state(found: Found, errors: Errors) -> str:
    row, key, value = errors.worst_at
    place = f"state {int(found.state_rows[row])} (of sequences and heads), number {key}, {value}"
    return f"{place}: off by {errors.worst_error:.3g}, at most {errors.worst_limit:.3g} may be"
