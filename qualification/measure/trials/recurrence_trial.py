"""The trial of recurrences in a qualification: wrong ones, checks on hostile inputs, the timed call."""

import torch

from kernels.recurrence.calls import RecurrenceState, RunRecurrence
from kernels.recurrence.shape import RecurrenceShape
from kernels.vocabulary.shape import Phase
from qualification.measure.checks.recurrence_checks import check_recurrence, run_case
from qualification.measure.checks.references import References
from qualification.measure.checks.sequence_checks import Found
from qualification.measure.faults.recurrence_faults import (
    RecurrenceFault,
    can_show_in,
    trial_shapes,
    wrong_recurrence,
)
from qualification.measure.inputs.recurrence_inputs import (
    Content,
    RecurrenceCase,
    drawn_tokens,
    drawn_weights,
    recurrence_cases,
)
from qualification.measure.inputs.sequence_inputs import NUM_DRAFTED, Tokens
from qualification.measure.inputs.state_slots import Slots, recurrence_slots
from qualification.measure.orders.recurrence_order import check_recurrence_order
from qualification.measure.trials.sequence_trial import SequenceTrial

_OF_VERIFY = (RecurrenceFault.NONE, RecurrenceFault.DRAFTS_FOLDED)


def _faults_of(shape: RecurrenceShape) -> list[RecurrenceFault]:
    # What is verified differs from other tokens in what is folded.
    tried = _OF_VERIFY if shape.phase is Phase.VERIFY else tuple(RecurrenceFault)
    return [fault for fault in tried if can_show_in(fault, shape)]


def _make_calls(run: RunRecurrence, case: RecurrenceCase, references: References) -> Found:
    return run_case(run, case, references.of_recurrence(case))


def _drawn(
    shape: RecurrenceShape, lengths: list[int], device: torch.device, *, seed: int
) -> tuple[Slots[RecurrenceState], list[Tokens]]:
    generator = torch.Generator().manual_seed(seed)
    weights = drawn_weights(shape, generator, device)
    slots = recurrence_slots(shape, weights, len(lengths), NUM_DRAFTED, device)
    return slots, [drawn_tokens(shape, Content.PLAIN, length, weights, generator) for length in lengths]


RECURRENCE_TRIAL: SequenceTrial[RecurrenceShape] = SequenceTrial(
    no_fault=RecurrenceFault.NONE,
    trial_shapes=trial_shapes,
    faults_of=_faults_of,
    wrong=wrong_recurrence,
    cases=recurrence_cases,
    check_cases=check_recurrence,
    order_check=check_recurrence_order,
    make_calls=_make_calls,
    drawn=_drawn,
    kept=lambda shape: shape.state_tensors(NUM_DRAFTED),
    tried=frozenset({"short", "hostile", "unequal"}),
)
