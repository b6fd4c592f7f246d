"""`triton.recurrence.channel_delta`: the delta rule of channels in Triton, for any GPU of sm_80 or newer."""

from torch import Tensor

from kernels.calls.triton_launch import Launch
from kernels.recurrence.calls import RecurrenceRows, RecurrenceState, RecurrenceWeights
from kernels.recurrence.channel_delta.prepare import (
    hallmark_recurrence_channels_keep,
    hallmark_recurrence_channels_prepare,
)
from kernels.recurrence.channel_delta.scan import hallmark_recurrence_channels_scan
from kernels.recurrence.channel_delta.weights import ChannelDeltaWeights
from kernels.recurrence.forms.launch import FormKernels, form_launches
from kernels.recurrence.sizes import BLOCK

_ROWS = 64  # that a program that prepares looks at together
_COLUMNS = 32  # of a value head, of a program that scans; of 16 beside keys of 16 Triton 3.6.0 compiles no code
_WARPS = 4  # of a program that scans


def launches(
    qkv: Tensor,
    a: Tensor,
    b: Tensor,
    weights: RecurrenceWeights,
    rows: RecurrenceRows,
    state: RecurrenceState,
    out: Tensor,
) -> list[Launch]:
    """Return the launches of a call of one token or more. a  [T, value_heads * key_dim]"""
    assert isinstance(weights, ChannelDeltaWeights), "a shape of the form channel-delta has such weights"
    sizes = state.sizes(weights)
    kernels = FormKernels(
        prepare=hallmark_recurrence_channels_prepare,
        prepare_arguments=(a, b, weights.conv, weights.a_log, weights.dt_bias, a.stride(0), b.stride(0)),
        is_convolved=True,
        rows=_ROWS,
        scan=hallmark_recurrence_channels_scan,
        factor=sizes.key_dim**-0.5,
        columns=_COLUMNS,
        scan_options={"BLOCK": BLOCK, "num_warps": _WARPS},
        decay_dim=sizes.key_dim,
        keep=hallmark_recurrence_channels_keep,
        keep_parts=sizes.num_key_heads + sizes.num_value_heads,
        keep_options={},
    )
    return form_launches(kernels, qkv, sizes, rows, state, out, state.inputs.shape[1] - sizes.width + 1)


def run_channel_delta(
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
