"""`triton.recurrence.fixed_decay`: lightning attention in Triton, for any GPU of sm_80 or newer.

The rule is a state space's whose steps are 1 and whose x is not added to the result, and its scan is that one's.
"""

from torch import Tensor

from kernels.calls.triton_launch import Launch
from kernels.recurrence.calls import RecurrenceRows, RecurrenceState, RecurrenceWeights
from kernels.recurrence.fixed_decay.prepare import hallmark_recurrence_fixed_prepare
from kernels.recurrence.fixed_decay.weights import FixedDecayWeights
from kernels.recurrence.forms.launch import FormCall
from kernels.recurrence.sizes import CHUNK
from kernels.recurrence.state_space.launch import space_launches


def launches(
    qkv: Tensor,
    a: Tensor,
    b: Tensor,
    weights: RecurrenceWeights,
    rows: RecurrenceRows,
    state: RecurrenceState,
    out: Tensor,
) -> list[Launch]:
    """Return the launches of a call of one token or more.

    qkv  queries, keys and values as the rule takes them: there is no convolution; a, b are not read
    """
    del a, b
    assert isinstance(weights, FixedDecayWeights), "a shape of the form fixed-decay has such weights"
    sizes = state.sizes(weights)
    call = FormCall.of(qkv, sizes, rows, state, out, is_convolved=False)
    # A ring has places of a chunk; where tokens are drafted, of as many more as two steps may be behind and ahead.
    most_kept = 1 + max(0, state.keys.shape[1] - CHUNK - 1) // 2
    return space_launches(call, hallmark_recurrence_fixed_prepare, (weights.a_log,), weights.no_skip, most_kept)


def run_fixed_decay(
    qkv: Tensor,
    a: Tensor,
    b: Tensor,
    weights: RecurrenceWeights,
    rows: RecurrenceRows,
    state: RecurrenceState,
    out: Tensor,
) -> None:
    """Fill `out`, and the states of the rows: see `RunRecurrence`. Does not wait for the device."""
    if qkv.shape[0]:
        for launch in launches(qkv, a, b, weights, rows, state, out):
            launch.run()
