"""One query a sequence on a CPU: sequences of a batch that are about as long are attended to in one call.

A call for each sequence takes 70 us of a layer for 100 keys, most of it before anything is computed (one core, fp32).
What to gather is worked out once a step and kept under the contents of the page table, so that its layers share it.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kernels.attention.batch import AttentionBatch, AttentionFlags

_MAX_PADDING = 256  # keys of padding in a group: they take about as long as another call
_MAX_KEYS = 2**13  # of a group, padding included: bounds what is copied at once, but for a sequence that is longer

_Integers = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class _Span:
    """The pages of one sequence that its query sees something of: key `start` of them up to key `stop`."""

    row: int  # of q
    pages: _Integers
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class _Group:
    """Spans that are attended to together, each padded to as many pages as the longest has by its own first page.

    rows     [spans] int64, rows of q; None where they are all rows in order
    pages    [spans * pages] int64
    keys     the part of each padded span that any of them needs
    foreign  [n] int64 or None: places among all gathered keys that are in `keys` and not the sequence's own
    mask     [spans, 1, 1, keys] fp32 or None: -inf where the query does not see the key
    """

    rows: Tensor | None
    num_spans: int
    pages: Tensor
    keys: slice
    foreign: Tensor | None
    mask: Tensor | None


def is_decode(batch: AttentionBatch, flags: AttentionFlags) -> bool:
    """Whether `run_decode` computes this."""
    is_plain = flags.softcap is None and flags.sinks is None and flags.spans is None
    return is_plain and batch.max_seqlen_q <= 1 and batch.is_paged


def run_decode(q: Tensor, k: Tensor, v: Tensor, batch: AttentionBatch, flags: AttentionFlags, out: Tensor) -> None:
    """As the paths of `sdpa.py`, for pages in a CPU's memory and at most one query a sequence."""
    assert batch.page_table is not None, "decode reads pages"
    assert batch.context_lens is not None, "pages come with lengths"
    contents = (it.numpy().tobytes() for it in (batch.cu_seqlens_q, batch.context_lens, batch.page_table))
    empty_rows, groups = _plan(*contents, k.shape[1], flags.window if flags.causal else None)
    if empty_rows is not None:
        out.index_fill_(0, empty_rows, 0)
    num_kv_heads, head_dim = k.shape[2:]
    rows = q.view(q.shape[0], num_kv_heads, -1, head_dim)  # the query heads of a KV head are the rows of one matrix
    for group in groups:
        attended = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default(
            rows if group.rows is None else rows.index_select(0, group.rows),
            _gather(k, group),
            _gather(v, group),
            attn_mask=None if group.mask is None else group.mask.to(q.dtype),
            scale=flags.scale,
        )[0]
        if group.rows is None:
            out.view(rows.shape).copy_(attended)
        else:
            out.index_copy_(0, group.rows, attended.reshape(group.num_spans, -1, head_dim))


def _gather(pool: Tensor, group: _Group) -> Tensor:
    """Keys (or values) of a group, [spans, kv_heads, keys, head_dim]. No number of anybody else is among them."""
    pages = pool.index_select(0, group.pages)
    if group.foreign is not None:
        pages.view(-1, pool.shape[2] * pool.shape[3]).index_fill_(0, group.foreign, 0)
    return pages.view(group.num_spans, -1, *pool.shape[2:])[:, group.keys].transpose(1, 2)


@lru_cache(maxsize=4)  # a step's layers ask one after another, with as many windows as the model has
def _plan(
    cu_seqlens_q: bytes, context_lens: bytes, page_table: bytes, page_size: int, window: int | None
) -> tuple[Tensor | None, tuple[_Group, ...]]:
    """Rows of queries without any key, or None, and the groups of all others."""
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
    num_rows = int(edges[-1])
    groups = tuple(_group(members, page_size, num_rows) for members in _alike(spans, page_size))
    return torch.tensor(empty_rows) if empty_rows else None, groups


def _alike(spans: list[_Span], page_size: int) -> Iterator[list[_Span]]:
    """Spans of about the same number of pages, the most first; a group's are in the order of their rows."""
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


def _group(spans: list[_Span], page_size: int, num_rows: int) -> _Group:
    num_pages = max(len(span.pages) for span in spans)
    keys = slice(min(span.start for span in spans), max(span.stop for span in spans))
    pages = np.empty((len(spans), num_pages), np.int64)
    is_foreign = np.zeros((len(spans), num_pages * page_size), bool)
    is_hidden = np.zeros_like(is_foreign)
    for index, span in enumerate(spans):
        num_own = len(span.pages)
        pages[index, :num_own], pages[index, num_own:] = span.pages, span.pages[0]
        is_hidden[index, : span.start] = is_hidden[index, span.stop :] = True
        # Padding repeats a page that is full, unless there is but one.
        is_foreign[index, span.stop : num_own * page_size if num_own > 1 else None] = True
    is_foreign[:, keys.stop :] = False
    is_hidden = is_hidden[:, keys]
    mask = np.where(is_hidden, np.float32(-np.inf), np.float32(0))[:, None, None]
    rows = [span.row for span in spans]
    return _Group(
        rows=None if rows == list(range(num_rows)) else torch.tensor(rows),
        num_spans=len(spans),
        pages=torch.from_numpy(pages.reshape(-1)),
        keys=keys,
        foreign=torch.from_numpy(is_foreign.reshape(-1).nonzero()[0]) if is_foreign.any() else None,
        mask=torch.from_numpy(mask) if is_hidden.any() else None,
    )
