"""Decode on a CPU: sequences of about the same length are attended to in one call of PyTorch's flash attention.

A call for each sequence takes 70 us of a layer for 100 keys, most of it before anything is computed (one core, fp32).
The rows to gather are computed once a step and cached by the contents of the page table, so that all layers share them.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kernels.calls.batch import AttentionBatch, AttentionFlags

_MAX_PADDING = 256  # keys of padding in a group: they take about as long as another call
_MAX_KEYS = 2**13  # keys of a group, padding included: bounds the copy of keys, but for one longer sequence


@dataclass(frozen=True, slots=True)
class _Span:
    """The pages that hold the visible keys [start, stop) of one sequence."""

    row: int  # of q
    pages: NDArray[np.int64]
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class _Group:
    """Spans of one call, each padded with its own first page to the number of pages of the longest.

    rows     [spans] int64, rows of q; None where they are all rows in order
    pages    [spans * pages] int64
    keys     the slice of each padded span that holds every visible key
    foreign  [n] int64 or None: indices among all gathered keys that lie in `keys` and belong to no key of the sequence
    mask     [spans, 1, 1, keys] fp32 or None: -inf where the query does not see the key
    """

    rows: Tensor | None
    num_spans: int
    pages: Tensor
    keys: slice
    foreign: Tensor | None
    mask: Tensor | None


def is_decode(batch: AttentionBatch, flags: AttentionFlags) -> bool:
    """Return whether `run_decode` can compute the batch."""
    is_plain = flags.softcap is None and flags.sinks is None and flags.spans is None
    return is_plain and batch.max_seqlen_q <= 1 and batch.is_paged


def run_decode(q: Tensor, k: Tensor, v: Tensor, batch: AttentionBatch, flags: AttentionFlags, out: Tensor) -> None:
    """Attend to pages in a CPU's memory, with at most one query a sequence; arguments as of `RunAttention`."""
    page_size, window = k.shape[1], flags.window if flags.causal else None
    empty_rows, groups = _groups(*_contents(batch), page_size, window)
    if empty_rows is not None:
        out.index_fill_(0, empty_rows, 0)
    for group in groups:
        _attend(q, _gather(k, group), _gather(v, group), group.rows, group.mask, flags.scale, out)


def _attend(
    q: Tensor, keys: Tensor, values: Tensor, rows: Tensor | None, mask: Tensor | None, scale: float, out: Tensor
) -> None:
    """Attend from `rows` of q (None: all) to keys and values [rows, keys, kv_heads, head_dim]; writes into `out`."""
    num_kv_heads, head_dim = keys.shape[2:]
    queries = q.view(q.shape[0], num_kv_heads, -1, head_dim)  # query heads of a KV head are the rows of one matrix
    attended = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default(
        queries if rows is None else queries.index_select(0, rows),
        keys.transpose(1, 2),
        values.transpose(1, 2),
        attn_mask=None if mask is None else mask.to(q.dtype),
        scale=scale,
    )[0]
    if rows is None:
        out.view(queries.shape).copy_(attended)
    else:
        out.index_copy_(0, rows, attended.reshape(keys.shape[0], -1, head_dim))


def _gather(pool: Tensor, group: _Group) -> Tensor:
    """Return keys (or values) of a group, [spans, keys, kv_heads, head_dim], zeros where they are not its own."""
    pages = pool.index_select(0, group.pages)
    if group.foreign is not None:
        pages.view(-1, pool.shape[2] * pool.shape[3]).index_fill_(0, group.foreign, 0)
    return pages.view(group.num_spans, -1, *pool.shape[2:])[:, group.keys]


def _contents(batch: AttentionBatch) -> tuple[bytes, bytes, bytes]:
    """Return the bytes of cu_seqlens_q, context_lens and the page table."""
    assert batch.page_table is not None, "decode reads pages"
    assert batch.context_lens is not None, "pages come with lengths"
    found = [it.numpy().tobytes() for it in (batch.cu_seqlens_q, batch.context_lens, batch.page_table)]
    return found[0], found[1], found[2]


@lru_cache(maxsize=4)  # a step's layers ask one after another, with as many windows as the model has
def _groups(
    cu_seqlens_q: bytes, context_lens: bytes, page_table: bytes, page_size: int, window: int | None
) -> tuple[Tensor | None, tuple[_Group, ...]]:
    """Return the rows of queries without any key, or None, and the groups of all other rows."""
    edges, lengths = np.frombuffer(cu_seqlens_q, np.int32), np.frombuffer(context_lens, np.int32)
    table = np.frombuffer(page_table, np.int32).reshape(len(lengths), -1)
    spans, empty_rows = [], []
    for index, length in enumerate(lengths.tolist()):
        row = int(edges[index])
        if edges[index + 1] == row:
            continue
        if length == 0:
            empty_rows.append(row)
            continue
        first_page = 0 if window is None else max(0, length - window) // page_size
        start = 0 if window is None else max(0, length - window) - first_page * page_size
        pages = table[index, first_page : -(-length // page_size)].astype(np.int64)
        spans.append(_Span(row, pages, start, length - first_page * page_size))
    every = list(range(int(edges[-1])))
    groups = []
    for members in _of_similar_length(spans, page_size):
        rows = [span.row for span in members]
        groups.append(_group(members, None if rows == every else torch.tensor(rows), page_size))
    return torch.tensor(empty_rows) if empty_rows else None, tuple(groups)


def _of_similar_length(spans: list[_Span], page_size: int) -> Iterator[list[_Span]]:
    """Yield groups of spans of about the same number of pages, longest first, each in the order of its rows."""
    members: list[_Span] = []
    padding = 0
    for span in sorted(spans, key=lambda it: -len(it.pages)):
        longest = len(members[0].pages) if members else 0
        padding += (longest - len(span.pages)) * page_size if members else 0
        if members and (padding > _MAX_PADDING or (len(members) + 1) * longest * page_size > _MAX_KEYS):
            yield sorted(members, key=lambda it: it.row)
            members, padding = [], 0
        members.append(span)
    if members:
        yield sorted(members, key=lambda it: it.row)


def _group(spans: list[_Span], rows: Tensor | None, page_size: int) -> _Group:
    num_pages = max(len(span.pages) for span in spans)
    keys = slice(min(span.start for span in spans), max(span.stop for span in spans))
    pages = np.empty((len(spans), num_pages), np.int64)
    is_foreign = np.zeros((len(spans), num_pages * page_size), bool)
    is_hidden = np.zeros_like(is_foreign)
    for index, span in enumerate(spans):
        num_own = len(span.pages)
        pages[index, :num_own], pages[index, num_own:] = span.pages, span.pages[0]
        is_hidden[index, : span.start] = is_hidden[index, span.stop :] = True
        # Padding repeats the first page, which is full unless it is the only one.
        is_foreign[index, span.stop : num_own * page_size if num_own > 1 else None] = True
    is_foreign[:, keys.stop :] = False
    is_hidden = is_hidden[:, keys]
    mask = np.where(is_hidden, np.float32(-np.inf), np.float32(0))[:, None, None]
    return _Group(
        rows=rows,
        num_spans=len(spans),
        pages=torch.from_numpy(pages.reshape(-1)),
        keys=keys,
        foreign=torch.from_numpy(is_foreign.reshape(-1).nonzero()[0]) if is_foreign.any() else None,
        mask=torch.from_numpy(mask) if is_hidden.any() else None,
    )
