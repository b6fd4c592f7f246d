"""Runs a path of a recurrence on hostile inputs and measures its errors against fp64, results and states."""

from collections.abc import Iterable

import torch

from kernels.recurrence.calls import RunRecurrence
from kernels.reference.recurrence import write_kept_state
from kernels.reference.recurrent_errors import RecurrenceReference
from qualification.evidence.evidence import Check
from qualification.measure.checks.checked import uniquely_named, worst_of_each
from qualification.measure.checks.references import References
from qualification.measure.checks.sequence_checks import Found, checks_of, chosen, make_calls
from qualification.measure.inputs.recurrence_inputs import RecurrenceCase
from qualification.measure.inputs.sequence_inputs import NUM_DRAFTED
from qualification.measure.inputs.state_slots import recurrence_slots


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
    return checks_of(case, reference.out, lambda: run_case(run, case, reference))


def run_case(run: RunRecurrence, case: RecurrenceCase, reference: RecurrenceReference) -> Found:
    """Make the calls of a case; states are those of all rows and heads, [n, key_dim, value_dim]."""
    qkv, heads = case.tokens[0], case.shape.num_value_heads
    slots = recurrence_slots(case.shape, case.weights, 3 * len(case.rows), NUM_DRAFTED, qkv.device, is_far=case.is_far)

    def write_state(slot: int, sequence: int, num_tokens: int) -> None:
        write_kept_state(slots.state, slot, reference.kept, qkv, sequence, num_tokens)

    made = make_calls(run, case, slots, write_state)
    own = torch.arange(heads, device=qkv.device)
    rows = torch.cat([sequence * heads + own for sequence in case.rows])
    states = slots.state.states[made.targets].flatten(0, 1)
    return Found(made.out, made.rows, states, chosen(reference.states, rows), slots.num_stray)
