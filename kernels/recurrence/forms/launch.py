"""The launches of a form with kernels of its own: preparation of tokens, their scan, and what slots keep of them.

Two launches of decode, up to four of prompts, whose grids depend on the numbers of tokens and rows alone, so that a
CUDA graph holds them.
"""

from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor

from kernels.calls.triton_launch import Launch
from kernels.recurrence.calls import RecurrenceRows, RecurrenceState
from kernels.recurrence.portable.keep import keep_launches
from kernels.recurrence.sizes import CHUNK, RecurrenceSizes
from kernels.vocabulary.shape import Phase

_TOKENS = 16  # of a program that prepares
_CHANNELS = 1024  # of inputs that are kept, of a program
_EXACT = {"enable_fp_fusion": False}  # a product and a sum in one rounding or two, as each kernel would choose


@dataclass(frozen=True, slots=True)
class FormKernels:
    """The kernels of a form, and what they are given beside what those of every form are.

    prepare_arguments  of `prepare`, behind qkv and before those of every form
    is_convolved       whether `prepare` has a convolution, whose inputs slots keep
    rows               that a program of `prepare` looks at together
    factor             of `scan`: [value_heads] fp32, or a number
    columns            of a value head, of a program of `scan`
    scan_options       options of `scan`, num_warps among them
    decay_dim          decays of a token and value head: 1, or one of each channel of its keys
    keep_parts         programs of `keep` of a slot, less those of inputs
    keep_options       options of `keep`
    """

    prepare: Any
    prepare_arguments: tuple[Any, ...]
    is_convolved: bool
    rows: int
    scan: Any
    factor: Tensor | float
    columns: int
    scan_options: dict[str, Any]
    decay_dim: int
    keep: Any
    keep_parts: int
    keep_options: dict[str, Any]


def form_launches(
    kernels: FormKernels,
    qkv: Tensor,
    sizes: RecurrenceSizes,
    rows: RecurrenceRows,
    state: RecurrenceState,
    out: Tensor,
    most_kept: int,
) -> list[Launch]:
    """Return the launches of a call of one token or more.

    most_kept  tokens of a row that `prepare` may write to the rings of its slot at once: the call reads none of their
               places
    """
    num_tokens, num_rows, num_writes = qkv.shape[0], rows.starts.shape[0], rows.write_tokens.shape[0]
    key_heads, value_heads = sizes.num_key_heads, sizes.num_value_heads
    queries, keys = (qkv.new_empty(num_tokens, key_heads, sizes.key_dim) for _ in range(2))
    values = qkv.new_empty(num_tokens, value_heads, sizes.value_dim)
    decays = torch.empty(num_tokens, value_heads, kernels.decay_dim, dtype=torch.float32, device=qkv.device)
    gates = torch.empty(num_tokens, value_heads, dtype=torch.float32, device=qkv.device)
    keeps = num_writes == 0 and rows.longest <= most_kept
    given = {
        "KEY_HEADS": key_heads, "VALUE_HEADS": value_heads, "KEY_DIM": sizes.key_dim, "RING": state.keys.shape[1],
    }  # fmt: skip
    folding = {"FOLDS_ALL": rows.phase is not Phase.VERIFY, "CHUNK": CHUNK}
    input_ring = state.inputs.shape[1] if kernels.is_convolved else 1
    block_k = padded(sizes.key_dim)
    of_rows = (rows.starts, rows.stops, rows.firsts)
    of_writes = (rows.write_tokens, rows.write_slots)
    of_inputs: tuple[Any, ...] = ()
    convolution = {}
    if kernels.is_convolved:
        of_inputs = (rows.sources, state.inputs, state.inputs.stride(0))
        convolution = {"WIDTH": sizes.width, "INPUT_RING": input_ring}
    found = [
        Launch(
            kernels.prepare,
            (triton.cdiv(num_tokens, _TOKENS), 2 * key_heads + value_heads),
            (
                qkv, *kernels.prepare_arguments, *of_inputs, *of_rows, rows.targets, state.keys, state.decays, queries,
                keys, values, decays, gates, out, num_tokens, num_rows, qkv.stride(0), state.keys.stride(0),
                state.decays.stride(0),
            ),
            {
                **given, **convolution, "VALUE_DIM": sizes.value_dim, "KEEPS": keeps, "BLOCK_T": _TOKENS,
                "BLOCK_R": kernels.rows, "BLOCK_D": padded(max(sizes.key_dim, sizes.value_dim)), **_EXACT,
            },
        ),
        Launch(
            kernels.scan,
            (num_rows, value_heads, triton.cdiv(sizes.value_dim, kernels.columns)),
            (
                queries, keys, values, decays, gates, kernels.factor, out, *of_rows, rows.folded, rows.sources,
                rows.targets, *of_writes, state.states, state.keys, state.values, state.decays, num_writes,
                out.stride(0), state.states.stride(0), state.keys.stride(0), state.values.stride(0),
                state.decays.stride(0),
            ),
            {
                **given, **folding, "VALUE_DIM": sizes.value_dim, "IS_HALF": qkv.element_size() == 2,
                "BLOCK_K": block_k, "BLOCK_V": kernels.columns, "num_stages": 1, **kernels.scan_options, **_EXACT,
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
            "BLOCK_C": _CHANNELS, **kernels.keep_options,
        }  # fmt: skip
        parts = kernels.keep_parts + (triton.cdiv(sizes.conv_dim, _CHANNELS) if kernels.is_convolved else 0)
        found += keep_launches(kernels.keep, num_rows, num_writes, parts, of_keep, options)
    return found


def padded(dims: int) -> int:
    """Return the width of a tile that holds so many numbers: a power of 2, of 16 at least."""
    return max(16, int(triton.next_power_of_2(dims)))
