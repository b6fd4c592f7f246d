"""Runs a path of a convolution on hostile inputs and measures its errors against fp64, results and states."""

from collections.abc import Iterable

import torch

from kernels.convolution.calls import RunConvolution
from kernels.reference.compare import Reference
from kernels.reference.convolution import ConvolutionReference
from qualification.evidence.evidence import Check
from qualification.measure.checks.checked import uniquely_named, worst_of_each
from qualification.measure.checks.references import References
from qualification.measure.checks.sequence_checks import Found, checks_of, make_calls
from qualification.measure.inputs.convolution_inputs import ConvolutionCase
from qualification.measure.inputs.sequence_inputs import NUM_DRAFTED
from qualification.measure.inputs.state_slots import convolution_slots

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
    return checks_of(case, reference.out, lambda: run_case(run, case, reference))


def run_case(run: RunConvolution, case: ConvolutionCase, reference: ConvolutionReference) -> Found:
    """Make the calls of a case; states are the inputs that the next token of each row would read, [m, 1, channels]."""
    slots = convolution_slots(
        case.shape, case.weights, 3 * len(case.rows), NUM_DRAFTED, case.tokens[0].device, is_far=case.is_far
    )
    inputs, width = slots.state.inputs, case.shape.width

    def latest(num_tokens: int) -> range:
        return range(max(0, num_tokens - width + 1), num_tokens)

    def places(positions: range) -> list[int]:
        return [it % inputs.shape[1] for it in positions]

    def write_state(slot: int, sequence: int, num_tokens: int) -> None:
        own = latest(num_tokens)
        inputs[slot, places(own)] = reference.inputs[sequence, own.start : own.stop]

    made = make_calls(run, case, slots, write_state)
    states, true_states = [], []
    for row, sequence in enumerate(case.rows):
        own = latest(case.sequences[sequence].segments[-1].kept)
        states.append(inputs[made.targets[row], places(own)])
        true_states.append(reference.inputs[sequence, own.start : own.stop])
    truth = torch.cat(true_states).double()[:, None]
    exact = Reference(truth, torch.full_like(truth, _EXACT), None, float("inf"))
    return Found(made.out[:, None], made.rows, torch.cat(states)[:, None], exact, slots.num_stray)
