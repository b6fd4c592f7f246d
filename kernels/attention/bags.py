"""One query a sequence on a CPU, as two weighted sums of rows: what torch's `embedding_bag` computes.

A query's scores of a block of keys are the rows of that block, one a dimension, weighted by the query; what it attends
to are the rows of values, weighted by probabilities. FBGEMM generates the sums for the width of a row and reads ahead:
8 sequences of 128 keys, 4 heads of 64 over 2, take 75 us, and torch's flash attention for CPUs takes 185 and another
15 for copies of the newest values (one core of an AMD EPYC with AVX-512, fp32, keys beyond its own caches, torch 2.13).
Values are read from their pages.
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


@dataclass(frozen=True, slots=True)
class Keys:
    """Keys of one layer in columns, and its pages: views that are made once.

    columns  [spans, kv_heads, room, head_dim, BLOCK], in memory of their own, which is also `table` [.., BLOCK]
    k_pages  [slots, kv_heads, head_dim]
    v_pages  [slots * kv_heads, head_dim]
    """

    columns: Tensor
    table: Tensor
    k_pages: Tensor
    v_pages: Tensor


@dataclass(frozen=True, slots=True)
class _Bags:
    """Rows to sum, for so many blocks of columns, of `Keys.table` and `Keys.v_pages`.

    weights, key_rows         [spans, heads, blocks, head_dim] fp32, which a call fills, and as many int64, flat
    value_rows                [spans, heads, columns] int64
    key_starts, value_starts  [spans * heads * blocks], [spans * heads] int64
    mask                      [spans, 1, columns] fp32: -inf where the query does not see the key
    """

    num_blocks: int
    weights: Tensor
    flat_weights: Tensor
    key_rows: Tensor
    key_starts: Tensor
    value_rows: Integers
    flat_value_rows: Tensor
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
            column = slice(self._num - 1, self._num)
            self._bags.value_rows[:, :, column] = self._value_rows(column)
            self._bags.mask.numpy()[:, 0, column] = 0
        return True

    def gather(self, k: Tensor, v: Tensor) -> Keys:
        """All keys of pages k, v [pages, page_size, kv_heads, head_dim] fp32."""
        num_spans, num_blocks, (_, num_kv, dim) = len(self._slots), self._bags.num_blocks, self._heads
        slots = torch.from_numpy(self._slots[:, : num_blocks * BLOCK].reshape(-1))
        k_pages = k.view(-1, num_kv, dim)
        found = k_pages.index_select(0, slots).view(num_spans, num_blocks, BLOCK, num_kv, dim)
        columns = k.new_zeros(num_spans, num_kv, self._room, dim, BLOCK)
        columns[:, :, :num_blocks] = found.permute(0, 3, 1, 4, 2)
        return Keys(columns, columns.view(-1, BLOCK), k_pages, v.view(-1, dim))

    def add_newest(self, keys: Keys) -> None:
        """From the pages."""
        block, place = divmod(self._num - 1, BLOCK)
        keys.columns.select(2, block).select(3, place).copy_(keys.k_pages.index_select(0, self._newest))

    def attend(self, q: Tensor, keys: Keys, scale: float, out: Tensor) -> None:
        """q, out [rows, heads, head_dim] fp32, of which those of the spans are read and written."""
        bags, rows = self._bags, self.rows
        bags.weights.copy_((q if rows is None else q.index_select(0, rows)).unsqueeze(2))
        scores = _sums(keys.table, bags.key_rows, bags.key_starts, bags.flat_weights)
        scores = torch.add(bags.mask, scores.view(bags.value_rows.shape), alpha=scale)
        probabilities = torch.softmax(scores, -1).view(-1)
        attended = _sums(keys.v_pages, bags.flat_value_rows, bags.value_starts, probabilities)
        attended = attended.view(-1, *q.shape[1:])
        if rows is None:
            out.copy_(attended)
        else:
            out.index_copy_(0, rows, attended)

    def _make_bags(self) -> _Bags:
        heads, num_spans, num_blocks = self._heads, len(self._slots), -(-self._num // BLOCK)
        num_columns = num_blocks * BLOCK
        owners = np.arange(num_spans)[:, None] * heads.num_kv + self._kv_heads()
        blocks = owners[:, :, None] * self._room + np.arange(num_blocks)
        key_rows = blocks[..., None] * heads.dim + np.arange(heads.dim)
        is_hidden = self._is_hidden[:, None, :num_columns]
        weights = torch.empty(num_spans, heads.num, num_blocks, heads.dim)
        value_rows = self._value_rows(slice(0, num_columns))
        return _Bags(
            num_blocks=num_blocks,
            weights=weights,
            flat_weights=weights.view(-1),
            key_rows=torch.from_numpy(key_rows.reshape(-1)),
            key_starts=torch.arange(0, key_rows.size, heads.dim),
            value_rows=value_rows,
            flat_value_rows=torch.from_numpy(value_rows.reshape(-1)),
            value_starts=torch.arange(0, value_rows.size, num_columns),
            mask=torch.from_numpy(np.where(is_hidden, np.float32(-np.inf), np.float32(0))),
        )

    def _value_rows(self, columns: slice) -> Integers:
        """[spans, heads, columns], contiguous"""
        return self._slots[:, None, columns] * self._heads.num_kv + self._kv_heads()[:, None]

    def _kv_heads(self) -> Integers:
        """[heads]: the KV head of each."""
        return np.arange(self._heads.num) // (self._heads.num // self._heads.num_kv)


def _sums(table: Tensor, rows: Tensor, starts: Tensor, weights: Tensor) -> Tensor:
    """[bags, width]: of each bag's rows of the table, times their weights."""
    return torch.embedding_bag(table, rows, starts, False, 0, False, weights)[0]
