"""`triton.recurrence.state_space`: Mamba2's state space in Triton, for any GPU of sm_80 or newer."""

from typing import Any

import triton
from torch import Tensor

from kernels.calls.triton_launch import Launch
from kernels.recurrence.calls import RecurrenceRows, RecurrenceState, RecurrenceWeights
from kernels.recurrence.forms.launch import FormKernels, form_launches, padded
from kernels.recurrence.sizes import RecurrenceSizes
from kernels.recurrence.state_space.prepare import hallmark_recurrence_space_keep, hallmark_recurrence_space_prepare
from kernels.recurrence.state_space.scan import hallmark_recurrence_space_scan
from kernels.recurrence.state_space.weights import StateSpaceWeights

_ROWS = 32  # that a program that prepares looks at together
_COLUMNS = {2: 16, 4: 32}  # of a value head, of a program that scans, by bytes of a number
_SCAN_WARPS = {2: 2, 4: 4}  # of it: in 16 bits too few for wgmma


def space_kernels(
    prepare: Any,
    prepare_arguments: tuple[Any, ...],
    skip: Tensor,
    qkv: Tensor,
    sizes: RecurrenceSizes,
    *,
    is_convolved: bool,
) -> FormKernels:
    """Return the kernels of a state space, or of a form that has its scan, behind a preparation; see `FormKernels`."""
    num_bytes = qkv.element_size()
    return FormKernels(
        prepare=prepare,
        prepare_arguments=prepare_arguments,
        is_convolved=is_convolved,
        rows=_ROWS,
        scan=hallmark_recurrence_space_scan,
        factor=skip,
        columns=min(_COLUMNS[num_bytes], padded(sizes.value_dim)),
        scan_options={"num_warps": _SCAN_WARPS[num_bytes]},
        decay_dim=1,
        keep=hallmark_recurrence_space_keep,
        keep_parts=sizes.num_key_heads,
        keep_options={"BLOCK_H": triton.next_power_of_2(sizes.num_value_heads)},
    )


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

    qkv  C, B and x before their convolution; a  steps before their bias; b is not read
    """
    del b
    assert isinstance(weights, StateSpaceWeights), "a shape of the form state-space has such weights"
    sizes = state.sizes(weights)
    arguments = (
        a, weights.conv, weights.conv_bias, weights.a_log, weights.dt_bias, weights.least_step, weights.most_step,
        a.stride(0),
    )  # fmt: skip
    kernels = space_kernels(hallmark_recurrence_space_prepare, arguments, weights.skip, qkv, sizes, is_convolved=True)
    return form_launches(kernels, qkv, sizes, rows, state, out, state.inputs.shape[1] - sizes.width + 1)


def run_state_space(
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
