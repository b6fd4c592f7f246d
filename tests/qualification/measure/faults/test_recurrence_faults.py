"""Tokens of a recurrence that are decoded and verified are checked at the borders of chunks, which no trial takes."""

import pytest
import torch

from kernels.vocabulary.recurrence_form import RecurrenceForm
from kernels.vocabulary.shape import Dtype
from qualification.measure.checks.recurrence_checks import check_recurrence
from qualification.measure.faults.recurrence_faults import RecurrenceFault, trial_shapes, wrong_recurrence
from qualification.measure.inputs.recurrence_inputs import recurrence_cases

CPU = torch.device("cpu")
_, DECODE, VERIFY = trial_shapes(Dtype.BF16, RecurrenceForm.GATED_DELTA)


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
