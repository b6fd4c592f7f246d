"""The inputs of decode graphs: memory that stays where it is, filled on the host and copied to the device at once."""

from array import array
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kernels.attention.batch import AttentionBatch
from kernels.shape import Phase
from server.engine.dispatch import PhasePart
from server.engine.graph_keys import GraphKey
from server.engine.sequence import Batch

_NO_PAGES: "array[int]" = array("i")
_ALIGNMENT_BYTES = 64  # of every section: Triton compiles a kernel again for a pointer that 16 does not divide


@dataclass(frozen=True, slots=True)
class DecodeTensors:
    """What a decode graph reads, n rows: token_ids, slots [n] int64, positions [n] int32, and the attention's part."""

    token_ids: Tensor
    slots: Tensor
    positions: Tensor
    part: PhasePart


@dataclass(frozen=True, slots=True)
class _Host:
    """The same memory on the host, in the same order."""

    token_ids: NDArray[np.int64]
    slots: NDArray[np.int64]
    positions: NDArray[np.int32]
    context_lens: NDArray[np.int32]
    page_table: NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class _Layout:
    host: _Host
    tensors: DecodeTensors
    source: Tensor  # pinned bytes
    target: Tensor  # as many bytes on the device


class DecodeInputs:
    """All graphs share one buffer on each side, for only one runs at a time; each key lays it out for itself."""

    def __init__(
        self, keys: Iterable[GraphKey], *, page_size: int, num_pages: int, max_context: int, device: torch.device
    ) -> None:
        """`num_pages`: those that sequences may own; the page after them is where padding rows write."""
        self._page_size = page_size
        self._scratch_page = num_pages
        self._max_context = max_context
        keys = list(keys)
        num_bytes = max(_num_bytes(_sections(key, self._table_width(key))) for key in keys)
        self._host = torch.zeros(num_bytes, dtype=torch.uint8, pin_memory=device.type == "cuda")
        self._device = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
        # One query a row, padding included: the same for every batch.
        self._cu_seqlens = torch.arange(1 + max(key.size for key in keys), dtype=torch.int32, device=device)
        self._layouts = {key: self._layout(key) for key in keys}
        self._key: GraphKey | None = None  # of the latest `fill`
        self._tables: list[array[int]] = []  # what the rows of its page table hold on the host

    def tensors(self, key: GraphKey) -> DecodeTensors:
        """What a graph of this key reads."""
        return self._layouts[key].tensors

    def fill(self, key: GraphKey, batch: Batch) -> None:
        """Write a batch of decode rows and start its copy to the device. The copy before must be done.

        Padding rows have no context, so that they read no page, and write to a page that nobody reads.
        """
        layout, size, num_rows = self._layouts[key], self._page_size, batch.num_rows
        host = layout.host
        contexts = np.array(batch.context_lens, dtype=np.int64)
        last = contexts - 1
        host.token_ids[:num_rows] = [
            seq.tokens[context_len - 1] for seq, context_len in zip(batch.sequences, batch.context_lens, strict=True)
        ]
        host.slots[:num_rows] = np.array([table[-1] for table in batch.page_tables]) * size + last % size
        host.positions[:num_rows] = last
        host.context_lens[:num_rows] = contexts
        if key is not self._key:
            self._key, self._tables = key, [_NO_PAGES] * key.size
        tables = self._tables
        for row, table in enumerate(batch.page_tables):
            if table != tables[row]:  # one step in page_size adds a page; comparing is a fifth of writing
                host.page_table[row, : len(table)] = table
                tables[row] = table
        if num_rows < key.size:
            host.token_ids[num_rows:] = 0
            # Several rows may share a slot there; what it holds is of no account.
            host.slots[num_rows:] = self._scratch_page * size + np.arange(key.size - num_rows) % size
            host.positions[num_rows:] = 0
            host.context_lens[num_rows:] = 0
        layout.target.copy_(layout.source, non_blocking=True)

    def _longest(self, key: GraphKey) -> int:
        """The longest context of a graph, in tokens."""
        return min(key.context.hi or self._max_context, self._max_context)

    def _table_width(self, key: GraphKey) -> int:
        return -(-self._longest(key) // self._page_size)

    def _layout(self, key: GraphKey) -> _Layout:
        width = self._table_width(key)
        sections = _sections(key, width)
        num_bytes = _num_bytes(sections)
        views, start = [], 0
        for dtype, size in sections:
            stop = start + size * dtype.itemsize
            views.append([memory[start:stop].view(dtype) for memory in (self._host, self._device)])
            start = _aligned(stop)
        host, device = zip(*views, strict=True)
        token_ids, slots, positions, context_lens, page_table = (view.numpy() for view in host)
        part = PhasePart(
            phase=Phase.DECODE,
            tokens=slice(0, key.size),
            batch=AttentionBatch(
                cu_seqlens_q=self._cu_seqlens[: key.size + 1],
                max_seqlen_q=1,
                max_context=self._longest(key),
                page_table=device[4].view(key.size, width),
                context_lens=device[3],
            ),
            num_sequences=key.size,
            num_tokens=key.size,
        )
        return _Layout(
            _Host(token_ids, slots, positions, context_lens, page_table.reshape(key.size, width)),
            DecodeTensors(device[0], device[1], device[2], part),
            self._host[:num_bytes],
            self._device[:num_bytes],
        )


def _sections(key: GraphKey, table_width: int) -> list[tuple[torch.dtype, int]]:
    """dtype and number of elements of token_ids, slots, positions, context_lens and the page table."""
    size = key.size
    return [
        (torch.int64, size),
        (torch.int64, size),
        (torch.int32, size),
        (torch.int32, size),
        (torch.int32, size * table_width),
    ]


def _num_bytes(sections: list[tuple[torch.dtype, int]]) -> int:
    return sum(_aligned(dtype.itemsize * size) for dtype, size in sections)


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
