"""One query a sequence on a CPU: sequences of a batch that are about as long are attended to in one call.

A call for each sequence takes 70 us of a layer for 100 keys, most of it before anything is computed (one core, fp32).
What to gather is worked out once a step and kept under the contents of the page table, so that its layers share it.
Where the same sequences go on by one token a step, what was gathered is kept too, and gets the new tokens: gathering
takes a quarter of a step of 8 with 128 keys each.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kernels.attention.batch import AttentionBatch, AttentionFlags

_MAX_PADDING = 256  # keys of padding in a group: they take about as long as another call
_MAX_KEYS = 2**13  # of a group, padding included: bounds what is copied at once, but for a sequence that is longer

_HEADROOM = 64  # tokens that kept keys can grow by before they are gathered again

KEPT = "sdpa.decode.kept"  # the key of a `Kept` among a batch's plans

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


@dataclass(slots=True)
class _Mirror:
    """A group's keys and values as SDPA reads them, each sequence's from key 0 on, with room to grow."""

    group: _Group  # of the step that began it, which had so many tokens
    num_tokens: int
    rows: list[int]  # of q
    capacity: int
    layers: dict[int, tuple[int, Tensor, Tensor]] = field(default_factory=dict)  # by their pool: tokens, keys, values


@dataclass(frozen=True, slots=True)
class _Turn:
    """What a mirror needs in one step, for all layers.

    places, slots  [spans] int64: of each newest token, in the mirror and in the pool
    num_tokens     of all sequences of the batch, the newest included
    mask           as in `_Group`
    """

    mirror: _Mirror
    rows: Tensor | None
    places: Tensor
    slots: Tensor
    stop: int
    num_tokens: int
    num_rows: int
    mask: Tensor | None

    def keys_and_values(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor] | None:
        """[spans, keys, kv_heads, head_dim] each; None where this layer has missed a step."""
        mirror, pool = self.mirror, k.data_ptr()
        known = mirror.layers.get(pool)
        if known is None:
            if mirror.num_tokens != self.num_tokens:
                return None
            keys, values = (_with_room(_gather(it, mirror.group), mirror.capacity) for it in (k, v))
        else:
            num_tokens, keys, values = known
            if num_tokens == self.num_tokens - self.num_rows:
                for kept, pages in ((keys, k), (values, v)):
                    newest = pages.view(-1, *pages.shape[2:]).index_select(0, self.slots)
                    kept.view(-1, *pages.shape[2:]).index_copy_(0, self.places, newest)
            elif num_tokens != self.num_tokens:
                return None
        mirror.layers[pool] = self.num_tokens, keys, values
        return keys[:, : self.stop], values[:, : self.stop]


class Kept:
    """Keys and values of sequences that decode together, kept while each step is the one before with a token more.

    Whoever puts this among the plans of a step, under KEPT, promises just that of all the steps that had it.
    """

    def __init__(self) -> None:
        self._mirrors: tuple[_Mirror, ...] = ()
        self._num_tokens = 0

    def turns(self, batch: AttentionBatch, page_size: int) -> tuple[_Turn, ...]:
        """For each group of the batch; none where a sequence has no query or no key. Once a step."""
        assert batch.page_table is not None, "decode reads pages"
        assert batch.context_lens is not None, "pages come with lengths"
        lengths, num_rows = batch.context_lens.numpy().astype(np.int64), batch.num_seqs
        num_tokens = int(lengths.sum())
        is_next = bool(self._mirrors) and num_tokens == self._num_tokens + num_rows
        if not is_next or any(lengths[it.rows].max() > it.capacity for it in self._mirrors):
            self._mirrors = _begun(batch, page_size, num_tokens)
        self._num_tokens = num_tokens
        return tuple(_turn(it, batch.page_table.numpy(), lengths, page_size) for it in self._mirrors)


def _begun(batch: AttentionBatch, page_size: int, num_tokens: int) -> tuple[_Mirror, ...]:
    empty_rows, groups = _planned(batch, page_size, None)
    num_served = sum(group.num_spans for group in groups)
    if empty_rows is not None or num_served < batch.num_seqs:
        return ()
    return tuple(
        _Mirror(
            it, num_tokens, list(range(num_served)) if it.rows is None else it.rows.tolist(), it.keys.stop + _HEADROOM
        )
        for it in groups
    )


def _turn(mirror: _Mirror, table: "NDArray[np.int32]", lengths: _Integers, page_size: int) -> _Turn:
    own, rows = lengths[mirror.rows], np.array(mirror.rows)
    last = own - 1
    slots = table[rows, last // page_size].astype(np.int64) * page_size + last % page_size
    stop = int(own.max())
    is_hidden = np.arange(stop) >= own[:, None]
    mask = np.where(is_hidden, np.float32(-np.inf), np.float32(0))[:, None, None] if is_hidden.any() else None
    return _Turn(
        mirror=mirror,
        rows=mirror.group.rows,
        places=torch.from_numpy(np.arange(len(rows)) * mirror.capacity + last),
        slots=torch.from_numpy(slots),
        stop=stop,
        num_tokens=int(lengths.sum()),
        num_rows=len(lengths),
        mask=None if mask is None else torch.from_numpy(mask),
    )


def _with_room(gathered: Tensor, capacity: int) -> Tensor:
    """[spans, keys, kv_heads, head_dim] with zeros behind them: no number of anybody else."""
    found = gathered.new_zeros(gathered.shape[0], capacity, *gathered.shape[2:])
    found[:, : gathered.shape[1]] = gathered
    return found


def is_decode(batch: AttentionBatch, flags: AttentionFlags) -> bool:
    """Whether `run_decode` computes this."""
    is_plain = flags.softcap is None and flags.sinks is None and flags.spans is None
    return is_plain and batch.max_seqlen_q <= 1 and batch.is_paged


def run_decode(q: Tensor, k: Tensor, v: Tensor, batch: AttentionBatch, flags: AttentionFlags, out: Tensor) -> None:
    """As the paths of `sdpa.py`, for pages in a CPU's memory and at most one query a sequence."""
    page_size, window = k.shape[1], flags.window if flags.causal else None
    kept: Kept | None = None if batch.plans is None or window is not None else batch.plans.get(KEPT)
    if kept is not None:
        turns = batch.once(("sdpa.decode.turns", page_size), lambda: kept.turns(batch, page_size))
        found = [pair for turn in turns if (pair := turn.keys_and_values(k, v)) is not None]
        if turns and len(found) == len(turns):
            for turn, (keys, values) in zip(turns, found, strict=True):
                _attend(q, keys, values, turn.rows, turn.mask, flags.scale, out)
            return
    empty_rows, groups = _planned(batch, page_size, window)
    if empty_rows is not None:
        out.index_fill_(0, empty_rows, 0)
    for group in groups:
        _attend(q, _gather(k, group), _gather(v, group), group.rows, group.mask, flags.scale, out)


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


def _planned(batch: AttentionBatch, page_size: int, window: int | None) -> tuple[Tensor | None, tuple[_Group, ...]]:
    assert batch.page_table is not None, "decode reads pages"
    assert batch.context_lens is not None, "pages come with lengths"
    contents = (it.numpy().tobytes() for it in (batch.cu_seqlens_q, batch.context_lens, batch.page_table))
    return _plan(*contents, page_size, window)


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
