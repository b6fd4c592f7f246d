"""`triton.recurrence.channel_delta`: the delta rule of channels in Triton, for any GPU of sm_80 or newer.

Three launches of decode, up to five of prompts.
"""

import torch
import triton
from torch import Tensor

from kernels.calls.triton_launch import Launch
from kernels.recurrence.calls import RecurrenceRows, RecurrenceState, RecurrenceWeights
from kernels.recurrence.channel_delta.factors import hallmark_recurrence_channels_factors
from kernels.recurrence.channel_delta.prepare import (
    hallmark_recurrence_channels_keep,
    hallmark_recurrence_channels_prepare,
)
from kernels.recurrence.channel_delta.scan import hallmark_recurrence_channels_scan
from kernels.recurrence.channel_delta.weights import ChannelDeltaWeights
from kernels.recurrence.forms.launch import EXACT, FormCall, padded
from kernels.recurrence.sizes import BLOCK, CHUNK
from kernels.vocabulary.shape import Phase

_ROWS = 64  # that a program that prepares looks at together
_BLOCK_ROWS = 32  # that one of a block does
_FACTOR_WARPS = 4
_COLUMNS = 32  # of a value head, of a program that scans; of 16 beside keys of 16 Triton 3.6.0 compiles no code
_SCAN_WARPS = {2: 2, 4: 4}  # of it, by bytes of a number
_STAGES = 2


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
    call = FormCall.of(qkv, sizes, rows, state, out, is_convolved=True, decay_dim=sizes.key_dim)
    keeps = call.num_writes == 0 and rows.longest <= state.inputs.shape[1] - sizes.width + 1
    arguments = (a, b, weights.conv, weights.a_log, weights.dt_bias, a.stride(0), b.stride(0))
    return [
        call.prepare(hallmark_recurrence_channels_prepare, arguments, _ROWS, keeps=keeps),
        *_scan(call),
        *(
            []
            if keeps
            else call.keep(hallmark_recurrence_channels_keep, sizes.num_key_heads + sizes.num_value_heads, {})
        ),
    ]


def _scan(call: FormCall) -> list[Launch]:
    """Return the launches of the blocks' factors, and of the scan."""
    sizes, rows, state, heads = call.sizes, call.rows, call.state, call.sizes.num_value_heads
    # A row has a block of every 16 tokens, behind up to a ring of known ones.
    num_blocks = (call.num_tokens + call.num_rows * (state.keys.shape[1] - 1 + BLOCK - 1)) // BLOCK
    block_k, parts = padded(sizes.key_dim), 2 if call.is_half else 1
    read = call.qkv.new_empty(num_blocks, heads, 2, parts, BLOCK, block_k)
    turned = call.qkv.new_empty(num_blocks, heads, parts, BLOCK, block_k)
    near = torch.empty(num_blocks, heads, BLOCK, BLOCK, dtype=torch.float32, device=call.qkv.device)
    of_queries = call.qkv.new_empty(num_blocks, heads, parts, BLOCK, BLOCK)
    totals = torch.empty(num_blocks, heads, block_k, dtype=torch.float32, device=call.qkv.device)
    factors = (read, turned, near, of_queries, totals)
    tiles = {"IS_HALF": call.is_half, "BLOCK_K": block_k, "BLOCK_R": _BLOCK_ROWS, "BLOCK": BLOCK}
    return [
        Launch(
            hallmark_recurrence_channels_factors,
            (num_blocks, heads),
            (
                call.queries, call.keys, call.decays, call.gates, *factors, *call.of_rows, rows.folded, rows.sources,
                state.keys, state.decays, call.num_rows, state.keys.stride(0), state.decays.stride(0),
            ),
            {**call.heads, **tiles, "num_warps": _FACTOR_WARPS, **EXACT},
        ),
        Launch(
            hallmark_recurrence_channels_scan,
            (call.num_rows, heads, triton.cdiv(sizes.value_dim, _COLUMNS)),
            (
                call.values, call.gates, *factors, sizes.key_dim**-0.5, call.out, *call.scanned, call.num_rows,
                call.num_writes, *call.scanned_strides,
            ),
            {
                **call.heads, **call.folding, **tiles, "VALUE_DIM": sizes.value_dim, "BLOCK_V": _COLUMNS,
                "STAGES": _STAGES, "IS_LONG": rows.phase is Phase.EXTEND and rows.longest >= CHUNK,
                "num_warps": _SCAN_WARPS[call.qkv.element_size()], **EXACT,
            },
        ),
    ]  # fmt: skip


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
