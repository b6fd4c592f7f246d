"""Launches of the recurrence's kernels for sm_90: what they compute is that of the portable ones, to the bit."""

from typing import Any

from torch import Tensor
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from kernels.calls.triton_launch import Launch
from kernels.recurrence.calls import RecurrenceRows, RecurrenceState, RecurrenceWeights
from kernels.recurrence.hopper import scan
from kernels.recurrence.hopper.scan import hallmark_recurrence_scan_wide
from kernels.recurrence.hopper.token import hallmark_recurrence_token
from kernels.recurrence.sizes import RecurrenceSizes
from kernels.vocabulary.shape import Phase

_SIZE = 128  # numbers of a key, and of a value
_COLUMNS = 64  # of a value head, of a program that scans
_WARPS = 4
# Of a program of few tokens: columns of a value head, warps, registers; halves where heads leave half of an H200 idle.
_HALF_HEAD, _WHOLE_HEAD = (64, 4, 168), (128, 8, 128)
_MULTIPROCESSORS = 132
_FEW_TOKENS, _MOST_TOKENS = 2, 8  # of a row: up to which there are programs for each number of them, and for any
_APART = 8  # numbers of 16 bits that are read together
_EXACT = {"enable_fp_fusion": False}  # a product and a sum in one rounding or two, as each kernel would choose


def has_scan(sizes: RecurrenceSizes) -> bool:
    """Return whether there is a scan for these sizes."""
    return sizes.key_dim == _SIZE and sizes.value_dim % _COLUMNS == 0


def tokens_of_program(longest: int, room: int) -> int:
    """Return for how many tokens of a row its programs are, of those of the longest row and the most of any call."""
    return longest if longest <= _FEW_TOKENS else room


def has_token(sizes: RecurrenceSizes, num_tokens: int) -> bool:
    """Return whether there are programs for so many tokens of a row of these sizes."""
    return sizes.key_dim == _SIZE and sizes.value_dim == _SIZE and num_tokens <= _MOST_TOKENS


def scan_launch(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    factors: tuple[Tensor, Tensor, Tensor, Tensor],
    out: Tensor,
    rows: RecurrenceRows,
    state: RecurrenceState,
    sizes: RecurrenceSizes,
    least: int,
) -> Launch:
    """Return the launch for rows of `least` tokens from their first border on. Tensors as of the portable scan."""
    of_keys, of_queries, inverses, gates = factors
    tiles = (*map(_tiles, (keys, queries, values, of_keys, of_queries)), _tiles(inverses, 32))
    return Launch(
        hallmark_recurrence_scan_wide,
        (sizes.value_dim // _COLUMNS, sizes.num_value_heads, rows.starts.shape[0]),
        (
            *tiles, gates, out, rows.starts, rows.stops, rows.firsts, rows.folded, rows.sources, rows.targets,
            rows.write_tokens, rows.write_slots, state.states, state.values, state.misses, rows.write_tokens.shape[0],
            out.stride(0), state.states.stride(0), state.values.stride(0), state.misses.stride(0), sizes.key_dim**-0.5,
        ),
        {
            "KEY_HEADS": sizes.num_key_heads, "VALUE_HEADS": sizes.num_value_heads, "VALUE_DIM": sizes.value_dim,
            "RING_SIZE": state.keys.shape[1], "MISSES_RING": state.misses.shape[1], "LEAST": least,
            "num_warps": _WARPS, **_EXACT,
        },
    )  # fmt: skip


def token_launch(
    qkv: Tensor,
    a: Tensor,
    b: Tensor,
    weights: RecurrenceWeights,
    rows: RecurrenceRows,
    state: RecurrenceState,
    out: Tensor,
    sizes: RecurrenceSizes,
    most: int,
) -> Launch:
    """Return the launch of programs for `most` tokens of a row; nothing else is written."""
    num_tokens, num_rows = qkv.shape[0], rows.starts.shape[0]
    apart = _APART if qkv.stride(0) % _APART == 0 else 1
    is_few = 2 * sizes.num_value_heads * num_rows <= _MULTIPROCESSORS
    columns, warps, registers = _HALF_HEAD if is_few else _WHOLE_HEAD
    return Launch(
        hallmark_recurrence_token,
        (sizes.num_value_heads * (_SIZE // columns) + -(-num_tokens // num_rows), num_rows),
        (
            qkv, a, b, weights.conv, weights.a_log, weights.dt_bias, out, rows.starts, rows.stops, rows.firsts,
            rows.folded, rows.sources, rows.targets, *state.tensors, num_tokens, num_rows, qkv.stride(0) // apart,
            a.stride(0), b.stride(0), out.stride(0), *(it.stride(0) for it in state.tensors), sizes.key_dim**-0.5,
        ),
        {
            "KEY_HEADS": sizes.num_key_heads, "VALUE_HEADS": sizes.num_value_heads, "WIDTH": sizes.width,
            "INPUT_RING": state.inputs.shape[1], "RING": state.keys.shape[1], "MISSES_RING": state.misses.shape[1],
            "FOLDS_ALL": rows.phase is not Phase.VERIFY, "MOST": most, "APART": apart, "OWN": columns, "WARPS": warps,
            "num_warps": warps, "maxnreg": registers, **_EXACT,
        },
    )  # fmt: skip


def _tiles(tensor: Tensor, columns: int = _COLUMNS) -> Any:
    """A tensor's rows of [..., heads, numbers] or, of [units, heads, 64, 64], of numbers, by boxes of 64."""
    flat = tensor.flatten(0, 2) if tensor.ndim == 4 else tensor.flatten(1)
    layout = scan.TILE if columns == _COLUMNS else scan.HALF_TILE
    return TensorDescriptor.from_tensor(flat, [64, columns], layout.value)
