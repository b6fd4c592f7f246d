"""`triton.recurrence.fixed_decay`: lightning attention in Triton, for any GPU of sm_80 or newer.

The rule is a state space's whose steps are 1 and whose x is not added to the result, and its scan is that one's. Two
launches of decode, up to four of prompts, whose grids depend on the numbers of tokens and rows alone, so that a CUDA
graph holds them.
"""

import torch
import triton
from torch import Tensor

from kernels.calls.triton_launch import Launch
from kernels.recurrence.calls import RecurrenceRows, RecurrenceState, RecurrenceWeights
from kernels.recurrence.fixed_decay.prepare import hallmark_recurrence_fixed_prepare
from kernels.recurrence.fixed_decay.weights import FixedDecayWeights
from kernels.recurrence.portable.keep import keep_launches
from kernels.recurrence.sizes import CHUNK
from kernels.recurrence.state_space.prepare import hallmark_recurrence_space_keep
from kernels.recurrence.state_space.scan import hallmark_recurrence_space_scan
from kernels.vocabulary.shape import Phase

_TOKENS = 16  # of a program that prepares
_ROWS = 32  # that it looks at together
_COLUMNS = {2: 16, 4: 32}  # of a value head, of a program that scans, by bytes of a number
_SCAN_WARPS = {2: 2, 4: 4}  # of it, as of a state space
_CHANNELS = 1024  # of inputs that are kept, of a program: there are none
_EXACT = {"enable_fp_fusion": False}  # a product and a sum in one rounding or two, as each kernel would choose


def run_fixed_decay(
    qkv: Tensor,
    a: Tensor,
    b: Tensor,
    weights: RecurrenceWeights,
    rows: RecurrenceRows,
    state: RecurrenceState,
    out: Tensor,
) -> None:
    """Fill `out`, and the states of the rows: see `RunRecurrence`. Does not wait for the device.

    qkv  queries, keys and values as the rule takes them: there is no convolution; a, b are not read
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
    del a, b
    assert isinstance(weights, FixedDecayWeights), "a shape of the form fixed-decay has such weights"
    sizes, num_tokens, num_rows = state.sizes(weights), qkv.shape[0], rows.starts.shape[0]
    key_heads, value_heads, ring = sizes.num_key_heads, sizes.num_value_heads, state.keys.shape[1]
    queries, keys = (qkv.new_empty(num_tokens, key_heads, sizes.key_dim) for _ in range(2))
    values = qkv.new_empty(num_tokens, value_heads, sizes.value_dim)
    steps, decays = (torch.empty(num_tokens, value_heads, dtype=torch.float32, device=qkv.device) for _ in range(2))
    num_writes = rows.write_tokens.shape[0]
    # A ring has places of a chunk; where tokens are drafted, of as many more as two steps may be behind and ahead.
    keeps = num_writes == 0 and rows.longest <= 1 + max(0, ring - CHUNK - 1) // 2
    given = {"KEY_HEADS": key_heads, "VALUE_HEADS": value_heads, "KEY_DIM": sizes.key_dim, "RING": ring}
    folding = {"FOLDS_ALL": rows.phase is not Phase.VERIFY, "CHUNK": CHUNK}
    block_k, block_v = _padded(sizes.key_dim), min(_COLUMNS[qkv.element_size()], _padded(sizes.value_dim))
    of_rows = (rows.starts, rows.stops, rows.firsts)
    of_writes = (rows.write_tokens, rows.write_slots)
    found = [
        Launch(
            hallmark_recurrence_fixed_prepare,
            (triton.cdiv(num_tokens, _TOKENS), 2 * key_heads + value_heads),
            (
                qkv, weights.a_log, *of_rows, rows.targets, state.keys, state.decays, queries, keys, values, steps,
                decays, out, num_tokens, num_rows, qkv.stride(0), state.keys.stride(0), state.decays.stride(0),
            ),
            {
                **given, "VALUE_DIM": sizes.value_dim, "KEEPS": keeps, "BLOCK_T": _TOKENS, "BLOCK_R": _ROWS,
                "BLOCK_D": _padded(max(sizes.key_dim, sizes.value_dim)), **_EXACT,
            },
        ),
        Launch(
            hallmark_recurrence_space_scan,
            (num_rows, value_heads, triton.cdiv(sizes.value_dim, block_v)),
            (
                queries, keys, values, steps, decays, weights.no_skip, out, *of_rows, rows.folded, rows.sources,
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
        # Of a state space's kernel the programs of keys alone: there are no inputs to keep.
        of_keep = (
            qkv, keys, decays, *of_rows, rows.sources, rows.targets, *of_writes, state.inputs, state.keys,
            state.decays, num_rows, qkv.stride(0), state.inputs.stride(0), state.keys.stride(0), state.decays.stride(0),
        )  # fmt: skip
        options = {
            **given, **folding, "CONV_DIM": sizes.conv_dim, "INPUT_RING": 1, "BLOCK_D": block_k,
            "BLOCK_H": triton.next_power_of_2(value_heads), "BLOCK_C": _CHANNELS,
        }  # fmt: skip
        found += keep_launches(hallmark_recurrence_space_keep, num_rows, num_writes, key_heads, of_keep, options)
    return found


def _padded(dims: int) -> int:
    return max(16, int(triton.next_power_of_2(dims)))
