"""The Triton recurrence against fp64, and its bits however a sequence is cut: in the interpreter or on a GPU."""

import pytest
import torch

from kernels.recurrence.channel_delta.launch import run_channel_delta
from kernels.recurrence.fixed_decay.launch import run_fixed_decay
from kernels.recurrence.portable.launch import run_recurrence
from kernels.recurrence.sizes import RecurrenceSizes
from kernels.recurrence.state_space.launch import run_state_space
from kernels.reference.compare import errors_of
from kernels.reference.recurrence import recurrence_reference
from kernels.reference.state_space import state_space_reference
from kernels.vocabulary.recurrence_form import RecurrenceForm
from kernels.vocabulary.shape import Dtype, Phase
from support.recurrence_calls import Cut, call_in_parts, random_sequence, state_of

SIZES = {  # on a GPU those of which sm_90 has kernels of its own
    "cpu": RecurrenceSizes(1, 2, 12, 20, 4),
    "cuda": RecurrenceSizes(1, 2, 128, 128, 4),
}
LENGTH = 67
PARTS = (
    Cut(15, moves=True),
    Cut(47),
    Cut(4, Phase.VERIFY, taken_back=1),  # leaves the full chunk unfolded
    Cut(2, Phase.VERIFY, taken_back=1),
    Cut(1, Phase.DECODE),
)
SNAPSHOTS = (PARTS[0].num_tokens + 1, 40)
OF_FORM = {
    RecurrenceForm.GATED_DELTA: (run_recurrence, recurrence_reference),
    RecurrenceForm.STATE_SPACE: (run_state_space, state_space_reference),
    RecurrenceForm.FIXED_DECAY: (run_fixed_decay, state_space_reference),
    RecurrenceForm.CHANNEL_DELTA: (run_channel_delta, recurrence_reference),
}


# bf16 is silent garbage in Triton's interpreter; fp16 takes the same way through the kernels. A snapshot behind the
# first token of a part has inputs of before it, whose places the part's last tokens overwrite.
@pytest.mark.parametrize("snapshot", SNAPSHOTS)
@pytest.mark.parametrize("form", RecurrenceForm, ids=lambda it: it.value)
def test_a_sequence_in_parts_is_right_and_a_snapshot_goes_on_with_its_bits(
    device: torch.device, form: RecurrenceForm, snapshot: int
) -> None:
    run, reference_of = OF_FORM[form]
    sizes = SIZES[device.type]
    sequence = random_sequence(sizes, LENGTH, Dtype.FP16, seed=1, device=device, form=form)
    found = call_in_parts(run, sequence, PARTS, snapshot=snapshot)
    inputs = sequence.qkv[None], sequence.a[None], sequence.b[None], sequence.weights, sequence.sizes
    reference = reference_of(*inputs, torch.tensor([64], device=device), torch.float32)
    assert errors_of(found.out, reference.out).is_within_rule
    assert errors_of(state_of(found).states, reference.states).is_within_rule
    if snapshot == SNAPSHOTS[0]:
        assert errors_of(call_in_parts(run, sequence, (Cut(LENGTH),)).out, reference.out).is_within_rule
    begun = call_in_parts(run, sequence, (Cut(LENGTH - snapshot),), begun=found)
    assert torch.equal(begun.out[snapshot:], found.out[snapshot:])
