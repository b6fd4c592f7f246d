"""`triton.recurrence.channel_delta`: the delta rule of channels in Triton, for any GPU of sm_80 or newer.

Two launches of decode, up to four of prompts, whose grids depend on the numbers of tokens and rows alone, so that a
CUDA graph holds them.
"""

import torch
import triton
from torch import Tensor

from kernels.calls.triton_launch import Launch
from kernels.recurrence.calls import RecurrenceRows, RecurrenceState, RecurrenceWeights
from kernels.recurrence.channel_delta.prepare import (
    hallmark_recurrence_channels_keep,
    hallmark_recurrence_channels_prepare,
)
from kernels.recurrence.channel_delta.scan import hallmark_recurrence_channels_scan
from kernels.recurrence.channel_delta.weights import ChannelDeltaWeights
from kernels.recurrence.portable.keep import keep_launches
from kernels.recurrence.sizes import BLOCK, CHUNK
from kernels.vocabulary.shape import Phase

_TOKENS = 16  # of a program that prepares
_ROWS = 64  # that it looks at together
_COLUMNS = 32  # of a value head, of a program that scans; of 16 beside keys of 16 Triton 3.6.0 compiles no code
_WARPS = 4  # of a program that scans
_CHANNELS = 1024  # of inputs that are kept, of a program
_EXACT = {"enable_fp_fusion": False}  # a product and a sum in one rounding or two, as each kernel would choose


def run_channel_delta(
    qkv: Tensor,
    a: Tensor,
    b: Tensor,
    weights: RecurrenceWeights,
    rows: RecurrenceRows,
    state: RecurrenceState,
    out: Tensor,
) -> None:
    """Fill `out`, and the states of the rows: see `RunRecurrence`. Does not wait for the device.

    a  [T, value_heads * key_dim]
    """
    if qkv.shape[0]:
        for launch in launches(qkv, a, b, weights, rows, state, out):
            launch.run()


def launches(
    qkv: Tensor,
    a: Tensor,
    b: Tensor,
    weights: RecurrenceWeights,
    rows: RecurrenceRows,
    state: RecurrenceState,
    out: Tensor,
) -> list[Launch]:
    """Return the launches of a call of one token or more."""
    assert isinstance(weights, ChannelDeltaWeights), "a shape of the form channel-delta has such weights"
    sizes, num_tokens, num_rows = state.sizes(weights), qkv.shape[0], rows.starts.shape[0]
    key_heads, value_heads, key_dim = sizes.num_key_heads, sizes.num_value_heads, sizes.key_dim
    queries, keys = (qkv.new_empty(num_tokens, key_heads, key_dim) for _ in range(2))
    values = qkv.new_empty(num_tokens, value_heads, sizes.value_dim)
    decays = torch.empty(num_tokens, value_heads, key_dim, dtype=torch.float32, device=qkv.device)
    betas = torch.empty(num_tokens, value_heads, dtype=torch.float32, device=qkv.device)
    num_writes, input_ring = rows.write_tokens.shape[0], state.inputs.shape[1]
    keeps = num_writes == 0 and rows.longest <= input_ring - sizes.width + 1
    given = {
        "KEY_HEADS": key_heads, "VALUE_HEADS": value_heads, "KEY_DIM": key_dim, "RING": state.keys.shape[1],
    }  # fmt: skip
    folding = {"FOLDS_ALL": rows.phase is not Phase.VERIFY, "CHUNK": CHUNK}
    block_k = _padded(key_dim)
    of_rows = (rows.starts, rows.stops, rows.firsts)
    of_writes = (rows.write_tokens, rows.write_slots)
    found = [
        Launch(
            hallmark_recurrence_channels_prepare,
            (triton.cdiv(num_tokens, _TOKENS), 2 * key_heads + value_heads),
            (
                qkv, a, b, weights.conv, weights.a_log, weights.dt_bias, *of_rows, rows.sources, rows.targets,
                state.inputs, state.keys, state.decays, queries, keys, values, decays, betas, out, num_tokens, num_rows,
                qkv.stride(0), a.stride(0), b.stride(0), state.inputs.stride(0), state.keys.stride(0),
                state.decays.stride(0),
            ),
            {
                **given, "VALUE_DIM": sizes.value_dim, "WIDTH": sizes.width, "INPUT_RING": input_ring, "KEEPS": keeps,
                "BLOCK_T": _TOKENS, "BLOCK_R": _ROWS, "BLOCK_D": _padded(max(key_dim, sizes.value_dim)), **_EXACT,
            },
        ),
        Launch(
            hallmark_recurrence_channels_scan,
            (num_rows, value_heads, triton.cdiv(sizes.value_dim, _COLUMNS)),
            (
                queries, keys, values, decays, betas, out, *of_rows, rows.folded, rows.sources, rows.targets,
                *of_writes, state.states, state.keys, state.values, state.decays, num_writes, out.stride(0),
                state.states.stride(0), state.keys.stride(0), state.values.stride(0), state.decays.stride(0),
                key_dim**-0.5,
            ),
            {
                **given, **folding, "VALUE_DIM": sizes.value_dim, "IS_HALF": qkv.element_size() == 2,
                "BLOCK_K": block_k, "BLOCK_V": _COLUMNS, "BLOCK": BLOCK, "num_warps": _WARPS, "num_stages": 1, **_EXACT,
            },
        ),
    ]  # fmt: skip
    if not keeps:
        of_keep = (
            qkv, keys, decays, *of_rows, rows.sources, rows.targets, *of_writes, state.inputs, state.keys,
            state.decays, num_rows, qkv.stride(0), state.inputs.stride(0), state.keys.stride(0), state.decays.stride(0),
        )  # fmt: skip
        options = {
            **given, **folding, "CONV_DIM": sizes.conv_dim, "INPUT_RING": input_ring, "BLOCK_D": block_k,
            "BLOCK_C": _CHANNELS,
        }  # fmt: skip
        parts = key_heads + value_heads + triton.cdiv(sizes.conv_dim, _CHANNELS)
        found += keep_launches(hallmark_recurrence_channels_keep, num_rows, num_writes, parts, of_keep, options)
    return found


def _padded(dims: int) -> int:
    return max(16, int(triton.next_power_of_2(dims)))
