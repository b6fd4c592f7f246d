"""Attention by PyTorch's scaled_dot_product_attention with a pinned backend: the fallbacks, and the CPU's path.

Every path walks the batch sequence by sequence (a CPU's decode takes sequences together), gathers a paged sequence's
keys first, and waits for the device to learn the lengths. A pinned backend that cannot run raises: torch never chooses
its quadratic math backend in silence. Memory is linear in the context: where a mask must be written out, it is written
for a chunk of query rows at a time.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from kernels.calls.batch import AttentionBatch, AttentionFlags
from kernels.calls.rows import SequenceRows, keys_of, sequences_of, visible
from kernels.sdpa.cpu_decode import is_decode, run_decode

_MAX_SCORES = 2**22  # a head, of one chunk of query rows: its mask, or its scores in sdpa.math


@dataclass(frozen=True, slots=True)
class _Backend:
    """Arguments and limits of SDPA for one pinned backend."""

    pinned: SDPBackend
    has_gqa: bool  # takes fewer key heads than query heads
    is_causal_square_only: bool  # its own causal mask starts at the first key: right for as many queries as keys only
    is_always_masked: bool = False  # its own causal mask makes a square of scores


_CUDNN = _Backend(SDPBackend.CUDNN_ATTENTION, has_gqa=True, is_causal_square_only=True)
_FLASH = _Backend(SDPBackend.FLASH_ATTENTION, has_gqa=True, is_causal_square_only=False)
_EFFICIENT = _Backend(SDPBackend.EFFICIENT_ATTENTION, has_gqa=False, is_causal_square_only=False)
_MATH = _Backend(SDPBackend.MATH, has_gqa=False, is_causal_square_only=True, is_always_masked=True)
_CPU = _Backend(SDPBackend.FLASH_ATTENTION, has_gqa=True, is_causal_square_only=True)


def run_cudnn(q: Tensor, k: Tensor, v: Tensor, batch: AttentionBatch, flags: AttentionFlags, out: Tensor) -> None:
    """`sdpa.cudnn`: causal, full and decode."""
    _run(_CUDNN, q, k, v, batch, flags, out)


def run_flash(q: Tensor, k: Tensor, v: Tensor, batch: AttentionBatch, flags: AttentionFlags, out: Tensor) -> None:
    """`sdpa.flash`: FlashAttention 2 as PyTorch bundles it; takes no mask but the causal one."""
    _run(_FLASH, q, k, v, batch, flags, out)


def run_efficient(q: Tensor, k: Tensor, v: Tensor, batch: AttentionBatch, flags: AttentionFlags, out: Tensor) -> None:
    """`sdpa.efficient`: takes windows and spans as explicit masks; keys are repeated for every query head."""
    _run(_EFFICIENT, q, k, v, batch, flags, out)


def run_math(q: Tensor, k: Tensor, v: Tensor, batch: AttentionBatch, flags: AttentionFlags, out: Tensor) -> None:
    """`sdpa.math`: every flag. SDPA has no word for a softcap or sinks: with them it is matmul and softmax in fp32."""
    _run(_MATH, q, k, v, batch, flags, out)


def run_cpu(q: Tensor, k: Tensor, v: Tensor, batch: AttentionBatch, flags: AttentionFlags, out: Tensor) -> None:
    """`sdpa.cpu`: PyTorch's flash attention for CPUs, which takes any mask."""
    if is_decode(batch, flags):
        run_decode(q, k, v, batch, flags, out)
        return
    _run(_CPU, q, k, v, batch, flags, out)


def _run(
    backend: _Backend,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    batch: AttentionBatch,
    flags: AttentionFlags,
    out: Tensor,
) -> None:
    with sdpa_kernel(backend.pinned):
        for sequence in sequences_of(batch):
            rows = slice(sequence.start, sequence.end)
            if sequence.num_queries == 0:
                continue
            if sequence.num_keys == 0:
                out[rows] = 0
                continue
            keys, values = keys_of(k, batch, sequence), keys_of(v, batch, sequence)
            if flags.softcap is None and flags.sinks is None and flags.spans is None and sequence.num_queries == 1:
                out[rows] = _attend_one(q[rows], keys, values, flags)
            elif _needs_mask(backend, sequence, flags):
                _attend_chunks(backend, q[rows], keys, values, sequence, flags, out[rows])
            else:
                _attend_whole(backend, q[rows], keys, values, flags, out[rows])


def _needs_mask(backend: _Backend, sequence: SequenceRows, flags: AttentionFlags) -> bool:
    """Return whether the mask must be written out because the backend's own causal one (or none) would not do."""
    if backend.is_always_masked or flags.window is not None or flags.spans is not None:
        return True
    return flags.causal and backend.is_causal_square_only and sequence.num_queries < sequence.num_keys


def _attend_one(q: Tensor, keys: Tensor, values: Tensor, flags: AttentionFlags) -> Tensor:
    """The last position's attention: the query heads of a KV head are the rows of one maskless matrix.

    q [1, heads, head_dim]; keys, values [num_keys, kv_heads, head_dim]. Returns q's shape.
    """
    if flags.causal and flags.window is not None:
        keys, values = keys[-flags.window :], values[-flags.window :]
    num_heads, head_dim = q.shape[1:]
    num_kv_heads = keys.shape[1]
    if keys.shape[0] == 1:
        return _repeat_heads(values, num_heads)
    rows = q.reshape(1, num_kv_heads, num_heads // num_kv_heads, head_dim)
    attended = scaled_dot_product_attention(rows, _heads_first(keys), _heads_first(values), scale=flags.scale)
    return attended.reshape(1, num_heads, head_dim)


def _attend_whole(
    backend: _Backend, q: Tensor, keys: Tensor, values: Tensor, flags: AttentionFlags, out: Tensor
) -> None:
    """One call with the backend's own causal mask (or none), aligned at the last query and the last key."""
    num_blind = max(0, q.shape[0] - keys.shape[0]) if flags.causal else 0  # queries before the first key
    out[:num_blind] = 0
    q = q[num_blind:]
    if keys.shape[0] == 1:
        out[num_blind:] = _repeat_heads(values, q.shape[1])
        return
    if not backend.has_gqa:
        keys, values = _repeat_heads(keys, q.shape[1]), _repeat_heads(values, q.shape[1])
    is_square = q.shape[0] == keys.shape[0]
    attended = scaled_dot_product_attention(
        _heads_first(q),
        _heads_first(keys),
        _heads_first(values),
        attn_mask=_lower_right(q.shape[0], keys.shape[0]) if flags.causal and not is_square else None,
        is_causal=flags.causal and is_square,
        scale=flags.scale,
        enable_gqa=q.shape[1] != keys.shape[1],
    )
    out[num_blind:] = attended[0].transpose(0, 1)


def _lower_right(num_queries: int, num_keys: int) -> Tensor:
    from torch.nn.attention.bias import causal_lower_right  # brings all of torch._dynamo: 1.3 s of a server's start

    return causal_lower_right(num_queries, num_keys)


def _attend_chunks(
    backend: _Backend,
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    sequence: SequenceRows,
    flags: AttentionFlags,
    out: Tensor,
) -> None:
    """The same under a written-out mask, in chunks of query rows, each over only the keys that its rows can see."""
    if not backend.has_gqa:
        keys, values = _repeat_heads(keys, q.shape[1]), _repeat_heads(values, q.shape[1])
    keys, values = _heads_first(keys), _heads_first(values)
    size = max(1, min(_MAX_SCORES // sequence.num_keys, 256))
    for first in range(0, sequence.num_queries, size):
        last = min(first + size, sequence.num_queries)
        position = sequence.position(sequence.start + first)
        lo, hi = _key_range(position, last - first, sequence.num_keys, flags)
        positions = position + torch.arange(last - first, device=q.device)
        spans = None if flags.spans is None else flags.spans[sequence.start + first : sequence.start + last]
        seen = visible(positions, torch.arange(lo, hi, device=q.device), flags, spans)
        rows, rows_k, rows_v = _heads_first(q[first:last]), keys[:, :, lo:hi], values[:, :, lo:hi]
        if flags.softcap is not None or flags.sinks is not None:
            attended = _softmax_attention(rows, rows_k, rows_v, seen, flags)
        else:
            attended = scaled_dot_product_attention(
                rows, rows_k, rows_v, attn_mask=seen, scale=flags.scale, enable_gqa=rows.shape[1] != rows_k.shape[1]
            )
        is_blind = ~seen.any(dim=-1)
        out[first:last] = attended[0].transpose(0, 1).masked_fill(is_blind[:, None, None], 0)


def _key_range(position: int, num_queries: int, num_keys: int, flags: AttentionFlags) -> tuple[int, int]:
    """The keys [lo, hi) that queries from `position` on can see, at least one of them so that no tensor is empty."""
    if not flags.causal or flags.spans is not None:
        return 0, num_keys
    hi = min(num_keys, max(1, position + num_queries))
    lo = 0 if flags.window is None else min(hi - 1, max(0, position - flags.window + 1))
    return lo, hi


def _softmax_attention(q: Tensor, keys: Tensor, values: Tensor, seen: Tensor, flags: AttentionFlags) -> Tensor:
    """Matmul, softcap, mask, softmax with sinks, matmul, in fp32: [1, heads, rows, head_dim] in q's dtype."""
    scores = (q.float() * flags.scale) @ keys.float().transpose(-1, -2)
    if flags.softcap is not None:
        scores = flags.softcap * torch.tanh(scores / flags.softcap)
    scores.masked_fill_(~seen, float("-inf"))
    largest = scores.amax(dim=-1, keepdim=True)
    if flags.sinks is not None:
        sinks = flags.sinks.float()[None, :, None, None]
        largest = torch.maximum(largest, sinks)
    weights = torch.exp(scores - largest)
    denominator = weights.sum(dim=-1, keepdim=True)
    if flags.sinks is not None:
        denominator = denominator + torch.exp(sinks - largest)
    return ((weights @ values.float()) / denominator).to(q.dtype)


def _heads_first(x: Tensor) -> Tensor:
    """[tokens, heads, head_dim] -> [1, heads, tokens, head_dim], the layout of SDPA; a view."""
    return x.transpose(0, 1)[None]


def _repeat_heads(x: Tensor, num_heads: int) -> Tensor:
    """[keys, kv_heads, head_dim] -> [keys, num_heads, head_dim], each KV head repeated for its group of query heads.

    Of values this is the attention to a single key, whose weight is 1 (cuDNN takes no single key).
    """
    return x.repeat_interleave(num_heads // x.shape[1], dim=1)
