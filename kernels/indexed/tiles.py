"""`torch.attention.latent.indexed.tiles`: the choice of keys and the attention to them in one order, by PyTorch.

Scores of a query and a tile of 128 keys at multiples of 128 are products of one shape, always eight of them in a call.
A query attends to its chosen keys as a sequence of their own, so that `torch.attention.tiles` cuts them at multiples of
128 places of the choice.
"""

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn.functional import pad

from kernels.calls.batch import AttentionBatch, AttentionFlags
from kernels.calls.indexed import Index, IndexedFlags
from kernels.calls.rows import SequenceRows, keys_of, sequences_of
from kernels.indexed.eager import chosen_by_scores
from kernels.sdpa.key_tiles import run_attention_tiles

_KEYS, _PAIRS = 128, 8  # of a tile, and pairs of a query and a tile in a call
_MOST_KEYS = 2**16  # chosen keys that are gathered, and scores that are held, at a time


def run_indexed_tiles(
    q: Tensor, k: Tensor, v: Tensor, batch: AttentionBatch, flags: AttentionFlags, out: Tensor
) -> None:
    """Arguments as of `RunAttention`, with `IndexedFlags`, whose choice is written where an indexer's queries are."""
    del v  # the first numbers of k
    assert isinstance(flags, IndexedFlags), "the shape has an indexer"
    index, size = flags.index, q.shape[-1]
    if index.queries is not None:
        index.chosen.fill_(-1)
    keys, num_gathered = [], 0
    sequences = sequences_of(batch)
    starts = []  # of each query's sequence among the keys of all of them
    for sequence in sequences:
        rows = keys_of(k, batch, sequence)[:, 0]
        if index.queries is not None and sequence.num_keys:
            _choose(rows[:, size:], sequence, index)
        starts.append(torch.full((sequence.num_queries,), num_gathered))
        num_gathered += sequence.num_keys
        keys.append(rows[:, :size])
    every, first = torch.cat(keys), torch.cat(starts)
    each = max(1, _MOST_KEYS // index.count)
    for start in range(0, first.numel(), each):
        rows_of_q = slice(start, min(start + each, first.numel()))
        _attend(q[rows_of_q], every, first[rows_of_q], index.chosen[rows_of_q], flags, out[rows_of_q])


def _choose(keys: Tensor, sequence: SequenceRows, index: Index) -> None:
    """Write the choice of a sequence's queries; keys [n, dim] of the indexer."""
    assert index.queries is not None, "an earlier layer's choice is given"
    assert index.weights is not None, "an earlier layer's choice is given"
    num_tiles = -(-sequence.num_keys // _KEYS)
    tiles = pad(keys.float(), (0, 0, 0, num_tiles * _KEYS - sequence.num_keys)).view(num_tiles, _KEYS, -1)
    tiles = tiles.transpose(1, 2).contiguous()
    for rows in _some_rows(sequence, num_tiles):
        positions = torch.tensor([sequence.position(row) for row in rows])[:, None]
        scores = torch.zeros(len(rows), num_tiles, _KEYS)
        # Where all keys are chosen, their scores do not matter.
        pairs = [
            (at, tile)
            for at, position in enumerate(positions[:, 0].tolist())
            if position >= index.count
            for tile in range(position // _KEYS + 1)
        ]
        for first in range(0, len(pairs), _PAIRS):
            at, tile = torch.tensor(pairs[first : first + _PAIRS]).T
            count = at.numel()
            at, tile = (pad(it, (0, _PAIRS - count)) for it in (at, tile))  # the first ones again where they are fewer
            products = torch.bmm(index.queries[rows.start + at].float(), tiles[tile]).relu_()
            scores[at[:count], tile[:count]] = torch.bmm(index.weights[rows.start + at][:, None], products)[:count, 0]
        flat = scores.flatten(1)[:, : sequence.num_keys]
        flat = flat.masked_fill(torch.arange(sequence.num_keys) > positions, -torch.inf)
        chosen = chosen_by_scores(flat, positions, index.count)
        index.chosen[rows.start : rows.stop, : chosen.shape[1]] = chosen


def _some_rows(sequence: SequenceRows, num_tiles: int) -> Iterator[range]:
    """Yield the rows of a sequence's queries, as many at a time as scores are held of."""
    each = max(1, _MOST_KEYS // (num_tiles * _KEYS))
    for start in range(sequence.start, sequence.end, each):
        yield range(start, min(start + each, sequence.end))


def _attend(q: Tensor, keys: Tensor, first: Tensor, chosen: Tensor, flags: IndexedFlags, out: Tensor) -> None:
    """Attend from queries [T, heads, dim] to their chosen keys [T, count], of keys [n, dim] from `first` [T] on."""
    is_key = chosen >= 0
    ends = pad(is_key.sum(dim=1).cumsum(0), (1, 0)).int()
    gathered = keys[(chosen.long() + first[:, None])[is_key]][:, None]
    each = torch.arange(q.shape[0] + 1, dtype=torch.int32)
    batch = AttentionBatch(each, 1, chosen.shape[1], cu_seqlens_k=ends)
    wide = torch.empty_like(q)
    run_attention_tiles(q, gathered, gathered, batch, AttentionFlags(flags.scale), wide)
    out.copy_(wide[..., : out.shape[-1]])
