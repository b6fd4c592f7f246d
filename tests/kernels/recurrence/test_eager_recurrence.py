"""The recurrence by PyTorch: against the truth token by token, and one order of sums however a sequence is cut."""

from dataclasses import replace

import pytest
import torch

from kernels.recurrence.eager_path import run_recurrence_eager
from kernels.recurrence.sizes import RecurrenceSizes
from kernels.reference.recurrence import recurrence_truth
from kernels.vocabulary.shape import Dtype, Phase
from support.recurrence_calls import Cut, call_in_parts, random_sequence, state_of

SIZES = RecurrenceSizes(2, 6, 24, 20, 4)
LENGTH = 150
WHOLE = (Cut(LENGTH),)


@pytest.mark.parametrize("dtype", list(Dtype))
def test_a_sequence_is_what_the_rule_says_token_by_token(dtype: Dtype) -> None:
    sequence = random_sequence(SIZES, LENGTH, dtype, seed=1)
    found = call_in_parts(run_recurrence_eager, sequence, WHOLE)
    truth = recurrence_truth(sequence.qkv, sequence.a, sequence.b, sequence.weights, SIZES)
    within = 1e-5 if dtype is Dtype.FP32 else 0.03
    torch.testing.assert_close(found.out.double(), truth.out, rtol=within, atol=within * float(truth.out.std()))
    border = state_of(found, slot=0).states.double()
    torch.testing.assert_close(border, truth.states[127], rtol=within, atol=within * float(truth.states.std()))


@pytest.mark.parametrize(
    "cuts",
    [
        (Cut(1), Cut(LENGTH - 1)),
        (Cut(63), Cut(1, Phase.DECODE), Cut(1, Phase.DECODE), Cut(85)),
        (Cut(64), Cut(64), Cut(22)),
        (Cut(15), Cut(50), Cut(62), Cut(2), Cut(21)),
        (Cut(20), *(Cut(1, Phase.DECODE),) * 130),
        (Cut(58), *(Cut(5, Phase.VERIFY, taken_back=4), Cut(3, Phase.VERIFY, taken_back=1)) * 4, Cut(80)),
        (Cut(30, moves=True), Cut(30, moves=True), Cut(4, moves=True), Cut(1, Phase.DECODE, moves=True), Cut(85)),
    ],
)
@pytest.mark.parametrize("dtype", [Dtype.FP32, Dtype.BF16])
def test_a_sequence_cut_anywhere_has_the_same_bits(cuts: tuple[Cut, ...], dtype: Dtype) -> None:
    sequence = random_sequence(SIZES, LENGTH, dtype, seed=2)
    whole = call_in_parts(run_recurrence_eager, sequence, WHOLE)
    parts = call_in_parts(run_recurrence_eager, sequence, cuts)
    assert torch.equal(parts.out, whole.out)
    assert torch.equal(state_of(parts).states, state_of(whole).states)


@pytest.mark.parametrize("num_tokens", [1, 3, 16, 63, 64, 65, 128, 149])
def test_a_snapshot_goes_on_as_the_sequence_does(num_tokens: int) -> None:
    sequence = random_sequence(SIZES, LENGTH, Dtype.BF16, seed=3)
    whole = call_in_parts(run_recurrence_eager, sequence, WHOLE, snapshot=num_tokens)
    rest = call_in_parts(run_recurrence_eager, sequence, (Cut(LENGTH - num_tokens),), begun=whole)
    assert torch.equal(rest.out[num_tokens:], whole.out[num_tokens:])


def test_neighbours_change_no_bit() -> None:
    sequence = random_sequence(SIZES, LENGTH, Dtype.FP32, seed=4)
    alone = call_in_parts(run_recurrence_eager, sequence, WHOLE)
    beside = call_in_parts(run_recurrence_eager, sequence, WHOLE, neighbours=(1, 64, 200))
    assert torch.equal(beside.out, alone.out)


def test_a_padding_row_and_the_content_of_free_slots_show_nowhere() -> None:
    sequence = random_sequence(SIZES, LENGTH, Dtype.FP32, seed=5)
    alone = call_in_parts(run_recurrence_eager, sequence, WHOLE)
    padded = call_in_parts(run_recurrence_eager, sequence, WHOLE, padding=3, fill=float("nan"))
    assert torch.equal(padded.out, alone.out)


def test_states_of_16_bits_are_rounded_at_borders_alone() -> None:
    sequence = replace(random_sequence(SIZES, LENGTH, Dtype.BF16, seed=6), state_dtype=Dtype.BF16)
    whole = call_in_parts(run_recurrence_eager, sequence, WHOLE)
    parts = call_in_parts(run_recurrence_eager, sequence, (Cut(64), *(Cut(1, Phase.DECODE),) * 64, Cut(22)))
    assert torch.equal(parts.out, whole.out)
