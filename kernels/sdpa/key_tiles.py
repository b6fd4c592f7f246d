"""`torch.attention.tiles`: attention by tiles of 128 keys at multiples of 128 from position 0 on.

A query stands at its position's place in a tile of 8 queries. Each pair of a tile of queries and a tile of keys is
computed by itself, always eight pairs in a call (one again and again where there are fewer), and a query's partial
results are folded in the order of the keys. Prefill, extend and decode are one code, so that neither a chunk's borders
nor the other sequences change a bit.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kernels.calls.batch import AttentionBatch, AttentionFlags
from kernels.calls.rows import SequenceRows, sequences_of

Spans = NDArray[Any]  # [rows, 2] integers
_QUERIES, _KEYS, _PAIRS = 8, 128, 8  # of a tile of queries, of a tile of keys, of a call
_MOST_PAIRS = 512  # whose partial results are held at a time
_LEAST = torch.finfo(torch.float32).min  # the largest score so far of a query that has seen no key: no NaN comes of it


@dataclass(frozen=True, slots=True)
class _Call:
    """Eight pairs of a tile of queries and a tile of keys.

    tiles    [8] int64, which of the part's tiles of queries
    rows     [8 * 128] int64, rows of keys and values: those of the tile, any where it ends with its sequence
    foreign  [n] int64 or None: which of them are no keys of the sequence
    hidden   [8, 1, 8, 128] bool or None: which keys a query does not see
    """

    tiles: Tensor
    rows: Tensor
    foreign: Tensor | None
    hidden: Tensor | None


@dataclass(frozen=True, slots=True)
class _Part:
    """Some tiles of queries, and their pairs, those of a tile of queries one after another.

    rows    [n] int64, rows of q
    places  [n] int64, where these queries stand in the tiles
    folds   [(tiles [m], pairs [m])] int64: the tiles that have a second, third, ... pair, and which pair it is
    firsts  [tiles] int64, the first pair of each
    """

    rows: Tensor
    places: Tensor
    num_tiles: int
    num_pairs: int
    calls: tuple[_Call, ...]
    firsts: Tensor
    folds: tuple[tuple[Tensor, Tensor], ...]


@dataclass(frozen=True, slots=True)
class _Plan:
    """`blind`: rows of q that see no key, or None."""

    blind: Tensor | None
    parts: tuple[_Part, ...]


@dataclass(frozen=True, slots=True)
class _QueryTile:
    """Rows [first, last) of q, whose positions follow on `position`, and the tiles of keys [lo, hi) that they see.

    spans   [last - first, 2] of `flags.spans`, or None
    """

    sequence: SequenceRows
    first: int
    last: int
    position: int
    lo: int
    hi: int
    spans: Spans | None = None

    @property
    def placed_spans(self) -> Spans:
        """Return the span of each place of the tile, [8, 2]; 0, 0 where there is no row, or it has none."""
        found = np.zeros((_QUERIES, 2), np.int64)
        if self.spans is not None:
            found[self.position % _QUERIES :][: len(self.spans)] = self.spans
        return found


def run_attention_tiles(
    q: Tensor, k: Tensor, v: Tensor, batch: AttentionBatch, flags: AttentionFlags, out: Tensor
) -> None:
    """Fill out [tokens, heads, head_dim]; arguments as of `RunAttention`, causal, with spans or without."""
    page_size = k.shape[1] if batch.is_paged else None
    spans = None if flags.spans is None else flags.spans.numpy()
    plan = batch.once(
        ("key_tiles", page_size, flags.window, flags.spans), lambda: _planned(batch, page_size, flags.window, spans)
    )
    if plan.blind is not None:
        out.index_fill_(0, plan.blind, 0)
    if batch.is_paged:
        k, v = k.flatten(0, 1), v.flatten(0, 1)
    for part in plan.parts:
        _attend(q, k, v, part, flags, out)


def _planned(batch: AttentionBatch, page_size: int | None, window: int | None, spans: Spans | None) -> _Plan:
    sequences = sequences_of(batch)
    blind = [row for it in sequences for row in range(it.start, it.end) if it.position(row) < 0]
    tiles = [tile for it in sequences for tile in _query_tiles(it, window, spans)]
    rows_of = {it.index: _key_rows(it, batch, page_size) for it in sequences}
    parts = tuple(_part(some, rows_of, window) for some in _in_parts(tiles))
    return _Plan(_indices(blind) if blind else None, parts)


def _query_tiles(sequence: SequenceRows, window: int | None, spans: Spans | None) -> Iterator[_QueryTile]:
    row = sequence.start + max(0, sequence.num_queries - sequence.num_keys)
    while row < sequence.end:
        position = sequence.position(row)
        last = min(sequence.end, row + _QUERIES - position % _QUERIES)
        lo, hi = 0 if window is None else max(0, position - window + 1), sequence.position(last - 1) + 1
        own = None if spans is None else spans[row:last]
        if own is not None and (some := own[own[:, 0] < own[:, 1]]).size:
            lo, hi = min(lo, max(0, int(some[:, 0].min()))), max(hi, min(sequence.num_keys, int(some[:, 1].max())))
        yield _QueryTile(sequence, row, last, position, lo // _KEYS, -(-hi // _KEYS), own)
        row = last


def _key_rows(sequence: SequenceRows, batch: AttentionBatch, page_size: int | None) -> Tensor:
    """Return the row of each key, [tiles, 128] int64; behind the last key any row of the sequence."""
    places = torch.arange(-(-sequence.num_keys // _KEYS) * _KEYS).clamp_(max=max(0, sequence.num_keys - 1))
    if page_size is None:
        return (places + sequence.key_start).view(-1, _KEYS)
    assert batch.page_table is not None
    pages = batch.page_table[sequence.index].long()
    return (pages[places // page_size] * page_size + places % page_size).view(-1, _KEYS)


def _in_parts(tiles: list[_QueryTile]) -> Iterator[list[_QueryTile]]:
    """Yield the tiles of queries in parts of about as many pairs as are held at a time."""
    part: list[_QueryTile] = []
    num_pairs = 0
    for tile in tiles:
        if part and num_pairs + tile.hi - tile.lo > _MOST_PAIRS:
            yield part
            part, num_pairs = [], 0
        part.append(tile)
        num_pairs += tile.hi - tile.lo
    if part:
        yield part


def _part(tiles: list[_QueryTile], rows_of: dict[int, Tensor], window: int | None) -> _Part:
    pairs = [(at, tile) for at, it in enumerate(tiles) for tile in range(it.lo, it.hi)]
    places = [
        at * _QUERIES + (it.position + i) % _QUERIES for at, it in enumerate(tiles) for i in range(it.last - it.first)
    ]
    padded = pairs + pairs[-1:] * (-len(pairs) % _PAIRS)
    calls = [padded[first : first + _PAIRS] for first in range(0, len(padded), _PAIRS)]
    counts = np.array([it.hi - it.lo for it in tiles])
    firsts = counts.cumsum() - counts
    later = [(counts > place).nonzero()[0] for place in range(1, counts.max())]
    return _Part(
        rows=_indices([row for it in tiles for row in range(it.first, it.last)]),
        places=_indices(places),
        num_tiles=len(tiles),
        num_pairs=len(pairs),
        calls=tuple(_call([(at, tiles[at], tile) for at, tile in call], rows_of, window) for call in calls),
        firsts=torch.from_numpy(firsts),
        folds=tuple((torch.from_numpy(it), torch.from_numpy(firsts[it] + at)) for at, it in enumerate(later, 1)),
    )


def _call(pairs: list[tuple[int, _QueryTile, int]], rows_of: dict[int, Tensor], window: int | None) -> _Call:
    rows = torch.stack([rows_of[it.sequence.index][tile] for _, it, tile in pairs])
    first_query = _indices([it.position // _QUERIES * _QUERIES for _, it, _ in pairs])
    first_key = _indices([tile * _KEYS for _, _, tile in pairs])
    num_keys = _indices([it.sequence.num_keys for _, it, _ in pairs])
    query = first_query[:, None, None] + torch.arange(_QUERIES)[:, None]
    key = first_key[:, None, None] + torch.arange(_KEYS)
    hidden = key > query
    if window is not None:
        hidden |= key <= query - window
    if any(it.spans is not None for _, it, _ in pairs):
        first, end = torch.from_numpy(np.stack([it.placed_spans for _, it, _ in pairs])).unsqueeze(2).unbind(-1)
        hidden &= (key < first) | (key >= torch.minimum(end, num_keys[:, None, None]))
    foreign = (key >= num_keys[:, None, None]).flatten().nonzero()[:, 0]
    sees_all = window is None and all((tile + 1) * _KEYS <= it.position // _QUERIES * _QUERIES for _, it, tile in pairs)
    return _Call(
        tiles=_indices([at for at, _, _ in pairs]),
        rows=rows.flatten(),
        foreign=foreign if foreign.numel() else None,
        hidden=None if sees_all else hidden[:, None],
    )


def _indices(values: list[int]) -> Tensor:
    return torch.from_numpy(np.array(values, np.int64))


@dataclass(frozen=True, slots=True)
class _Sums:
    """Softmax over some keys, of N tiles of queries.

    largest, weight  [N, kv_heads, group, 8, 1]: the largest score, and the sum of exp(score - largest)
    total            [N, kv_heads, group, 8, head_dim]: the sum of these weights times values
    """

    largest: Tensor
    weight: Tensor
    total: Tensor


def _attend(q: Tensor, k: Tensor, v: Tensor, part: _Part, flags: AttentionFlags, out: Tensor) -> None:
    """Attend from the queries of a part to keys and values [rows, kv_heads, head_dim]; fills their rows of out."""
    num_heads, head_dim = q.shape[1:]
    num_kv_heads = k.shape[1]
    group = num_heads // num_kv_heads
    tiled = q.new_zeros(part.num_tiles * _QUERIES, num_heads, head_dim, dtype=torch.float32)
    tiled[part.places] = q.index_select(0, part.rows).float() * flags.scale
    # The queries of a tile, in all heads of one KV head, are the rows of one matrix.
    tiled = tiled.view(part.num_tiles, _QUERIES, num_kv_heads, group, head_dim).permute(0, 2, 3, 1, 4).contiguous()
    sums = _folded(_pair_sums(tiled, k, v, part, flags), part)
    largest, weight, total = sums.largest, sums.weight, sums.total
    if flags.sinks is not None:
        sinks = flags.sinks.float().view(1, num_kv_heads, group, 1, 1)
        most = torch.maximum(largest, sinks)
        kept = torch.exp(largest - most)
        weight, total = weight * kept + torch.exp(sinks - most), total * kept
    found = (total / weight).add_(0.0)  # no zero is negative
    found = found.permute(0, 3, 1, 2, 4).reshape(part.num_tiles * _QUERIES, num_heads, head_dim)
    out.index_copy_(0, part.rows, found.index_select(0, part.places).to(out.dtype))


def _pair_sums(tiled: Tensor, k: Tensor, v: Tensor, part: _Part, flags: AttentionFlags) -> _Sums:
    num_kv_heads, group, _, head_dim = tiled.shape[1:]
    num_pairs = len(part.calls) * _PAIRS
    largest = tiled.new_empty(num_pairs, num_kv_heads, group, _QUERIES, 1)
    weight, total = torch.empty_like(largest), tiled.new_empty(num_pairs, num_kv_heads, group, _QUERIES, head_dim)
    scores = tiled.new_empty(num_kv_heads, _PAIRS, group * _QUERIES, _KEYS)
    summed = tiled.new_empty(num_kv_heads, _PAIRS, group * _QUERIES, head_dim)
    for index, call in enumerate(part.calls):
        pairs = slice(index * _PAIRS, (index + 1) * _PAIRS)
        queries = tiled.index_select(0, call.tiles).flatten(2, 3)
        keys = k.index_select(0, call.rows).float().view(_PAIRS, _KEYS, num_kv_heads, head_dim)
        values = v.index_select(0, call.rows).float()
        if call.foreign is not None:
            values.index_fill_(0, call.foreign, 0)
        values = values.view(_PAIRS, _KEYS, num_kv_heads, head_dim)
        for head in range(num_kv_heads):
            torch.bmm(queries[:, head], keys[:, :, head].transpose(1, 2), out=scores[head])
        seen = scores.view(num_kv_heads, _PAIRS, group, _QUERIES, _KEYS)
        if flags.softcap is not None:
            seen.div_(flags.softcap).tanh_().mul_(flags.softcap)
        if call.hidden is not None:
            seen.masked_fill_(call.hidden, float("-inf"))
        most = seen.amax(dim=-1, keepdim=True).clamp_(min=_LEAST)
        seen.sub_(most).exp_()
        for head in range(num_kv_heads):
            torch.bmm(scores[head], values[:, :, head], out=summed[head])
        largest[pairs] = most.transpose(0, 1)
        weight[pairs] = seen.sum(dim=-1, keepdim=True).transpose(0, 1)
        total[pairs] = summed.view(num_kv_heads, _PAIRS, group, _QUERIES, head_dim).transpose(0, 1)
    return _Sums(largest, weight, total)


def _folded(of_pairs: _Sums, part: _Part) -> _Sums:
    """Fold what was computed for the pairs of each tile of queries, in the order of its keys."""
    largest, weight, total = (
        it.index_select(0, part.firsts) for it in (of_pairs.largest, of_pairs.weight, of_pairs.total)
    )
    for tiles, pairs in part.folds:
        before, found = largest[tiles], of_pairs.largest[pairs]
        most = torch.maximum(before, found)
        kept, added = torch.exp(before - most), torch.exp(found - most)
        largest[tiles] = most
        weight[tiles] = weight[tiles] * kept + of_pairs.weight[pairs] * added
        total[tiles] = total[tiles] * kept + of_pairs.total[pairs] * added
    return _Sums(largest, weight, total)
