"""The truth every attention kernel is measured against, and the naive attention its error is measured by.

Softmax over explicit scores, in chunks of query rows: memory grows with the keys, never with queries x keys.
"""

from bisect import bisect_left

import torch
from torch import Tensor

from kernels.attention.batch import AttentionBatch, AttentionFlags
from kernels.attention.sequences import SequenceRows, keys_of, sequences_of, visible

# Of one chunk: 128 MiB and 1 GiB in fp64. Of 8k queries over 128k keys of 32:8 heads a chunk of 4 rows takes a GPU
# 5.1 ms in fp32, and one of 32 rows 7.1 (H200).
_MAX_SCORES = {"cpu": 2**24, "cuda": 2**27}


def attention_oracle(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    batch: AttentionBatch,
    flags: AttentionFlags,
    *,
    rows: Tensor | None = None,
    dtype: torch.dtype = torch.float64,
    is_naive: bool = False,
) -> Tensor:
    """Attention of the chosen query rows, computed throughout in `dtype`.

    q      [tokens, heads, head_dim]
    k, v   [tokens, kv_heads, head_dim] packed, or pages [num_pages, page_size, kv_heads, head_dim]
    rows   [n] int64, ascending indices into q's rows; None for all
    is_naive   whether each head's products are made by themselves
    Returns [n, heads, head_dim] (n = tokens without `rows`) in `dtype`. A query that sees no key gives 0.
    """
    if rows is None:
        rows = torch.arange(q.shape[0], device=q.device)
    out = torch.zeros(rows.numel(), *q.shape[1:], dtype=dtype, device=q.device)
    row_list = rows.tolist()
    for sequence in sequences_of(batch):
        lo, hi = bisect_left(row_list, sequence.start), bisect_left(row_list, sequence.end)
        if lo == hi or sequence.num_keys == 0:
            continue
        keys = keys_of(k, batch, sequence).to(dtype)
        values = keys_of(v, batch, sequence).to(dtype)
        size = max(1, _MAX_SCORES[q.device.type] // (q.shape[1] * sequence.num_keys))
        for first in range(lo, hi, size):
            part = slice(first, min(first + size, hi))
            out[part] = _attend_rows(q, keys, values, rows[part], sequence, flags, is_naive)
    return out


def attention_naive(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    batch: AttentionBatch,
    flags: AttentionFlags,
    *,
    rows: Tensor | None = None,
) -> Tensor:
    """The same as `attention_oracle`, every step rounded to q's dtype: the error anybody would accept."""
    return attention_oracle(q, k, v, batch, flags, rows=rows, dtype=q.dtype, is_naive=True)


def _attend_rows(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    rows: Tensor,
    sequence: SequenceRows,
    flags: AttentionFlags,
    is_naive: bool,
) -> Tensor:
    """Attention of query rows of one sequence: [rows, heads, head_dim] in the dtype of keys and values."""
    num_heads, head_dim = q.shape[1:]
    num_keys, num_kv_heads, _ = keys.shape
    # The scale goes into q first, so that fp16 scores do not overflow before it.
    queries = q[rows].to(keys.dtype) * flags.scale
    grouped = queries.view(-1, num_kv_heads, num_heads // num_kv_heads, head_dim).permute(1, 2, 0, 3)
    scores = _product(grouped, keys.permute(1, 2, 0), is_naive)  # [heads, rows, keys]
    if flags.softcap is not None:
        scores = flags.softcap * torch.tanh(scores / flags.softcap)
    positions = rows - sequence.end + num_keys
    spans = None if flags.spans is None else flags.spans[rows]
    seen = visible(positions, torch.arange(num_keys, device=q.device), flags, spans)
    scores.masked_fill_(~seen, float("-inf"))
    if flags.sinks is not None:
        sinks = flags.sinks.to(scores.dtype)[:, None, None].expand(-1, rows.numel(), 1)
        scores = torch.cat([scores, sinks], dim=-1)
    weights = scores.softmax(dim=-1)[..., :num_keys].masked_fill_(~seen, 0.0)  # a row that sees nothing is NaN before
    grouped_weights = weights.view(num_kv_heads, -1, rows.numel(), num_keys)
    return _product(grouped_weights, values.permute(1, 0, 2), is_naive).transpose(0, 1)


def _product(grouped: Tensor, shared: Tensor, is_naive: bool) -> Tensor:
    """[kv_heads, group, rows, n] @ [kv_heads, n, m]: [heads, rows, m].

    The heads of a group are rows of one product. A product each copies what they share for every one of them, in each
    chunk: 0.8 of the time and 2.6 times the memory for 192 rows over 128k keys of 32:8 heads (H200). Naive attention
    keeps that: limits rest on what it errs, and in fp32 on a CPU the two round otherwise.
    """
    if is_naive:
        return (grouped @ shared[:, None]).flatten(0, 1)
    return (grouped.flatten(1, 2) @ shared).view(-1, grouped.shape[2], shared.shape[2])
