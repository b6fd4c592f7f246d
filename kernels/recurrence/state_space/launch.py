"""`triton.recurrence.state_space`: Mamba2's state space in Triton, for any GPU of sm_80 or newer.

Two launches of decode, up to four of prompts, whose grids depend on the numbers of tokens and rows alone, so that a
CUDA graph holds them.
"""

import torch
import triton
from torch import Tensor

from kernels.calls.triton_launch import Launch
from kernels.recurrence.calls import RecurrenceRows, RecurrenceState, RecurrenceWeights
from kernels.recurrence.portable.keep import keep_launches
from kernels.recurrence.sizes import CHUNK
from kernels.recurrence.state_space.prepare import hallmark_recurrence_space_keep, hallmark_recurrence_space_prepare
from kernels.recurrence.state_space.scan import hallmark_recurrence_space_scan
from kernels.recurrence.state_space.weights import StateSpaceWeights
from kernels.vocabulary.shape import Phase

_TOKENS = 16  # of a program that prepares
_ROWS = 32  # that it looks at together
_COLUMNS = {2: 16, 4: 32}  # of a value head, of a program that scans, by bytes of a number
_SCAN_WARPS = {2: 2, 4: 4}  # of it: in 16 bits too few for wgmma
_CHANNELS = 1024  # of inputs that are kept, of a program
_EXACT = {"enable_fp_fusion": False}  # a product and a sum in one rounding or two, as each kernel would choose


def run_state_space(
    qkv: Tensor,
    a: Tensor,
    b: Tensor,
    weights: RecurrenceWeights,
    rows: RecurrenceRows,
    state: RecurrenceState,
    out: Tensor,
) -> None:
    """Fill `out`, and the states of the rows: see `RunRecurrence`. Does not wait for the device.

    qkv  C, B and x before their convolution; a  steps before their bias; b is not read
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
    del b
    assert isinstance(weights, StateSpaceWeights), "a shape of the form state-space has such weights"
    sizes, num_tokens, num_rows = state.sizes(weights), qkv.shape[0], rows.starts.shape[0]
    key_heads, value_heads = sizes.num_key_heads, sizes.num_value_heads
    queries, keys = (qkv.new_empty(num_tokens, key_heads, sizes.key_dim) for _ in range(2))
    values = qkv.new_empty(num_tokens, value_heads, sizes.value_dim)
    steps, decays = (torch.empty(num_tokens, value_heads, dtype=torch.float32, device=qkv.device) for _ in range(2))
    num_writes, input_ring = rows.write_tokens.shape[0], state.inputs.shape[1]
    keeps = num_writes == 0 and rows.longest <= input_ring - sizes.width + 1
    given = {
        "KEY_HEADS": key_heads, "VALUE_HEADS": value_heads, "KEY_DIM": sizes.key_dim, "RING": state.keys.shape[1],
    }  # fmt: skip
    folding = {"FOLDS_ALL": rows.phase is not Phase.VERIFY, "CHUNK": CHUNK}
    block_k, block_v = _padded(sizes.key_dim), min(_COLUMNS[qkv.element_size()], _padded(sizes.value_dim))
    of_rows = (rows.starts, rows.stops, rows.firsts)
    of_writes = (rows.write_tokens, rows.write_slots)
    found = [
        Launch(
            hallmark_recurrence_space_prepare,
            (triton.cdiv(num_tokens, _TOKENS), 2 * key_heads + value_heads),
            (
                qkv, a, weights.conv, weights.conv_bias, weights.a_log, weights.dt_bias, *of_rows, rows.sources,
                rows.targets, state.inputs, state.keys, state.decays, queries, keys, values, steps, decays, out,
                num_tokens, num_rows, weights.least_step, weights.most_step, qkv.stride(0), a.stride(0),
                state.inputs.stride(0), state.keys.stride(0), state.decays.stride(0),
            ),
            {
                **given, "VALUE_DIM": sizes.value_dim, "WIDTH": sizes.width, "INPUT_RING": input_ring, "KEEPS": keeps,
                "BLOCK_T": _TOKENS, "BLOCK_R": _ROWS, "BLOCK_D": _padded(max(sizes.key_dim, sizes.value_dim)),
                **_EXACT,
            },
        ),
        Launch(
            hallmark_recurrence_space_scan,
            (num_rows, value_heads, triton.cdiv(sizes.value_dim, block_v)),
            (
                queries, keys, values, steps, decays, weights.skip, out, *of_rows, rows.folded, rows.sources,
                rows.targets, *of_writes, state.states, state.keys, state.values, state.decays, num_writes,
                out.stride(0), state.states.stride(0), state.keys.stride(0), state.values.stride(0),
                state.decays.stride(0),
            ),
            {
                **given, **folding, "VALUE_DIM": sizes.value_dim, "IS_HALF": qkv.element_size() == 2,
                "BLOCK_K": block_k, "BLOCK_V": block_v, "num_warps": _SCAN_WARPS[qkv.element_size()], "num_stages": 1,
                **_EXACT,
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
            "BLOCK_H": triton.next_power_of_2(value_heads), "BLOCK_C": _CHANNELS,
        }  # fmt: skip
        parts = key_heads + triton.cdiv(sizes.conv_dim, _CHANNELS)
        found += keep_launches(hallmark_recurrence_space_keep, num_rows, num_writes, parts, of_keep, options)
    return found


def _padded(dims: int) -> int:
    return max(16, int(triton.next_power_of_2(dims)))
