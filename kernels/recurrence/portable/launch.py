"""`triton.recurrence`: the recurrence in Triton, for any GPU of sm_80 or newer, and kernels of its own for sm_90.

One launch to decode or to verify on sm_90, else three or four, up to eight of prompts, whose grids depend on the
numbers of tokens and rows alone, so that a CUDA graph holds them. A token's numbers have the same bits in each of them:
`pieces.py` says why.
"""

from typing import NamedTuple

import torch
import triton
from torch import Tensor

from kernels.calls.triton_launch import Launch
from kernels.recurrence.calls import RecurrenceRows, RecurrenceState, RecurrenceWeights
from kernels.recurrence.hopper.launches import has_scan, has_token, scan_launch, token_launch, tokens_of_program
from kernels.recurrence.portable.blocks import hallmark_recurrence_blocks
from kernels.recurrence.portable.chunks import hallmark_recurrence_chunks
from kernels.recurrence.portable.factors import hallmark_recurrence_factors
from kernels.recurrence.portable.keep import keep_launches
from kernels.recurrence.portable.prepare import hallmark_recurrence_keep, hallmark_recurrence_prepare
from kernels.recurrence.portable.rows import hallmark_recurrence_rows
from kernels.recurrence.portable.scan import hallmark_recurrence_scan
from kernels.recurrence.sizes import BLOCK, CHUNK
from kernels.vocabulary.shape import Phase

_TOKENS, _MANY_TOKENS = 16, 32  # of a program that prepares, few or many
_APART = 8  # numbers of 16 bits that are read together
_ROWS = 32  # that it looks at together
_COLUMNS = {2: 64, 4: 32}  # of a value head, of a program, by bytes of a number
_SCANNED_COLUMNS, _SCAN_WARPS, _STAGES = 64, 4, 2  # of a program that scans
_ROWS_COLUMNS, _ROWS_WARPS = 64, 4  # of a program of a row of one block
_LEAST = 32  # tokens from its first border on of a row that is scanned
_FACTORS = {"num_warps": 4, "maxnreg": 128}  # so that four programs share a multiprocessor
_CHANNELS = 1024  # of inputs that are kept, of a program
_EXACT = {"enable_fp_fusion": False}  # a product and a sum in one rounding or two, as each kernel would choose


class _Factors(NamedTuple):
    """Results of `hallmark_recurrence_blocks` for units of so many tokens, each of one value head."""

    of_keys: Tensor
    of_queries: Tensor
    inverses: Tensor
    gates: Tensor

    @classmethod
    def empty(cls, num_units: int, num_heads: int, num_tokens: int, like: Tensor) -> "_Factors":
        of_keys, of_queries = (like.new_empty(num_units, num_heads, num_tokens, CHUNK) for _ in range(2))
        return cls(
            of_keys,
            of_queries,
            like.new_empty(num_units, num_heads, num_tokens, CHUNK),
            torch.empty(num_units, num_heads, 4, num_tokens, dtype=torch.float32, device=like.device),
        )


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
        is_hopper = qkv.is_cuda and torch.cuda.get_device_capability(qkv.device)[0] == 9
        for launch in launches(qkv, a, b, weights, rows, state, out, is_hopper=is_hopper):
            launch.run()


def launches(
    qkv: Tensor,
    a: Tensor,
    b: Tensor,
    weights: RecurrenceWeights,
    rows: RecurrenceRows,
    state: RecurrenceState,
    out: Tensor,
    *,
    is_hopper: bool = False,
) -> list[Launch]:
    """Return the launches of a call of one token or more; is_hopper: for sm_90."""
    sizes, num_tokens, num_rows = state.sizes(weights), qkv.shape[0], rows.starts.shape[0]
    key_heads, value_heads = sizes.num_key_heads, sizes.num_value_heads
    heads = {"KEY_HEADS": key_heads, "VALUE_HEADS": value_heads, "KEY_DIM": sizes.key_dim}
    num_writes, input_ring = rows.write_tokens.shape[0], state.inputs.shape[1]
    room = input_ring - sizes.width + 1  # tokens that may be new in a ring
    keeps = num_writes == 0 and rows.longest <= room
    rings = {"RING": state.keys.shape[1]}
    folding = {"FOLDS_ALL": rows.phase is not Phase.VERIFY, "CHUNK": CHUNK}
    block_k, dims = _padded(sizes.key_dim), max(sizes.key_dim, sizes.value_dim)
    block_v = min(_COLUMNS[qkv.element_size()], _padded(sizes.value_dim))
    strides = (state.inputs.stride(0), state.keys.stride(0), state.decays.stride(0), state.betas.stride(0))
    is_half = qkv.element_size() == 2
    is_scanned = rows.phase is Phase.EXTEND and is_half and rows.longest >= _LEAST
    least = _LEAST if is_scanned else 0
    is_alone = num_rows == 1 and rows.longest > BLOCK  # whose tokens are hardly of one block
    is_wide = is_hopper and has_scan(sizes)
    most = tokens_of_program(rows.longest, room)
    if is_hopper and is_half and rows.phase is not Phase.EXTEND and keeps and has_token(sizes, most):
        return [token_launch(qkv, a, b, weights, rows, state, out, sizes, most)]
    # In steps that decode, where no token was drafted before, each row is one block.
    has_others = not (is_half and rows.phase is Phase.DECODE and state.misses.shape[1] == BLOCK)
    queries, keys = (qkv.new_empty(num_tokens, key_heads, sizes.key_dim) for _ in range(2))
    values, added = (qkv.new_empty(num_tokens, value_heads, sizes.value_dim) for _ in range(2))
    decays, betas = (torch.empty(num_tokens, value_heads, dtype=torch.float32, device=qkv.device) for _ in range(2))
    apart = _APART if qkv.stride(0) % _APART == 0 else 1
    tokens = _TOKENS if keeps else _MANY_TOKENS
    tiles = {"BLOCK_K": block_k, "BLOCK": BLOCK, "CHUNK": CHUNK}
    found = [
        Launch(
            hallmark_recurrence_prepare,
            (triton.cdiv(num_tokens, tokens), 2 * key_heads + value_heads + 1),
            (
                qkv, a, b, weights.conv, weights.a_log, weights.dt_bias, rows.starts, rows.stops, rows.firsts,
                rows.sources, rows.targets, state.inputs, state.keys, state.decays, state.betas, queries, keys, values,
                decays, betas, out, num_tokens, num_rows, qkv.stride(0) // apart, a.stride(0), b.stride(0), *strides,
            ),
            {
                **heads, **rings, "VALUE_DIM": sizes.value_dim, "WIDTH": sizes.width, "INPUT_RING": input_ring,
                "KEEPS": keeps, "BLOCK_T": tokens, "BLOCK_R": _ROWS, "BLOCK_D": _padded(dims),
                "BLOCK_H": triton.next_power_of_2(value_heads), "APART": apart, **_EXACT,
            },
        ),
    ]  # fmt: skip
    if is_half and not is_alone:
        factors = _Factors.empty(num_rows, value_heads, BLOCK, qkv)
        blocks = (
            rows.starts, rows.stops, rows.firsts, rows.folded, rows.sources, state.keys, state.decays, state.betas,
            *strides[1:],
        )  # fmt: skip
        columns = min(_ROWS_COLUMNS, _padded(sizes.value_dim))
        found += [
            Launch(
                hallmark_recurrence_blocks,
                (num_rows, value_heads),
                (queries, keys, decays, betas, *factors, *blocks),
                {**heads, **rings, **tiles, "num_warps": 1, **_EXACT},
            ),
            Launch(
                hallmark_recurrence_rows,
                (num_rows, value_heads, triton.cdiv(sizes.value_dim, columns)),
                (
                    queries, keys, values, added, *factors, out, decays, rows.starts, rows.stops, rows.firsts,
                    rows.folded, rows.sources, rows.targets, rows.write_tokens, rows.write_slots, state.states,
                    state.keys, state.values, state.decays, state.betas, state.misses, num_writes, out.stride(0),
                    state.states.stride(0), state.keys.stride(0), state.values.stride(0), state.decays.stride(0),
                    state.betas.stride(0), state.misses.stride(0), sizes.key_dim**-0.5,
                ),
                {
                    **heads, **rings, **tiles, "VALUE_DIM": sizes.value_dim, "MISSES_RING": state.misses.shape[1],
                    "FOLDS_ALL": folding["FOLDS_ALL"], "BLOCK_V": columns, "num_warps": _ROWS_WARPS, **_EXACT,
                },
            ),
        ]  # fmt: skip
    if has_others:
        found += [
            Launch(
                hallmark_recurrence_chunks,
                (num_rows, value_heads, triton.cdiv(sizes.value_dim, block_v)),
                (
                    queries, keys, values, decays, betas, added, out, rows.starts, rows.stops, rows.firsts, rows.folded,
                    rows.sources, rows.targets, rows.write_tokens, rows.write_slots, state.states, state.keys,
                    state.values, state.decays, state.betas, state.misses, num_writes, out.stride(0),
                    state.states.stride(0), state.keys.stride(0), state.values.stride(0), state.decays.stride(0),
                    state.betas.stride(0), state.misses.stride(0), sizes.key_dim**-0.5,
                ),
                {
                    **heads, **rings, **folding, "VALUE_DIM": sizes.value_dim, "IS_HALF": is_half,
                    "MISSES_RING": state.misses.shape[1], "BLOCK_K": block_k, "BLOCK_V": block_v, "BLOCK": BLOCK,
                    "LEAST": least, "LEAVES_BLOCKS": is_half and not is_alone, "num_warps": 8, "num_stages": 1,
                    **_EXACT,
                },
            ),
        ]  # fmt: skip
    if is_scanned:
        num_chunks = num_tokens // CHUNK + min(num_rows, num_tokens // _LEAST)
        factors = _Factors.empty(num_chunks, value_heads, CHUNK, qkv)
        columns = min(_SCANNED_COLUMNS, _padded(sizes.value_dim))
        found += [
            Launch(
                hallmark_recurrence_factors,
                (num_chunks, key_heads),
                (
                    queries, keys, decays, betas, *factors,
                    torch.empty(num_chunks, value_heads, CHUNK, BLOCK, dtype=torch.float32, device=qkv.device),
                    rows.starts, rows.stops, rows.firsts, num_rows,
                ),
                {**heads, **tiles, "BLOCK_R": _ROWS, "LEAST": least, "IS_WIDE": is_wide, **_FACTORS, **_EXACT},
            ),
            scan_launch(queries, keys, values, factors, out, rows, state, sizes, least)
            if is_wide
            else Launch(
                hallmark_recurrence_scan,
                (num_rows, value_heads, triton.cdiv(sizes.value_dim, columns)),
                (
                    queries, keys, values, *factors, out, rows.starts, rows.stops, rows.firsts,
                    rows.folded, rows.sources, rows.targets, rows.write_tokens, rows.write_slots, state.states,
                    state.values, state.misses, num_rows, num_writes, out.stride(0), state.states.stride(0),
                    state.values.stride(0), state.misses.stride(0), sizes.key_dim**-0.5,
                ),
                {
                    **heads, **rings, **tiles, "VALUE_DIM": sizes.value_dim, "MISSES_RING": state.misses.shape[1],
                    "BLOCK_V": columns, "BLOCK_R": _ROWS, "LEAST": least, "STAGES": _STAGES,
                    "num_warps": _SCAN_WARPS, **_EXACT,
                },
            ),
        ]  # fmt: skip
    if not keeps:
        of_keep = (
            qkv, keys, decays, betas, rows.starts, rows.stops, rows.firsts, rows.sources, rows.targets,
            rows.write_tokens, rows.write_slots, state.inputs, state.keys, state.decays, state.betas, num_rows,
            qkv.stride(0), *strides,
        )  # fmt: skip
        options = {
            **heads, **rings, **folding, "CONV_DIM": sizes.conv_dim, "INPUT_RING": input_ring, "BLOCK_D": block_k,
            "BLOCK_H": triton.next_power_of_2(value_heads), "BLOCK_C": _CHANNELS,
        }  # fmt: skip
        parts = key_heads + triton.cdiv(sizes.conv_dim, _CHANNELS)
        found += keep_launches(hallmark_recurrence_keep, num_rows, num_writes, parts, of_keep, options)
    return found


def _padded(dims: int) -> int:
    return max(16, int(triton.next_power_of_2(dims)))
