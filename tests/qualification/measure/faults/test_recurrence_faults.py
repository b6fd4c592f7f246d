"""Planted faults of recurrences: each is refused, and a right recurrence of another order of sums passes."""

import pytest
import torch

from kernels.vocabulary.recurrence_form import RecurrenceForm
from kernels.vocabulary.recurrence_operator import RECURRENCE
from kernels.vocabulary.shape import Dtype
from qualification.measure.checks.recurrence_checks import check_recurrence
from qualification.measure.checks.references import References
from qualification.measure.faults import order_faults
from qualification.measure.faults.order_faults import OrderFault
from qualification.measure.faults.recurrence_faults import RecurrenceFault, can_show_in, trial_shapes, wrong_recurrence
from qualification.measure.inputs.recurrence_inputs import RecurrenceCase, recurrence_cases

CPU = torch.device("cpu")
[WHOLE, _] = order_faults.trial_shapes(RECURRENCE, Dtype.FP32)
PROMPT, DECODE, VERIFY = trial_shapes(Dtype.BF16, RecurrenceForm.GATED_DELTA)
SPACE, *_ = trial_shapes(Dtype.BF16, RecurrenceForm.STATE_SPACE)
FIXED, *_ = trial_shapes(Dtype.BF16, RecurrenceForm.FIXED_DECAY)
CHANNELS, *_ = trial_shapes(Dtype.BF16, RecurrenceForm.CHANNEL_DELTA)


Inputs = dict[RecurrenceForm, tuple[list[RecurrenceCase], References]]


@pytest.fixture(scope="module")
def inputs() -> Inputs:
    found = {shape.form: [*recurrence_cases(shape, CPU, seed=0)] for shape in (PROMPT, SPACE, FIXED, CHANNELS)}
    names = ("short", "hostile", "unequal")
    return {form: ([it for it in cases if it.name in names], References()) for form, cases in found.items()}


@pytest.mark.parametrize(
    ("form", "fault"),
    [
        (shape.form, it)
        for shape in (PROMPT, SPACE, FIXED, CHANNELS)
        for it in RecurrenceFault
        if can_show_in(it, shape)
    ],
    ids=lambda it: it.name,
)
def test_a_wrong_recurrence_is_refused(form: RecurrenceForm, fault: RecurrenceFault, inputs: Inputs) -> None:
    cases, references = inputs[form]
    run = wrong_recurrence(fault)
    passes = all(check.is_passed for case in cases for check in check_recurrence(run, [case], references))
    assert passes is (fault is RecurrenceFault.NONE)


@pytest.mark.parametrize(
    ("shape", "name", "fault"),
    [
        (DECODE, "borders", RecurrenceFault.LAST_BORDER_SKIPPED),
        (DECODE, "hostile", RecurrenceFault.LOW_PRECISION_STATE),
        (VERIFY, "borders", RecurrenceFault.DRAFTS_FOLDED),
        (VERIFY, "borders", RecurrenceFault.NONE),
    ],
    ids=lambda it: getattr(it, "name", ""),
)
def test_decoded_and_verified_tokens_are_checked_at_borders(shape: object, name: str, fault: RecurrenceFault) -> None:
    [case] = [it for it in recurrence_cases(shape, CPU, seed=0) if it.name == name]  # type: ignore[arg-type]
    checks = check_recurrence(wrong_recurrence(fault), [case])
    assert all(check.is_passed for check in checks) is (fault is RecurrenceFault.NONE)


@pytest.mark.parametrize("fault", [it for it in OrderFault if it not in (OrderFault.NONE, OrderFault.OTHER_FOLD)])
def test_bits_that_depend_on_the_call_are_refused(fault: OrderFault) -> None:
    assert not order_faults.seen_of(fault, WHOLE, CPU, seed=0, ends_early=True).is_passed
