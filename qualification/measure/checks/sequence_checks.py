"""Runs a path of an operator that keeps a state of each sequence, and measures errors of its results and states."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kernels.recurrence.sizes import CHUNK
from kernels.reference.compare import Errors, Reference, errors_of
from kernels.vocabulary.shape import Phase
from qualification.evidence.evidence import Check
from qualification.measure.checks.checked import checked
from qualification.measure.inputs.sequence_inputs import Segment, SequenceCase
from qualification.measure.inputs.state_slots import Part, Run, Slots

_REPEATED = frozenset({"short", "borders", "most"})  # cases that run twice: the same input must give the same bits
AnyCase = SequenceCase[Any, Any, Any]


@dataclass(frozen=True, slots=True)
class Results:
    """out     [n, ...]: results of all calls, without those that were taken back
    rows     [n] int64: sequence * T + position
    targets  the slot of each row's state behind the last call
    """

    out: Tensor
    rows: Tensor
    targets: Sequence[int]


@dataclass(frozen=True, slots=True)
class Found:
    """out         [n, a, b]: results of all calls, without those that were taken back
    rows         [n] int64: sequence * T + position
    states       [m, c, d]: of all rows behind the last call
    true_states  what they should be
    """

    out: Tensor
    rows: Tensor
    states: Tensor
    true_states: Reference
    num_stray: int


def make_calls(run: Run, case: AnyCase, slots: Slots[Any], write_state: Callable[[int, int, int], None]) -> Results:
    """Make the calls of a case, one behind the other, by slots of which there are three for each row.

    write_state  (slot, sequence, num_tokens): writes what a right path keeps behind the first tokens of a sequence
    """
    device, num_rows = case.tokens[0].device, len(case.rows)
    own = list(range(num_rows - 1, -1, -1))  # no row has the slot of its own number
    sources, folded = [], []
    for row, sequence in enumerate(case.rows):
        before = case.sequences[sequence].segments[0].first
        sources.append(own[row] if before else slots.zero)
        folded.append(before // CHUNK * CHUNK)
        if before:
            write_state(own[row], sequence, before)
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
            positions = torch.arange(segment.first, segment.kept, device=device)
            out_rows.append(sequence * case.tokens[0].shape[1] + positions)
            is_verified = case.shape.phase is Phase.VERIFY
            folded[row] = (segment.first if is_verified else segment.next_first) // CHUNK * CHUNK
            sources[row] = targets[row] if segment.snapshot is None else 2 * num_rows + row
    return Results(torch.cat(outs), torch.cat(out_rows), targets)


def checks_of(case: AnyCase, expected: Reference, run_case: Callable[[], Found]) -> list[Check]:
    """Return the checks of a case. `expected`: of each token of its sequences."""
    found = run_case()
    out = errors_of(found.out, chosen(expected, found.rows))
    states = errors_of(found.states, found.true_states)
    worst = max((states, _where_of_state(states)), (out, _where_of_out(found, case, out)), key=lambda it: it[0].worst)
    checks = [
        checked("every_row", case, worst[0].worst, worst[1]),
        checked("nonfinite", case, out.num_nonfinite + states.num_nonfinite),
        checked("guard_writes", case, found.num_stray),
    ]
    if case.name in _REPEATED:
        again = run_case()
        differing = int((again.out != found.out).sum()) + int((again.states != found.states).sum())
        checks.append(checked("unequal_repeat", case, differing))
    return checks


def chosen(reference: Reference, rows: Tensor) -> Reference:
    """Return some rows of a reference."""
    return Reference(reference.truth[rows], reference.limit[rows], None, float("inf"))


def replaced_behind(tokens: Tensor, num_kept: int) -> Tensor:
    """Return tokens [n, ...] of which those behind the first `num_kept`, to be taken back, are others."""
    found = tokens.clone()
    found[num_kept:] = 0.5 - found[num_kept:]
    return found


def _part(case: AnyCase, sequence: int, segment: Segment, source: int, target: int, folded: int, snapshot: int) -> Part:
    """Return a row of a call; tokens that will be taken back are others than the sequence's."""
    own, num_kept = slice(segment.first, segment.stop), segment.kept - segment.first
    tokens = tuple(replaced_behind(it[sequence, own], num_kept) for it in case.tokens)
    writes = () if segment.snapshot is None else ((segment.snapshot, snapshot),)
    return Part(tokens, segment.first, source, target, folded, writes)


def _where_of_out(found: Found, case: AnyCase, errors: Errors) -> str:
    row, *numbers = errors.worst_at
    sequence, position = divmod(int(found.rows[row]) if found.rows.numel() else 0, case.tokens[0].shape[1])
    return _where(f"sequence {sequence}, token {position}", numbers, errors)


def _where_of_state(errors: Errors) -> str:
    row, *numbers = errors.worst_at
    return _where(f"part {row} of the states of all rows", numbers, errors)


def _where(place: str, numbers: Sequence[int], errors: Errors) -> str:
    of_number = ", ".join(map(str, numbers))
    return f"{place}, number {of_number}: off by {errors.worst_error:.3g}, at most {errors.worst_limit:.3g} may be"
