"""Walking a batch one sequence at a time on the host, and the mask in words of positions.

What the oracle and the SDPA paths share. Reading lengths waits for the device: never on the way of a Triton path.
"""

from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from kernels.calls.batch import AttentionBatch, AttentionFlags


@dataclass(frozen=True, slots=True)
class SequenceRows:
    """One sequence of a batch: its queries are rows [start, end) of q and the last of its `num_keys` positions."""

    index: int
    start: int
    end: int
    num_keys: int
    key_start: int  # the row of its first key in packed k and v; 0 where they are pages

    @property
    def num_queries(self) -> int:
        return self.end - self.start

    def position(self, row: int) -> int:
        """The position of a query row; negative where there are more queries than keys."""
        return self.num_keys - (self.end - row)


def sequences_of(batch: AttentionBatch) -> list[SequenceRows]:
    """Every sequence of the batch, in order. Copies the lengths to the host."""
    query_edges = pairwise(batch.cu_seqlens_q.tolist())
    if batch.context_lens is not None:
        keys = [(0, num_keys) for num_keys in batch.context_lens.tolist()]
    else:
        assert batch.cu_seqlens_k is not None, "a batch is either paged or packed"
        keys = [(start, end - start) for start, end in pairwise(batch.cu_seqlens_k.tolist())]
    return [
        SequenceRows(index, start, end, num_keys, key_start)
        for index, ((start, end), (key_start, num_keys)) in enumerate(zip(query_edges, keys, strict=True))
    ]


def keys_of(k: Tensor, batch: AttentionBatch, sequence: SequenceRows) -> Tensor:
    """One sequence's keys (or values) as [num_keys, kv_heads, head_dim]: a view where packed, a copy of its pages else.

    Reads no page-table entry past the sequence's last page, and no slot past its last key reaches the result.
    """
    if batch.page_table is None:
        return k[sequence.key_start : sequence.key_start + sequence.num_keys]
    page_size = k.shape[1]
    num_pages = -(-sequence.num_keys // page_size)
    pages = k.index_select(0, batch.page_table[sequence.index, :num_pages])
    return pages.flatten(0, 1)[: sequence.num_keys]


def visible(positions: Tensor, key_positions: Tensor, flags: AttentionFlags, spans: Tensor | None) -> Tensor:
    """Return which keys each query sees: bool [queries, keys].

    positions      [queries] integer, of the queries in their sequence
    key_positions  [keys] integer
    spans          [queries, 2] or None: the rows of `flags.spans` for these queries
    """
    query = positions[:, None]
    key = key_positions[None, :]
    if not flags.causal:
        return torch.ones(positions.numel(), key_positions.numel(), dtype=torch.bool, device=positions.device)
    seen = key <= query
    if flags.window is not None:
        seen &= key > query - flags.window
    if spans is not None:
        seen |= (spans[:, :1] <= key) & (key < spans[:, 1:])
    return seen
