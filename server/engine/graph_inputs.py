"""The inputs of CUDA graphs: memory that stays where it is, filled on the host and copied to the device at once."""

from array import array
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import accumulate

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kernels.attention.batch import AttentionBatch
from kernels.buckets import Bucket
from kernels.shape import Phase
from server.engine.dispatch import PhasePart
from server.engine.graph_keys import GraphKey, PartKey
from server.engine.sequence import PENDING, Batch, Sequence

_NO_PAGES: "array[int]" = array("i")
_ALIGNMENT_BYTES = 64  # of every section: Triton compiles a kernel again for a pointer that 16 does not divide


@dataclass(frozen=True, slots=True)
class GraphTensors:
    """What a graph of n tokens reads: prompts first, then decode rows.

    token_ids   [n] int64
    slots       [n] int64, page * page_size + offset
    positions   [n] int32
    sampled     [num_prompts + decode rows] int64, the tokens whose logits are computed; None for all of them
    is_pending  [decode rows] bool, whether the host does not know the token yet; None without decode rows
    chosen_at   [decode rows] int64, where it is then among the latest tokens
    parts       the attention's, one for each kind of rows
    """

    token_ids: Tensor
    slots: Tensor
    positions: Tensor
    sampled: Tensor | None
    is_pending: Tensor | None
    chosen_at: Tensor | None
    parts: list[PhasePart]


@dataclass(frozen=True, slots=True)
class _Host:
    """The same memory on the host. Empty arrays for what the graph has no rows for."""

    token_ids: NDArray[np.int64]
    slots: NDArray[np.int64]
    sampled: NDArray[np.int64]
    chosen_at: NDArray[np.int64]
    positions: NDArray[np.int32]
    cu_seqlens: NDArray[np.int32]
    context_lens: NDArray[np.int32]
    page_table: NDArray[np.int32]
    is_pending: NDArray[np.bool_]


@dataclass(slots=True)
class _Memory:
    """One of two pinned buffers, and what the latest `fill` of it has left there."""

    source: Tensor  # bytes
    key: GraphKey | None = None
    tables: "list[array[int]]" = field(default_factory=list)  # what the rows of its page table hold


@dataclass(frozen=True, slots=True)
class _Layout:
    hosts: tuple[_Host, ...]  # one for each memory
    tensors: GraphTensors
    num_bytes: int


class GraphInputs:
    """All graphs share one buffer on the device, for only one runs at a time; each key lays it out for itself.

    On the host there are two, used in turns: one is filled while the device may still have to copy the other.
    """

    def __init__(
        self,
        keys: Iterable[GraphKey],
        *,
        num_prompts: int,
        page_size: int,
        num_pages: int,
        max_context: int,
        device: torch.device,
    ) -> None:
        """`num_prompts` that a graph takes. `num_pages`: those that sequences may own; padding writes behind them."""
        self._num_prompts = num_prompts
        self._page_size = page_size
        self._max_context = max_context
        keys = list(keys)
        most = max(key.num_tokens for key in keys)
        # Several padding tokens may share a slot of nobody's page; what it holds is of no account.
        self._padding_slots = num_pages * page_size + np.arange(most) % page_size
        num_bytes = max(_num_bytes(self._sections(key)) for key in keys)
        is_cuda = device.type == "cuda"
        self._memories = [_Memory(torch.zeros(num_bytes, dtype=torch.uint8, pin_memory=is_cuda)) for _ in range(2)]
        self._turn = 0
        self._device = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
        # One query a decode row, padding included: the same for every batch.
        self._one_query_each = torch.arange(1 + most, dtype=torch.int32, device=device)
        self._layouts = {key: self._layout(key) for key in keys}

    def tensors(self, key: GraphKey) -> GraphTensors:
        """What a graph of this key reads."""
        return self._layouts[key].tensors

    def fill(self, key: GraphKey, batch: Batch, chosen_at: Mapping[Sequence, int]) -> None:
        """Write a batch that the key is for, and start its copy to the device. The copy before the latest must be done.

        Padding rows have no context, so that they read no page, and write to a page that nobody reads.
        `chosen_at`: where the device has the tokens that are PENDING here.
        """
        layout = self._layouts[key]
        self._turn = 1 - self._turn
        memory, host = self._memories[self._turn], layout.hosts[self._turn]
        if key is not memory.key:
            memory.key, memory.tables = key, [_NO_PAGES] * (0 if key.decode is None else key.decode.size)
        start = 0
        if key.prefill is not None:
            self._fill_prompts(host, key.prefill, batch)
            start = key.prefill.size
        if key.decode is not None:
            rows = slice(start, start + batch.num_rows - batch.num_prefill)
            self._fill_rows(host, rows, batch)
            _fill_tokens(host, rows, batch, chosen_at)
            _fill_tables(host, memory.tables, batch)
            self._pad(host, rows.stop, start + key.decode.size)
        num_bytes = layout.num_bytes
        self._device[:num_bytes].copy_(memory.source[:num_bytes], non_blocking=True)

    def _fill_prompts(self, host: _Host, part: PartKey, batch: Batch) -> None:
        size, num_prompts = self._page_size, batch.num_prefill
        ends = list(accumulate(batch.query_lens[:num_prompts]))
        for row, (stop, length) in enumerate(zip(ends, batch.query_lens, strict=False)):
            start = stop - length
            host.token_ids[start:stop] = batch.sequences[row].tokens[:length]
            places = np.arange(length)
            host.positions[start:stop] = places
            table = np.array(batch.page_tables[row], dtype=np.int64)
            host.slots[start:stop] = table[places // size] * size + places % size
        self._pad(host, ends[-1], part.size)
        host.cu_seqlens[0] = 0
        host.cu_seqlens[1 : num_prompts + 1] = ends
        host.cu_seqlens[num_prompts + 1 :] = ends[-1]
        host.sampled[:num_prompts] = ends
        host.sampled[:num_prompts] -= 1
        host.sampled[num_prompts : self._num_prompts] = 0
        host.sampled[self._num_prompts :] = np.arange(part.size, part.size + host.sampled.size - self._num_prompts)

    def _fill_rows(self, host: _Host, rows: slice, batch: Batch) -> None:
        """Everything of the decode rows but their tokens and page tables."""
        size, first = self._page_size, batch.num_prefill
        contexts = np.array(batch.context_lens[first:], dtype=np.int64)
        last = contexts - 1
        host.slots[rows] = np.array([table[-1] for table in batch.page_tables[first:]]) * size + last % size
        host.positions[rows] = last
        host.context_lens[: contexts.size] = contexts
        host.context_lens[contexts.size :] = 0

    def _pad(self, host: _Host, start: int, stop: int) -> None:
        """Make the tokens [start, stop) such that they disturb nobody."""
        host.token_ids[start:stop] = 0
        host.slots[start:stop] = self._padding_slots[: stop - start]
        host.positions[start:stop] = 0

    def _longest(self, longest: Bucket) -> int:
        """The most tokens of a sequence in this bucket."""
        return min(longest.hi or self._max_context, self._max_context)

    def _table_width(self, part: PartKey) -> int:
        return -(-self._longest(part.longest) // self._page_size)

    def _sections(self, key: GraphKey) -> list[tuple[torch.dtype, int]]:
        """dtype and number of elements of the arrays of `_Host`, in its order."""
        num_rows = 0 if key.decode is None else key.decode.size
        num_prompts = 0 if key.prefill is None else self._num_prompts
        return [
            (torch.int64, key.num_tokens),
            (torch.int64, key.num_tokens),
            (torch.int64, num_prompts and num_prompts + num_rows),
            (torch.int64, num_rows),
            (torch.int32, key.num_tokens),
            (torch.int32, num_prompts and num_prompts + 1),
            (torch.int32, num_rows),
            (torch.int32, 0 if key.decode is None else num_rows * self._table_width(key.decode)),
            (torch.bool, num_rows),
        ]

    def _layout(self, key: GraphKey) -> _Layout:
        sections = self._sections(key)
        device = _views(self._device, sections)
        token_ids, slots, sampled, chosen_at, positions, cu_seqlens, context_lens, page_table, is_pending = device
        parts = []
        if key.prefill is not None:
            parts.append(self._prefill_part(key.prefill, cu_seqlens))
        if key.decode is not None:
            parts.append(self._decode_part(key, key.decode, context_lens, page_table))
        return _Layout(
            tuple(_host(key, _views(memory.source, sections)) for memory in self._memories),
            GraphTensors(
                token_ids,
                slots,
                positions,
                sampled=None if key.prefill is None else sampled,
                is_pending=None if key.decode is None else is_pending,
                chosen_at=None if key.decode is None else chosen_at,
                parts=parts,
            ),
            _num_bytes(sections),
        )

    def _prefill_part(self, part: PartKey, cu_seqlens: Tensor) -> PhasePart:
        longest = min(part.size, self._longest(part.longest))
        return PhasePart(
            phase=Phase.PREFILL,
            tokens=slice(0, part.size),
            batch=AttentionBatch(
                cu_seqlens_q=cu_seqlens, max_seqlen_q=longest, max_context=longest, cu_seqlens_k=cu_seqlens
            ),
            num_sequences=self._num_prompts,
            num_tokens=part.size,
        )

    def _decode_part(self, key: GraphKey, part: PartKey, context_lens: Tensor, page_table: Tensor) -> PhasePart:
        return PhasePart(
            phase=Phase.DECODE,
            tokens=slice(key.num_tokens - part.size, key.num_tokens),
            batch=AttentionBatch(
                cu_seqlens_q=self._one_query_each[: part.size + 1],
                max_seqlen_q=1,
                max_context=self._longest(part.longest),
                page_table=page_table.view(part.size, -1),
                context_lens=context_lens,
            ),
            num_sequences=part.size,
            num_tokens=part.size,
        )


def _fill_tokens(host: _Host, rows: slice, batch: Batch, chosen_at: Mapping[Sequence, int]) -> None:
    """The tokens of the decode rows, or where they will be found."""
    first, num_rows = batch.num_prefill, rows.stop - rows.start
    sequences = batch.sequences[first:]
    host.token_ids[rows] = [
        seq.tokens[context_len - 1] for seq, context_len in zip(sequences, batch.context_lens[first:], strict=True)
    ]
    is_pending = host.token_ids[rows] == PENDING
    host.is_pending[:num_rows] = is_pending
    host.is_pending[num_rows:] = False
    pending = zip(sequences, is_pending.tolist(), strict=True)
    host.chosen_at[:num_rows] = [chosen_at[seq] if is_due else 0 for seq, is_due in pending]
    host.chosen_at[num_rows:] = 0


def _fill_tables(host: _Host, tables: "list[array[int]]", batch: Batch) -> None:
    for row, table in enumerate(batch.page_tables[batch.num_prefill :]):
        if table != tables[row]:  # one step in page_size adds a page; comparing is a fifth of writing
            host.page_table[row, : len(table)] = table
            tables[row] = table


def _host(key: GraphKey, views: list[Tensor]) -> _Host:
    arrays = [view.numpy() for view in views]
    if key.decode is not None:
        arrays[7] = arrays[7].reshape(key.decode.size, -1)
    return _Host(*arrays)


def _views(memory: Tensor, sections: list[tuple[torch.dtype, int]]) -> list[Tensor]:
    """The sections, one after another in bytes of memory."""
    views, start = [], 0
    for dtype, size in sections:
        stop = start + size * dtype.itemsize
        views.append(memory[start:stop].view(dtype))
        start = _aligned(stop)
    return views


def _num_bytes(sections: list[tuple[torch.dtype, int]]) -> int:
    return sum(_aligned(dtype.itemsize * size) for dtype, size in sections)


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
