"""`triton.recurrence`: the recurrence in Triton, for any GPU of sm_80 or newer.

Two launches of decode, three of prompts, whose grids depend on the numbers of tokens and rows alone, so that a CUDA
graph holds them. A token's numbers are computed by the same instructions of the same tiles in each of them.
"""

from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from kernels.recurrence.calls import RecurrenceRows, RecurrenceState, RecurrenceWeights
from kernels.recurrence.portable.chunks import hallmark_recurrence_chunks
from kernels.recurrence.portable.prepare import hallmark_recurrence_keep, hallmark_recurrence_prepare
from kernels.recurrence.sizes import BLOCK, CHUNK
from kernels.vocabulary.shape import Phase

_TOKENS = 16  # of a program that prepares
_ROWS = 64  # that it looks at together
_COLUMNS = {2: 64, 4: 32}  # of a value head, of a program, by bytes of a number
_CHANNELS = 1024  # of inputs that are kept, of a program


class Launch(NamedTuple):
    """A kernel's launch: its arguments, and its constexpr parameters and options by name."""

    kernel: Any
    grid: tuple[int, ...]
    arguments: tuple[Any, ...]
    options: dict[str, Any]


def run_recurrence(
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
            launch.kernel[launch.grid](*launch.arguments, **launch.options)


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
    sizes, num_tokens, num_rows = state.sizes(weights), qkv.shape[0], rows.starts.shape[0]
    key_heads, value_heads = sizes.num_key_heads, sizes.num_value_heads
    heads = {"KEY_HEADS": key_heads, "VALUE_HEADS": value_heads, "KEY_DIM": sizes.key_dim}
    queries, keys = (qkv.new_empty(num_tokens, key_heads, sizes.key_dim) for _ in range(2))
    values, added = (qkv.new_empty(num_tokens, value_heads, sizes.value_dim) for _ in range(2))
    decays, betas = (torch.empty(num_tokens, value_heads, dtype=torch.float32, device=qkv.device) for _ in range(2))
    num_writes, input_ring = rows.write_tokens.shape[0], state.inputs.shape[1]
    keeps = num_writes == 0 and rows.longest <= input_ring - sizes.width + 1
    rings = {"RING": state.keys.shape[1]}
    folding = {"FOLDS_ALL": rows.phase is not Phase.VERIFY, "CHUNK": CHUNK}
    block_k, dims = _padded(sizes.key_dim), max(sizes.key_dim, sizes.value_dim)
    block_v = min(_COLUMNS[qkv.element_size()], _padded(sizes.value_dim))
    strides = state.inputs.stride(0), state.keys.stride(0), state.decays.stride(0)
    found = [
        Launch(
            hallmark_recurrence_prepare,
            (triton.cdiv(num_tokens, _TOKENS), 2 * key_heads + value_heads),
            (
                qkv, a, b, weights.conv, weights.a_log, weights.dt_bias, rows.starts, rows.stops, rows.firsts,
                rows.sources, rows.targets, state.inputs, state.keys, state.decays, queries, keys, values, decays,
                betas, out, num_tokens, num_rows, qkv.stride(0), a.stride(0), b.stride(0), *strides,
            ),
            {
                **heads, **rings, "VALUE_DIM": sizes.value_dim, "WIDTH": sizes.width, "INPUT_RING": input_ring,
                "KEEPS": keeps, "BLOCK_T": _TOKENS, "BLOCK_R": _ROWS, "BLOCK_D": _padded(dims),
            },
        ),
        Launch(
            hallmark_recurrence_chunks,
            (num_rows, value_heads, triton.cdiv(sizes.value_dim, block_v)),
            (
                queries, keys, values, decays, betas, added, out, rows.starts, rows.stops, rows.firsts, rows.folded,
                rows.sources, rows.targets, rows.write_tokens, rows.write_slots, state.states, state.keys,
                state.values, state.decays, num_writes, out.stride(0), state.states.stride(0), state.keys.stride(0),
                state.values.stride(0), state.decays.stride(0), sizes.key_dim**-0.5,
            ),
            {
                **heads, **rings, **folding, "VALUE_DIM": sizes.value_dim, "IS_HALF": qkv.element_size() == 2,
                "BLOCK_K": block_k, "BLOCK_V": block_v, "BLOCK": BLOCK, "num_warps": 8, "num_stages": 1,
            },
        ),
    ]  # fmt: skip
    if not keeps:
        found.append(
            Launch(
                hallmark_recurrence_keep,
                (num_rows + num_writes, key_heads + triton.cdiv(sizes.conv_dim, _CHANNELS)),
                (
                    qkv, keys, decays, rows.starts, rows.stops, rows.firsts, rows.sources, rows.targets,
                    rows.write_tokens, rows.write_slots, state.inputs, state.keys, state.decays, num_rows,
                    qkv.stride(0), *strides,
                ),
                {
                    **heads, **rings, **folding, "CONV_DIM": sizes.conv_dim, "INPUT_RING": input_ring,
                    "BLOCK_D": block_k, "BLOCK_H": triton.next_power_of_2(value_heads), "BLOCK_C": _CHANNELS,
                },
            )
        )  # fmt: skip
    return found


def _padded(dims: int) -> int:
    return max(16, int(triton.next_power_of_2(dims)))
