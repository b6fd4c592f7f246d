"""Runs a path of a convolution on hostile inputs and measures its errors against fp64, results and states."""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.convolution.calls import RunConvolution
from kernels.reference.compare import Errors, Reference, errors_of
from kernels.reference.convolution import ConvolutionReference
from qualification.evidence.evidence import Check
from qualification.measure.checks.checked import checked, uniquely_named, worst_of_each
from qualification.measure.checks.references import References
from qualification.measure.inputs.convolution_inputs import ConvolutionCase
from qualification.measure.inputs.convolution_slots import ConvolutionPart, ConvolutionSlots
from qualification.measure.inputs.recurrence_inputs import NUM_DRAFTED, Segment

_REPEATED = frozenset({"short", "borders", "most"})  # cases that run twice: the same input must give the same bits
_EXACT = 1e-30  # limit of what must be right to the bit


def check_convolution(
    run: RunConvolution, cases: Iterable[ConvolutionCase], references: References | None = None
) -> tuple[Check, ...]:
    """Return, for each measure, the worst check over all cases. Errors of `run` are not caught.

    `references` are of these cases, kept by who checks several paths on them.

    every_row       the largest error against fp64 of every result, as a share of its limit, and of the states behind
                    the last call, of which each must be right to the bit
    nonfinite       values of results and states that are NaN or infinite, what was never written included
    guard_writes    values beside the results, and of the slot that stays zero, that were overwritten
    unequal_repeat  values that differ when the same input is run again
    """
    references = references or References()
    return worst_of_each(check for case in uniquely_named(cases) for check in _check_case(run, case, references))


def _check_case(run: RunConvolution, case: ConvolutionCase, references: References) -> list[Check]:
    reference = references.of_convolution(case)
    found = run_case(run, case, reference)
    expected = Reference(reference.out.truth[found.rows], reference.out.limit[found.rows], None, float("inf"))
    out = errors_of(found.out[:, None], expected)
    of_states = found.true_states.double()[:, None]
    exact = Reference(of_states, torch.full_like(of_states, _EXACT), None, float("inf"))
    states = errors_of(found.states[:, None], exact)
    worst = max(((states, "state"), (out, "result")), key=lambda it: it[0].worst)
    checks = [
        checked("every_row", case, worst[0].worst, _where(found, case, *worst)),
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
    """out       [n, channels]: results of all calls, without those that were taken back
    rows         [n] int64: sequence * T + position
    states       [m, channels]: the inputs that the next token of each row would read
    true_states  [m, channels]: what they should be
    """

    out: Tensor
    rows: Tensor
    states: Tensor
    true_states: Tensor
    num_stray: int


def run_case(run: RunConvolution, case: ConvolutionCase, reference: ConvolutionReference) -> Found:
    """Make the calls of a case, one behind the other; states before the first one are those of a right path."""
    device, num_rows = case.projected.device, len(case.rows)
    slots = ConvolutionSlots(case.shape, case.weights, 3 * num_rows, NUM_DRAFTED, device)
    ring, width = slots.state.inputs.shape[1], case.shape.width
    own = list(range(num_rows - 1, -1, -1))  # no row has the slot of its own number
    sources = []
    for row, sequence in enumerate(case.rows):
        before = case.sequences[sequence].segments[0].first
        sources.append(own[row] if before else slots.zero)
        for position in range(max(0, before - width + 1), before):
            slots.state.inputs[own[row], position % ring] = reference.inputs[sequence, position]
    targets = [own[row] if row % 2 or sources[row] == slots.zero else num_rows + row for row in range(num_rows)]
    outs: list[Tensor] = []
    out_rows: list[Tensor] = []
    for call in range(len(case.sequences[0].segments)):
        segments = [case.sequences[sequence].segments[call] for sequence in case.rows]
        parts = [
            _part(case, sequence, segment, sources[row], targets[row], 2 * num_rows + row)
            for row, (sequence, segment) in enumerate(zip(case.rows, segments, strict=True))
        ]
        found = slots.call(run, parts)
        for row, (sequence, segment) in enumerate(zip(case.rows, segments, strict=True)):
            outs.append(found[row][: segment.kept - segment.first])
            positions = torch.arange(segment.first, segment.kept, device=device)
            out_rows.append(sequence * case.projected.shape[1] + positions)
            sources[row] = targets[row] if segment.snapshot is None else 2 * num_rows + row
    states, true_states = [], []
    for row, sequence in enumerate(case.rows):
        last = case.sequences[sequence].segments[-1].kept
        latest = range(max(0, last - width + 1), last)
        states.append(slots.state.inputs[targets[row], [it % ring for it in latest]])
        true_states.append(reference.inputs[sequence, latest.start : latest.stop])
    return Found(torch.cat(outs), torch.cat(out_rows), torch.cat(states), torch.cat(true_states), slots.num_stray)


def _part(
    case: ConvolutionCase, sequence: int, segment: Segment, source: int, target: int, snapshot: int
) -> ConvolutionPart:
    """Return a row of a call; tokens that will be taken back are others than the sequence's."""
    tokens = case.projected[sequence, segment.first : segment.stop].clone()
    num_kept = segment.kept - segment.first
    tokens[num_kept:] = 0.5 - tokens[num_kept:]
    writes = () if segment.snapshot is None else ((segment.snapshot, snapshot),)
    return ConvolutionPart(tokens, segment.first, source, target, writes)


def _where(found: Found, case: ConvolutionCase, errors: Errors, what: str) -> str:
    row, _, column = errors.worst_at
    place = f"{what} {row}, channel {column}"
    if what == "result" and found.rows.numel():
        sequence, position = divmod(int(found.rows[row]), case.projected.shape[1])
        place = f"sequence {sequence}, token {position}, channel {column}"
    return f"{place}: off by {errors.worst_error:.3g}, at most {errors.worst_limit:.3g} may be"
