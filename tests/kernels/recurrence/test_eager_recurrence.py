"""The recurrence by PyTorch: one order of sums however a sequence is cut, moved, taken back or begun again."""

from dataclasses import replace

import pytest
import torch

from kernels.recurrence.channel_delta.eager import run_channel_delta_eager
from kernels.recurrence.eager_path import run_recurrence_eager
from kernels.recurrence.fixed_decay.eager import run_fixed_decay_eager
from kernels.recurrence.sizes import RecurrenceSizes
from kernels.recurrence.state_space.eager import run_state_space_eager
from kernels.vocabulary.recurrence_form import RecurrenceForm
from kernels.vocabulary.shape import Dtype, Phase
from support.recurrence_calls import Cut, call_in_parts, random_sequence, state_of

SIZES = RecurrenceSizes(2, 6, 24, 20, 4)
LENGTH = 132
WHOLE = (Cut(LENGTH),)
RUNS = {
    RecurrenceForm.GATED_DELTA: run_recurrence_eager,
    RecurrenceForm.STATE_SPACE: run_state_space_eager,
    RecurrenceForm.FIXED_DECAY: run_fixed_decay_eager,
    RecurrenceForm.CHANNEL_DELTA: run_channel_delta_eager,
}
of_each_form = pytest.mark.parametrize("form", RecurrenceForm, ids=lambda it: it.value)


@of_each_form
@pytest.mark.parametrize(
    "cuts",
    [
        (Cut(15), Cut(49), *(Cut(1, Phase.DECODE),) * 3, Cut(61), Cut(LENGTH - 128)),
        (Cut(58), *(Cut(5, Phase.VERIFY, taken_back=4), Cut(3, Phase.VERIFY, taken_back=1)) * 4, Cut(LENGTH - 70)),
        (
            Cut(30, moves=True),
            Cut(30, moves=True),
            Cut(4, moves=True),
            Cut(1, Phase.DECODE, moves=True),
            Cut(LENGTH - 65),
        ),
    ],
)
def test_a_sequence_cut_anywhere_has_the_same_bits(cuts: tuple[Cut, ...], form: RecurrenceForm) -> None:
    sequence = random_sequence(SIZES, LENGTH, Dtype.BF16, seed=2, form=form)
    whole = call_in_parts(RUNS[form], sequence, WHOLE)
    parts = call_in_parts(RUNS[form], sequence, cuts)
    assert torch.equal(parts.out, whole.out)
    assert torch.equal(state_of(parts).states, state_of(whole).states)


@of_each_form
@pytest.mark.parametrize("num_tokens", [1, 63, 64, 65, 128])
def test_a_snapshot_goes_on_as_the_sequence_does(num_tokens: int, form: RecurrenceForm) -> None:
    sequence = random_sequence(SIZES, LENGTH, Dtype.BF16, seed=3, form=form)
    whole = call_in_parts(RUNS[form], sequence, WHOLE, snapshot=num_tokens)
    rest = call_in_parts(RUNS[form], sequence, (Cut(LENGTH - num_tokens),), begun=whole)
    assert torch.equal(rest.out[num_tokens:], whole.out[num_tokens:])


@of_each_form
def test_states_of_16_bits_are_rounded_at_borders_alone(form: RecurrenceForm) -> None:
    sequence = random_sequence(SIZES, LENGTH, Dtype.BF16, seed=6, form=form)
    sequence = replace(sequence, state_dtype=Dtype.BF16)
    whole = call_in_parts(RUNS[form], sequence, WHOLE)
    parts = call_in_parts(RUNS[form], sequence, (Cut(64), *(Cut(1, Phase.DECODE),) * 64, Cut(LENGTH - 128)))
    assert torch.equal(parts.out, whole.out)
