"""One query a sequence on a CPU: sequences of a batch that are about as long are attended to in one call.

A call for each sequence takes 70 us of a layer for 100 keys, most of it before anything is computed (one core, fp32).
What to gather is worked out once a step and kept under the contents of the page table, so that its layers share it.
In fp32, with few heads and without a window the calls are those of `bags.py`, for which keys are transposed. Where the
same sequences go on by one token a step they are kept, and get the new ones: gathering takes as long as attending.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kernels.batch import AttentionBatch, AttentionFlags
from kernels.sdpa.embedding_bag import Columns, Heads, Integers, Layer

_MAX_PADDING = 256  # keys of padding in a group: they take about as long as another call
_MAX_KEYS = 2**13  # of a group, padding included: bounds what is copied at once, but for a sequence that is longer

_HEADROOM = 64  # tokens that kept keys can grow by before they are gathered again

KEPT = "sdpa.decode.kept"  # the key of a `Kept` among a batch's plans


@dataclass(frozen=True, slots=True)
class _Span:
    """The pages of one sequence that its query sees something of: key `start` of them up to key `stop`."""

    row: int  # of q
    pages: Integers
    start: int
    stop: int

    def slots(self, page_size: int) -> Integers:
        """Of its keys, in order."""
        return (self.pages[:, None] * page_size + np.arange(page_size)).reshape(-1)[self.start : self.stop]


@dataclass(frozen=True, slots=True)
class _Plan:
    """Rows of queries without any key, or None; of each group its rows of q, None for all in order, and its spans."""

    empty_rows: Tensor | None
    groups: list[tuple[Tensor | None, list[_Span]]]


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


@dataclass(slots=True)
class _Mirror:
    """Keys and values of a group as `bags.py` reads them. Of a layer that has missed a step they are gathered again."""

    columns: Columns
    num_steps: int = 0  # since it began
    layers: dict[int, tuple[int, Layer]] = field(default_factory=dict)  # by their pool: steps, keys and values

    def layer(self, k: Tensor, v: Tensor) -> Layer:
        pool = k.data_ptr()
        num_steps, layer = self.layers.get(pool, (-1, None))
        if layer is None or num_steps < self.num_steps - 1:
            layer = self.columns.gather(k, v)
        elif num_steps < self.num_steps:
            self.columns.add_newest(layer)
        self.layers[pool] = self.num_steps, layer
        return layer


class Kept:
    """Keys and values of sequences that decode together, kept while each step is the one before with a token more.

    Whoever puts this among the plans of a step, under KEPT, promises just that of all the steps that had it.
    """

    def __init__(self) -> None:
        self._mirrors: tuple[_Mirror, ...] = ()
        self._num_tokens = 0

    def mirrors(self, batch: AttentionBatch, page_size: int, heads: Heads) -> tuple[_Mirror, ...]:
        """For each group of the batch; none where a sequence has no query or no key. Once a step."""
        assert batch.page_table is not None, "decode reads pages"
        assert batch.context_lens is not None, "pages come with lengths"
        lengths, table = batch.context_lens.numpy(), batch.page_table.numpy()
        num_tokens = int(lengths.sum())
        is_next = bool(self._mirrors) and num_tokens == self._num_tokens + batch.num_seqs
        self._num_tokens = num_tokens
        if not is_next or not self._grow(lengths, table, page_size):
            plan = _plan(*_contents(batch), page_size, None)
            is_whole = sum(len(spans) for _, spans in plan.groups) == batch.num_seqs
            self._mirrors = tuple(map(_Mirror, _columns_of(plan, page_size, heads, _HEADROOM))) if is_whole else ()
        return self._mirrors

    def _grow(self, lengths: NDArray[np.int32], table: NDArray[np.int32], page_size: int) -> bool:
        last = lengths - 1
        slots = table[np.arange(len(last)), last // page_size].astype(np.int64) * page_size + last % page_size
        for mirror in self._mirrors:
            rows = mirror.columns.rows
            if not mirror.columns.grow(slots if rows is None else slots[rows.numpy()]):
                return False
            mirror.num_steps += 1
        return True


def is_decode(batch: AttentionBatch, flags: AttentionFlags) -> bool:
    """Whether `run_decode` computes this."""
    is_plain = flags.softcap is None and flags.sinks is None and flags.spans is None
    return is_plain and batch.max_seqlen_q <= 1 and batch.is_paged


def run_decode(q: Tensor, k: Tensor, v: Tensor, batch: AttentionBatch, flags: AttentionFlags, out: Tensor) -> None:
    """As the paths of `sdpa.py`, for pages in a CPU's memory and at most one query a sequence."""
    page_size, window = k.shape[1], flags.window if flags.causal else None
    if window is None and q.dtype is k.dtype is torch.float32 and Heads.of(q, k).are_few:
        _run_bags(q, k, v, batch, flags.scale, out)
        return
    empty_rows, groups = _groups(*_contents(batch), page_size, window)
    if empty_rows is not None:
        out.index_fill_(0, empty_rows, 0)
    for group in groups:
        _attend(q, _gather(k, group), _gather(v, group), group.rows, group.mask, flags.scale, out)


def _run_bags(q: Tensor, k: Tensor, v: Tensor, batch: AttentionBatch, scale: float, out: Tensor) -> None:
    page_size, heads = k.shape[1], Heads.of(q, k)
    kept: Kept | None = None if batch.plans is None else batch.plans.get(KEPT)
    if kept is not None:
        mirrors = batch.once(("sdpa.decode", page_size, heads), lambda: kept.mirrors(batch, page_size, heads))
        for mirror in mirrors:
            mirror.columns.attend(q, mirror.layer(k, v), scale, out)
        if mirrors:
            return
    empty_rows, groups = _columns(*_contents(batch), page_size, heads)
    if empty_rows is not None:
        out.index_fill_(0, empty_rows, 0)
    for columns in groups:
        columns.attend(q, columns.gather(k, v), scale, out)


def _attend(
    q: Tensor, keys: Tensor, values: Tensor, rows: Tensor | None, mask: Tensor | None, scale: float, out: Tensor
) -> None:
    """The rows of q, or all, over keys and values [rows, keys, kv_heads, head_dim]."""
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
    """Keys (or values) of a group, [spans, keys, kv_heads, head_dim]. No number of anybody else is among them."""
    pages = pool.index_select(0, group.pages)
    if group.foreign is not None:
        pages.view(-1, pool.shape[2] * pool.shape[3]).index_fill_(0, group.foreign, 0)
    return pages.view(group.num_spans, -1, *pool.shape[2:])[:, group.keys]


def _contents(batch: AttentionBatch) -> tuple[bytes, bytes, bytes]:
    """cu_seqlens_q, context_lens and the page table."""
    assert batch.page_table is not None, "decode reads pages"
    assert batch.context_lens is not None, "pages come with lengths"
    found = [it.numpy().tobytes() for it in (batch.cu_seqlens_q, batch.context_lens, batch.page_table)]
    return found[0], found[1], found[2]


@lru_cache(maxsize=4)  # a step's layers ask one after another, with as many windows as the model has
def _groups(
    cu_seqlens_q: bytes, context_lens: bytes, page_table: bytes, page_size: int, window: int | None
) -> tuple[Tensor | None, tuple[_Group, ...]]:
    """Rows of queries without any key, or None, and the groups of all others."""
    plan = _plan(cu_seqlens_q, context_lens, page_table, page_size, window)
    return plan.empty_rows, tuple(_group(spans, rows, page_size) for rows, spans in plan.groups)


@lru_cache(maxsize=1)
def _columns(
    cu_seqlens_q: bytes, context_lens: bytes, page_table: bytes, page_size: int, heads: Heads
) -> tuple[Tensor | None, tuple[Columns, ...]]:
    """As `_groups`."""
    plan = _plan(cu_seqlens_q, context_lens, page_table, page_size, None)
    return plan.empty_rows, _columns_of(plan, page_size, heads)


def _columns_of(plan: _Plan, page_size: int, heads: Heads, headroom: int = 0) -> tuple[Columns, ...]:
    return tuple(
        Columns(rows, [span.slots(page_size) for span in spans], heads, headroom) for rows, spans in plan.groups
    )


def _plan(cu_seqlens_q: bytes, context_lens: bytes, page_table: bytes, page_size: int, window: int | None) -> _Plan:
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
    for members in _alike(spans, page_size):
        rows = [span.row for span in members]
        groups.append((None if rows == every else torch.tensor(rows), members))
    return _Plan(torch.tensor(empty_rows) if empty_rows else None, groups)


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
        # Padding repeats a page that is full, unless there is but one.
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
