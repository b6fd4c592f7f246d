"""`triton.recurrence.state_space`: Mamba2's state space in Triton, for any GPU of sm_80 or newer.

Two launches of decode, up to five of prompts.
"""

from typing import Any

import triton
from torch import Tensor

from kernels.calls.triton_launch import Launch
from kernels.recurrence.calls import RecurrenceRows, RecurrenceState, RecurrenceWeights
from kernels.recurrence.forms.launch import EXACT, FormCall, padded
from kernels.recurrence.sizes import BLOCK, CHUNK
from kernels.recurrence.state_space.prepare import hallmark_recurrence_space_keep, hallmark_recurrence_space_prepare
from kernels.recurrence.state_space.scan import hallmark_recurrence_space_results, hallmark_recurrence_space_scan
from kernels.recurrence.state_space.weights import StateSpaceWeights
from kernels.vocabulary.shape import Phase

_ROWS = 32  # that a program looks at together
# Columns of a value head, by bytes of a number, and warps of a program that scans, in 16 bits too few for wgmma; of one
# with few new tokens; of one that computes results.
_COLUMNS, _SCAN_WARPS = {2: 16, 4: 32}, {2: 2, 4: 4}
_FEW_COLUMNS, _FEW_WARPS = {2: 64, 4: 32}, 4
_RESULT_COLUMNS, _RESULT_WARPS = {2: 64, 4: 32}, 4
_STAGES = 2


def space_launches(
    call: FormCall, prepare: Any, prepare_arguments: tuple[Any, ...], skip: Tensor, most_kept: int
) -> list[Launch]:
    """Return the launches of a state space, or of a form that has its scan, behind a preparation.

    most_kept  tokens of a row that `prepare` may write to the rings of its slot at once: the call reads none of their
               places
    """
    keeps = call.num_writes == 0 and call.rows.longest <= most_kept
    found = [call.prepare(prepare, prepare_arguments, _ROWS, keeps=keeps), *_scan(call, skip)]
    if not keeps:
        heads = {"BLOCK_H": triton.next_power_of_2(call.sizes.num_value_heads)}
        found += call.keep(hallmark_recurrence_space_keep, call.sizes.num_key_heads, heads)
    return found


def _scan(call: FormCall, skip: Tensor) -> list[Launch]:
    """Return the launches of the scan, and of the results of full chunks where rows are long."""
    sizes, num_bytes, block_k = call.sizes, call.qkv.element_size(), padded(call.sizes.key_dim)
    is_few = call.rows.phase is not Phase.EXTEND
    is_apart = not is_few and call.rows.longest >= CHUNK
    num_chunks = call.num_tokens // CHUNK if is_apart else 0
    borders = call.qkv.new_empty(num_chunks, sizes.num_value_heads, 2 if call.is_half else 1, block_k, sizes.value_dim)
    tokens = (call.queries, call.keys, call.values, call.decays, call.gates, skip, borders, call.out)
    columns = min((_FEW_COLUMNS if is_few else _COLUMNS)[num_bytes], padded(sizes.value_dim))
    tiles = {"VALUE_DIM": sizes.value_dim, "IS_HALF": call.is_half, "BLOCK_K": block_k, "BLOCK_R": _ROWS}
    found = [
        Launch(
            hallmark_recurrence_space_scan,
            (call.num_rows, sizes.num_value_heads, triton.cdiv(sizes.value_dim, columns)),
            (*tokens, *call.scanned, call.num_rows, call.num_writes, *call.scanned_strides),
            {
                **call.heads, **call.folding, **tiles, "BLOCK_V": columns, "BLOCK_Q": BLOCK if is_few else CHUNK,
                "STAGES": _STAGES, "IS_APART": is_apart, "num_warps": _FEW_WARPS if is_few else _SCAN_WARPS[num_bytes],
                **EXACT,
            },
        )
    ]  # fmt: skip
    if is_apart:
        columns = min(_RESULT_COLUMNS[num_bytes], padded(sizes.value_dim))
        heads = {name: value for name, value in call.heads.items() if name != "RING"}
        found.append(
            Launch(
                hallmark_recurrence_space_results,
                (num_chunks, sizes.num_value_heads, triton.cdiv(sizes.value_dim, columns)),
                (*tokens, *call.of_rows, call.num_rows, call.out.stride(0)),
                {
                    **heads, **tiles, "BLOCK_V": columns, "CHUNK": CHUNK, "num_warps": _RESULT_WARPS,
                    **EXACT,
                },
            )
        )  # fmt: skip
    return found


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
    call = FormCall.of(qkv, sizes, rows, state, out, is_convolved=True)
    most_kept = state.inputs.shape[1] - sizes.width + 1
    return space_launches(call, hallmark_recurrence_space_prepare, arguments, weights.skip, most_kept)


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
