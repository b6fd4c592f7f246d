"""One query a sequence on a CPU, as two weighted sums of rows: what torch's `embedding_bag` computes.

A query's scores of a block of keys are the rows of that block, one a dimension, weighted by the query; what it attends
to are the rows of values, weighted by probabilities. FBGEMM generates the sums for the width of a row and reads ahead:
8 sequences of 101 to 156 keys, 4 heads of 64 over 2, take 0.6 to 0.7 of the time of torch's flash attention for CPUs,
the copies of each step's new keys and values included (fp32, beyond the caches of one core of an AMD EPYC with AVX-512
that others used too, torch 2.13). Of pages the values would take a quarter longer, and int64 rows a sixth.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

BLOCK = 64  # keys side by side: 32 or 96 take as long, fewer or more longer

Integers = NDArray[np.int64]


class Heads(NamedTuple):
    """Of queries and of keys, and the size of each."""

    num: int
    num_kv: int
    dim: int

    @classmethod
    def of(cls, q: Tensor, k: Tensor) -> "Heads":
        """q [rows, heads, head_dim], k [pages, page_size, kv_heads, head_dim]."""
        return cls(q.shape[1], k.shape[2], q.shape[2])

    @property
    def are_few(self) -> bool:
        """Whether this pays. Each query head reads its keys anew; and to transpose 4 times 1,000 keys of 8 heads of
        128 takes 5 to 10 times as long as to attend to them."""
        return self.num <= 2 * self.num_kv and self.num_kv * self.dim <= 256


@dataclass(frozen=True, slots=True)
class Layer:
    """Keys and values of one layer in columns, and its pages: memory of their own, and views that are made once.

    keys          [spans, kv_heads, room, head_dim, BLOCK], also as rows [.., BLOCK]
    values        [spans, kv_heads, room * BLOCK, head_dim], also as rows [.., head_dim]
    k_pool, v_pool  [slots, kv_heads, head_dim]
    """

    keys: Tensor
    key_rows: Tensor
    values: Tensor
    value_rows: Tensor
    k_pool: Tensor
    v_pool: Tensor


@dataclass(frozen=True, slots=True)
class _Bags:
    """Which rows to sum, for so many blocks of columns.

    weights                   [spans, heads, blocks, head_dim] fp32, which a call fills; also flat
    key_rows, key_starts      [spans * heads * blocks * head_dim], [spans * heads * blocks] int32
    value_rows, value_starts  [spans * heads * columns], [spans * heads] int32
    mask                      [spans, 1, columns] fp32: -inf where the query does not see the key
    """

    num_blocks: int
    weights: Tensor
    flat_weights: Tensor
    key_rows: Tensor
    key_starts: Tensor
    value_rows: Tensor
    value_starts: Tensor
    mask: Tensor


class Columns:
    """Where the keys of sequences stand that are attended to together: the newest of each in the same column.

    Before a sequence's first key and behind its newest one its first key stands, hidden: no number of anybody else.
    """

    def __init__(self, rows: Tensor | None, spans: list[Integers], heads: Heads, headroom: int = 0) -> None:
        """`rows` of q, one a span; None where they are all rows in order. `spans`: the slots of each one's keys."""
        self.rows = rows
        self._heads = heads
        self._num = max(map(len, spans))
        self._room = -(-(self._num + headroom) // BLOCK)
        first = np.array([slots[0] for slots in spans])[:, None]
        self._slots = np.repeat(first, self._room * BLOCK, axis=1)
        self._is_hidden = np.ones(self._slots.shape, bool)
        for index, slots in enumerate(spans):
            self._slots[index, self._num - len(slots) : self._num] = slots
            self._is_hidden[index, self._num - len(slots) : self._num] = False
        self._newest = torch.from_numpy(self._slots[:, self._num - 1].copy())
        self._bags = self._make_bags()

    def grow(self, slots: Integers) -> bool:
        """By a key of each sequence, in these slots. False, and nothing done, where there is no room for it."""
        if self._num == self._room * BLOCK:
            return False
        self._slots[:, self._num], self._is_hidden[:, self._num] = slots, False
        self._newest = torch.from_numpy(slots)
        self._num += 1
        if self._num > self._bags.num_blocks * BLOCK:
            self._bags = self._make_bags()
        else:
            self._bags.mask.numpy()[:, 0, self._num - 1] = 0
        return True

    def gather(self, k: Tensor, v: Tensor) -> Layer:
        """All keys and values of pages k, v [pages, page_size, kv_heads, head_dim] fp32."""
        num_spans, num_blocks, (_, num_kv, dim) = len(self._slots), self._bags.num_blocks, self._heads
        num = num_blocks * BLOCK
        slots = torch.from_numpy(self._slots[:, :num].reshape(-1))
        k_pool, v_pool = k.view(-1, num_kv, dim), v.view(-1, num_kv, dim)
        keys = k.new_zeros(num_spans, num_kv, self._room, dim, BLOCK)
        found = k_pool.index_select(0, slots).view(num_spans, num_blocks, BLOCK, num_kv, dim)
        keys[:, :, :num_blocks] = found.permute(0, 3, 1, 4, 2)
        values = v.new_zeros(num_spans, num_kv, self._room * BLOCK, dim)
        values[:, :, :num] = v_pool.index_select(0, slots).view(num_spans, num, num_kv, dim).transpose(1, 2)
        return Layer(keys, keys.view(-1, BLOCK), values, values.view(-1, dim), k_pool, v_pool)

    def add_newest(self, layer: Layer) -> None:
        """From the pages."""
        block, place = divmod(self._num - 1, BLOCK)
        layer.keys.select(2, block).select(3, place).copy_(layer.k_pool.index_select(0, self._newest))
        layer.values.select(2, self._num - 1).copy_(layer.v_pool.index_select(0, self._newest))

    def attend(self, q: Tensor, layer: Layer, scale: float, out: Tensor) -> None:
        """q, out [rows, heads, head_dim] fp32, of which those of the spans are read and written."""
        bags, rows = self._bags, self.rows
        bags.weights.copy_((q if rows is None else q.index_select(0, rows)).unsqueeze(2))
        scores = _sums(layer.key_rows, bags.key_rows, bags.key_starts, bags.flat_weights)
        scores = torch.add(bags.mask, scores.view(len(bags.mask), q.shape[1], -1), alpha=scale)
        probabilities = torch.softmax(scores, -1).view(-1)
        attended = _sums(layer.value_rows, bags.value_rows, bags.value_starts, probabilities)
        attended = attended.view(-1, *q.shape[1:])
        if rows is None:
            out.copy_(attended)
        else:
            out.index_copy_(0, rows, attended)

    def _make_bags(self) -> _Bags:
        heads, num_spans, num_blocks = self._heads, len(self._slots), -(-self._num // BLOCK)
        num_columns = num_blocks * BLOCK
        kv_heads = np.arange(heads.num) // (heads.num // heads.num_kv)
        owners = (np.arange(num_spans)[:, None] * heads.num_kv + kv_heads) * self._room  # [spans, heads]: first block
        blocks = owners[:, :, None] + np.arange(num_blocks)
        key_rows = blocks[..., None] * heads.dim + np.arange(heads.dim)
        value_rows = owners[:, :, None] * BLOCK + np.arange(num_columns)
        is_hidden = self._is_hidden[:, None, :num_columns]
        weights = torch.empty(num_spans, heads.num, num_blocks, heads.dim)
        return _Bags(
            num_blocks=num_blocks,
            weights=weights,
            flat_weights=weights.view(-1),
            key_rows=torch.from_numpy(key_rows.reshape(-1).astype(np.int32)),
            key_starts=torch.arange(0, key_rows.size, heads.dim, dtype=torch.int32),
            value_rows=torch.from_numpy(value_rows.reshape(-1).astype(np.int32)),
            value_starts=torch.arange(0, value_rows.size, num_columns, dtype=torch.int32),
            mask=torch.from_numpy(np.where(is_hidden, np.float32(-np.inf), np.float32(0))),
        )


def _sums(table: Tensor, rows: Tensor, starts: Tensor, weights: Tensor) -> Tensor:
    """[bags, width]: of each bag's rows of the table, times their weights."""
    return torch.embedding_bag(table, rows, starts, False, 0, False, weights)[0]
