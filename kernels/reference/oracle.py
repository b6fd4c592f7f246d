"""The truth that every attention kernel is measured against: softmax over explicit scores, in fp64 or fp32.

It is computed in chunks of query rows: memory grows with the keys, never with queries x keys.
"""

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.calls.batch import AttentionBatch, AttentionFlags
from kernels.calls.indexed import IndexedFlags
from kernels.calls.rows import SequenceRows, keys_of, sequences_of, visible
from kernels.reference.choice import chosen_mask

# Bytes of one chunk's scores. On a CPU what fits its caches; on a GPU limits take some ten tensors of this size. Of 8k
# queries over 128k keys of 32:8 heads a chunk of 4 rows takes a GPU 5.1 ms in fp32, and one of 32 rows 7.1 (H200).
_CHUNK_BYTES = {"cpu": 2**22, "cuda": 2**29}


@dataclass(frozen=True, slots=True)
class Chunk:
    """Scores and weights of some query rows of one sequence. The query heads of a KV head are rows of one matrix.

    part       places of these rows among the chosen rows
    rows       [r] int64, rows of q
    queries    [kv_heads, group * r, head_dim], times the scale
    keys       [kv_heads, keys, head_dim]
    values     [kv_heads, keys, value_dim]
    products   [kv_heads, group * r, keys]: queries times keys, before softcap and mask
    scores     the same after softcap and mask, -inf where a key is not seen
    weights    the same after softmax, 0 where a key is not seen
    seen       [r, keys] bool
    sinks      [kv_heads, group * r, 1] fp64 or fp32 logits, None without sinks
    sink_weights   their weights; None without
    """

    part: slice
    rows: Tensor
    queries: Tensor
    keys: Tensor
    values: Tensor
    products: Tensor
    scores: Tensor
    weights: Tensor
    seen: Tensor
    sinks: Tensor | None
    sink_weights: Tensor | None

    def by_row(self, grouped: Tensor) -> Tensor:
        """[kv_heads, group * r, n] -> [r, heads, n]."""
        num_rows = self.rows.numel()
        return grouped.view(-1, num_rows, grouped.shape[-1]).transpose(0, 1)


def attention_oracle(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    batch: AttentionBatch,
    flags: AttentionFlags,
    *,
    rows: Tensor | None = None,
    dtype: torch.dtype = torch.float64,
) -> Tensor:
    """Attention of the chosen query rows, computed throughout in `dtype`.

    q      [tokens, heads, head_dim]
    k, v   [tokens, kv_heads, head_dim] packed, or pages [num_pages, page_size, kv_heads, head_dim]
    rows   [n] int64, ascending indices into q's rows; None for all
    Values may have another size than keys; behind a key's numbers may lie an indexer's. Of `IndexedFlags` a query sees
    the chosen keys alone. Returns [n, heads, size of a value] (n = tokens without `rows`) in `dtype`.
    A query that sees no key gives 0.
    """
    num_rows = q.shape[0] if rows is None else rows.numel()
    out = torch.zeros(num_rows, q.shape[1], v.shape[-1], dtype=dtype, device=q.device)
    for chunk in chunks(q, k, v, batch, flags, rows=rows, dtype=dtype):
        out[chunk.part] = chunk.by_row(chunk.weights @ chunk.values)
    return out


def chunks(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    batch: AttentionBatch,
    flags: AttentionFlags,
    *,
    rows: Tensor | None,
    dtype: torch.dtype,
) -> Iterator[Chunk]:
    """Every chosen query row that belongs to a sequence with keys, as `attention_oracle` has them."""
    if rows is None:
        rows = torch.arange(q.shape[0], device=q.device)
    row_list = rows.tolist()
    for sequence in sequences_of(batch):
        lo, hi = bisect_left(row_list, sequence.start), bisect_left(row_list, sequence.end)
        if lo == hi or sequence.num_keys == 0:
            continue
        keys = keys_of(k[..., : q.shape[2]], batch, sequence).to(dtype).transpose(0, 1)
        values = keys_of(v, batch, sequence).to(dtype).transpose(0, 1)
        row_bytes = q.shape[1] * sequence.num_keys * keys.element_size()
        size = max(1, _CHUNK_BYTES[q.device.type] // row_bytes)
        for first in range(lo, hi, size):
            part = slice(first, min(first + size, hi))
            yield _chunk(q, keys, values, part, rows[part], sequence, flags)


def _chunk(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    part: slice,
    rows: Tensor,
    sequence: SequenceRows,
    flags: AttentionFlags,
) -> Chunk:
    """`rows` lie in `sequence`; keys and values [kv_heads, keys, head_dim]."""
    num_heads, head_dim = q.shape[1:]
    positions = rows - sequence.end + sequence.num_keys
    spans = None if flags.spans is None else flags.spans[rows]
    lo, hi = _key_range(positions, sequence.num_keys, flags)
    keys, values = keys[:, lo:hi], values[:, lo:hi]
    num_kv_heads, num_keys, _ = keys.shape
    queries = q[rows].to(keys.dtype) * flags.scale
    queries = queries.view(-1, num_kv_heads, num_heads // num_kv_heads, head_dim).permute(1, 2, 0, 3).flatten(1, 2)
    products = queries @ keys.transpose(1, 2)
    scores = products
    if flags.softcap is not None:
        scores = flags.softcap * torch.tanh(products / flags.softcap)
    seen = visible(positions, torch.arange(lo, hi, device=q.device), flags, spans)
    if isinstance(flags, IndexedFlags):
        seen &= chosen_mask(flags.index.chosen[rows], sequence.num_keys)[:, lo:hi]
    by_head = scores.view(num_heads, -1, num_keys).masked_fill(~seen, float("-inf"))
    sinks = None
    if flags.sinks is not None:
        sinks = flags.sinks.to(scores.dtype)[:, None, None].expand(-1, rows.numel(), 1)
        by_head = torch.cat([by_head, sinks], dim=-1)
    weights = by_head.softmax(dim=-1).nan_to_num_(0.0)  # a row that sees nothing is NaN before
    grouped = (num_kv_heads, -1, num_keys)
    return Chunk(
        part=part,
        rows=rows,
        queries=queries,
        keys=keys,
        values=values,
        products=products,
        scores=by_head[..., :num_keys].reshape(grouped),
        weights=weights[..., :num_keys].reshape(grouped),
        seen=seen,
        sinks=None if sinks is None else sinks.reshape(num_kv_heads, -1, 1),
        sink_weights=None if sinks is None else weights[..., num_keys:].reshape(num_kv_heads, -1, 1),
    )


def _key_range(positions: Tensor, num_keys: int, flags: AttentionFlags) -> tuple[int, int]:
    """Keys [lo, hi) outside of which no query at these ascending positions sees any; at least one key."""
    if not flags.causal or flags.spans is not None:
        return 0, num_keys
    hi = min(num_keys, max(1, int(positions[-1]) + 1))
    lo = 0 if flags.window is None else min(hi - 1, max(0, int(positions[0]) - flags.window + 1))
    return lo, hi
