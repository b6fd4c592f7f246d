"""Writes batches into step buffers: the only code between sequences and the bytes that workers get."""

from array import array
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from kernels.vocabulary.shape import Phase
from server.engine.execution.graph_keys import GraphKey
from server.engine.execution.state_writer import write_states
from server.engine.execution.step_buffer import (
    TOKEN_ARRAYS,
    HostViews,
    PartLayout,
    StepBuffer,
    StepLayout,
    StepMemory,
    TokenArray,
    with_embedding_rows,
)
from server.engine.scheduling.sequence import PENDING, Batch, Sequence

# The width of an eager step's page table is a multiple of this: Triton compiles a kernel again for a row stride that 16
# does not divide.
_TABLE_STEP = 16


@dataclass(frozen=True, slots=True)
class _Filling:
    """A layout in one of the two host memories."""

    buffer: StepBuffer
    host: HostViews
    decode: "WrittenDecodeRows | None"


class StepWriter:
    """Two host memories, used in turns: one is filled while the device may still have to copy the other.

    So `write` may be called when the device has done the step before the latest one.
    """

    def __init__(
        self,
        *,
        page_size: int,
        num_pages: int,
        is_pinned: bool,
        token_arrays: tuple[TokenArray, ...] = TOKEN_ARRAYS,
        num_slots: int | None = None,
        window: int | None = None,
    ) -> None:
        """`num_pages`: those that sequences may own; padding is written to the page behind them.

        `num_slots`: of recurrent states likewise; None for a model without them. `window`: the shortest one of a layer,
        which bounds how far before a token its span begins; None where no layer has one.
        """
        self._window = window
        self._page_size = page_size
        self._num_pages = num_pages
        self._is_pinned = is_pinned
        self._token_arrays = token_arrays
        self._num_slots = num_slots
        self._padding_slots = np.zeros(0, np.int64)
        self._memories = [self._memory(0) for _ in range(2)]
        self._turn = 0
        self._latest: list[WrittenDecodeRows | None] = [None, None]  # which wrote to the memories last
        self._graphs: dict[GraphKey, tuple[_Filling, _Filling]] = {}

    def declare(self, layouts: Mapping[GraphKey, StepLayout]) -> None:
        """Lay out the inputs of graphs, all at once."""
        most = max(layout.num_tokens for layout in layouts.values())
        # Several padding tokens may share a slot of the page that no sequence owns: what it holds is never read.
        self._padding_slots = self._num_pages * self._page_size + np.arange(most) % self._page_size
        self._memories = [self._memory(max(layout.num_bytes for layout in layouts.values())) for _ in range(2)]
        for key, layout in layouts.items():
            first, second = (self._filling(key, layout, memory) for memory in self._memories)
            self._graphs[key] = first, second

    def write(self, batch: Batch, chosen_at: Mapping[Sequence, int], key: GraphKey | None = None) -> StepBuffer:
        """Write a batch with at least one row, for the graph `key`, or as it is.

        Padding rows have no context, so that they read no page, and write to a page that no sequence reads.
        `chosen_at`: where the step before has sampled the tokens that may be PENDING here, among its results.
        """
        turn = self._turn = 1 - self._turn
        if key is None:
            layout = self._layout_of(batch)
            if layout.num_bytes > self._memories[turn].data.numel():
                self._memories[turn] = self._memory(2 * layout.num_bytes)
            filling = self._filling(None, layout, self._memories[turn])
        else:
            filling = self._graphs[key][turn]
        latest = self._latest[turn]
        if latest is not filling.decode:
            if latest is not None:
                latest.forget()
            self._latest[turn] = filling.decode
        num_prompts = batch.num_rows if batch.verifies else batch.num_prefill + batch.num_extend
        if num_prompts:
            self._write_prompts(filling, batch, num_prompts)
        if filling.decode is not None:
            filling.decode.write(batch, num_prompts, chosen_at)
        if self._num_slots is not None:
            write_states(filling.host, filling.buffer.layout, batch, self._num_slots)
        if key is None and batch.sampled_rows:
            filling.host["sampled"][:] = batch.sampled_tokens
        if batch.verifies:
            _write_pending(filling.host, batch)
        has_pending = bool(batch.drafted_at) or (filling.decode is not None and filling.decode.has_pending)
        if key is None and has_pending:
            return replace(filling.buffer, has_pending=True)
        return filling.buffer

    def _memory(self, num_bytes: int) -> StepMemory:
        return StepMemory(num_bytes, torch.device("cpu"), is_pinned=self._is_pinned)

    def _filling(self, key: GraphKey | None, layout: StepLayout, memory: StepMemory) -> _Filling:
        host = memory.host_views(layout)
        decode = WrittenDecodeRows(host, layout, self._page_size, self._padding_slots) if layout.num_decode else None
        buffer = StepBuffer(key, layout, memory.data[: layout.num_bytes], has_pending=key is not None)
        return _Filling(buffer, host, decode)

    def _layout_of(self, batch: Batch) -> StepLayout:
        """Return the layout of a batch without padding."""
        parts = []
        for phase in batch.phases:
            rows = batch.rows_of(phase)
            query_lens, context_lens = (lens[rows.start : rows.stop] for lens in (batch.query_lens, batch.context_lens))
            width = 0
            if phase is not Phase.PREFILL:
                width = _rounded_up(max(len(table) for table in batch.page_tables[rows.start : rows.stop]))
            lengths = max(query_lens), max(context_lens)
            parts.append(PartLayout(phase, len(rows), sum(query_lens), width, *lengths, batch.sees_ahead(phase)))
        num_sampled = len(batch.sampled_tokens) if batch.verifies else len(batch.sampled_rows)
        num_writes = 0 if batch.states is None else len(batch.states.writes)
        num_state_writes = None if self._num_slots is None else num_writes
        arrays = with_embedding_rows(self._token_arrays) if batch.has_embedded else self._token_arrays
        return StepLayout(tuple(parts), num_sampled, arrays, num_state_writes)

    def _write_prompts(self, filling: _Filling, batch: Batch, num_prompts: int) -> None:
        """Write the rows of prefill, extend and verify, and padding up to the decode rows."""
        host, layout, size = filling.host, filling.buffer.layout, self._page_size
        token_ids, positions, slots = host["token_ids"], host["positions"], host["slots"]
        ends = list(accumulate(batch.query_lens[:num_prompts]))
        for row, (stop, length) in enumerate(zip(ends, batch.query_lens, strict=False)):
            start, context_len = stop - length, batch.context_lens[row]
            first = context_len - length
            places = np.arange(first, context_len)
            token_ids[start:stop] = batch.sequences[row].token_ids(first, context_len)
            positions[..., start:stop] = batch.sequences[row].positions_of(places)
            table = np.array(batch.page_tables[row], dtype=np.int64)
            slots[start:stop] = table[places // size] * size + places % size
            if len(layout.token_arrays) > len(TOKEN_ARRAYS):
                _write_more(host, layout, batch.sequences[row], slice(start, stop), first)
        if ends[-1] < layout.num_tokens - layout.num_decode:
            _pad(host, layout, slice(ends[-1], layout.num_tokens - layout.num_decode), self._padding_slots)
        for part in layout.parts:
            if part.phase is not Phase.DECODE:
                _write_part(host, part, batch, ends, size)
            if part.has_spans:
                _write_spans(host[f"{part.phase.value} spans"], batch, batch.rows_of(part.phase), self._window)
        if filling.buffer.key is not None and layout.num_sampled is not None:
            num_rows = layout.parts[0].num_rows
            sampled = host["sampled"]
            sampled[:num_prompts] = ends
            sampled[:num_prompts] -= 1
            sampled[num_prompts:num_rows] = 0
            sampled[num_rows:] = np.arange(layout.num_tokens - layout.num_decode, layout.num_tokens)


class WrittenDecodeRows:
    """The decode rows of one layout in one memory, which other layouts use too: only what has changed is written."""

    def __init__(self, host: HostViews, layout: StepLayout, page_size: int, padding_slots: "NDArray[np.int64]") -> None:
        size = layout.num_decode
        self._host = host
        self._layout = layout
        self._token_ids, self._positions, self._slots = host["token_ids"], host["positions"], host["slots"]
        self._context_lens: NDArray[Any] = host["decode context_lens"]
        self._page_table: NDArray[Any] = host["decode page_table"]
        self._chosen: NDArray[Any] = host["chosen_at"]
        self._is_pending: NDArray[Any] = host["is_pending"]
        self._page_size = page_size
        self._padding_slots = padding_slots
        self._start, self._stop = layout.num_tokens - size, layout.num_tokens
        self._tables: tuple[array[int], ...] = ()  # of the rows that are there
        self._num_pages = np.zeros(size, np.int64)  # of each table, that are there
        self._last_slots = np.zeros(size, np.int64)  # the first slot of the last page of each table
        self._chosen_at: Mapping[Sequence, int] | None = None  # of the step before, if it chose the tokens of all rows
        self._deltas: NDArray[np.int64] | None = None  # of the rows' positions from their tokens' places
        self._with_positions: list[tuple[int, Sequence]] = []  # rows whose prompts have positions of their own
        self.has_pending = False

    def forget(self) -> None:
        """Another layout uses the memory from now on. No sequence is held any more, for there are many layouts."""
        self._tables, self._chosen_at = (), None

    def write(self, batch: Batch, first: int, chosen_at: Mapping[Sequence, int]) -> None:
        """Write the rows of a batch from `first` on, at least one, and padding behind them."""
        tables = batch.page_tables[first:]
        num_rows = len(tables)
        if tables is not self._tables:  # a row was added or removed
            self._replace(tables)
            if self._positions.ndim > 1:
                self._note_positions(batch.sequences[first:])
        contexts = np.array(batch.context_lens[first:], np.int64)
        places = contexts - 1
        pages, offsets = np.divmod(places, self._page_size)
        self._add_pages(pages + 1)
        rows = slice(self._start, self._start + num_rows)
        self._positions[..., rows] = places if self._deltas is None else places + self._deltas
        for row, seq in self._with_positions:  # the last token of its prompt
            if places[row] < seq.num_prompt:
                self._positions[:, self._start + row] = seq.positions_of(places[row : row + 1])[:, 0]
        self._slots[rows] = self._last_slots[:num_rows] + offsets
        self._context_lens[:num_rows] = contexts
        self._write_tokens(batch, first, chosen_at)

    def _replace(self, tables: "tuple[array[int], ...]") -> None:
        """Note the page tables of the rows. A table that is the same object as before has only grown."""
        num_rows, num_before = len(tables), len(self._tables)
        self._num_pages[num_before:] = 0
        for row, (table, before) in enumerate(zip(tables, self._tables, strict=False)):
            if table is not before:
                self._num_pages[row] = 0
        self._tables, self._chosen_at = tables, None
        if num_rows < len(self._num_pages):
            _pad(self._host, self._layout, slice(self._start + num_rows, self._stop), self._padding_slots)
            self._context_lens[num_rows:] = self._chosen[num_rows:] = 0
            self._is_pending[num_rows:] = False

    def _note_positions(self, sequences: "tuple[Sequence, ...]") -> None:
        """Note the rows whose positions are not their tokens' places."""
        self._with_positions = [(row, seq) for row, seq in enumerate(sequences) if seq.positions is not None]
        self._deltas = np.array([seq.position_delta for seq in sequences]) if self._with_positions else None

    def _add_pages(self, num_pages: "NDArray[np.int64]") -> None:
        """Write the pages that are not there yet: of a row, one in page_size steps."""
        before = self._num_pages[: num_pages.size]
        changed = (before != num_pages).nonzero()[0].tolist()
        if not changed:
            return
        starts, stops, page_table = before.tolist(), num_pages.tolist(), self._page_table
        for row in changed:
            page_table[row, starts[row] : stops[row]] = self._tables[row][starts[row] : stops[row]]
        self._last_slots[changed] = [self._tables[row][stops[row] - 1] * self._page_size for row in changed]
        before[:] = num_pages

    def _write_tokens(self, batch: Batch, first: int, chosen_at: Mapping[Sequence, int]) -> None:
        """Write the rows' tokens, or where the device finds them."""
        sequences, lens = batch.sequences[first:], batch.context_lens[first:]
        if len(self._layout.token_arrays) > len(TOKEN_ARRAYS):
            for row, (seq, length) in enumerate(zip(sequences, lens, strict=True), start=self._start):
                _write_more(self._host, self._layout, seq, slice(row, row + 1), length - 1)
        if chosen_at is self._chosen_at and sequences[0].tokens[lens[0] - 1] == PENDING:
            return  # one step chose the tokens of all rows, so the host has read none of them
        num_rows = len(sequences)
        token_ids = [seq.tokens[num_tokens - 1] for seq, num_tokens in zip(sequences, lens, strict=True)]
        pending = [token_id == PENDING for token_id in token_ids]
        self._token_ids[self._start : self._start + num_rows] = token_ids
        self._is_pending[:num_rows] = pending
        places = [chosen_at[seq] if is_due else 0 for seq, is_due in zip(sequences, pending, strict=True)]
        self._chosen[:num_rows] = places
        self._chosen_at = chosen_at if all(pending) else None
        self.has_pending = any(pending)


def _write_pending(host: HostViews, batch: Batch) -> None:
    """Write where the device finds the drafted tokens that the host has not read."""
    is_pending, places = host["is_pending"], host["chosen_at"]
    is_pending[:] = host["token_ids"][-is_pending.size :] == PENDING
    places[:] = 0
    places[is_pending] = batch.drafted_at


def _write_part(host: HostViews, part: PartLayout, batch: Batch, ends: list[int], page_size: int) -> None:
    """Write cu_seqlens, context_lens and the page table of rows of another phase than decode. `ends` of all tokens.

    A row whose drafted tokens did not hold keeps their pages: more than its context reaches, and than a graph of its
    bucket has room for.
    """
    rows = batch.rows_of(part.phase)
    num_rows, start = len(rows), ends[rows.start - 1] if rows.start else 0
    cu_seqlens = host[f"{part.phase.value} cu_seqlens"]
    cu_seqlens[0] = 0
    cu_seqlens[1 : num_rows + 1] = ends[rows.start : rows.stop]
    if start:
        cu_seqlens[1 : num_rows + 1] -= start
    cu_seqlens[num_rows + 1 :] = ends[rows.stop - 1] - start
    if part.phase is not Phase.PREFILL:
        context_lens, tables = host[f"{part.phase.value} context_lens"], host[f"{part.phase.value} page_table"]
        context_lens[:num_rows] = batch.context_lens[rows.start : rows.stop]
        context_lens[num_rows:] = 0
        for index, row in enumerate(rows):
            num_pages = -(-batch.context_lens[row] // page_size)
            tables[index, :num_pages] = batch.page_tables[row][:num_pages]


def _write_spans(spans: "NDArray[Any]", batch: Batch, rows: range, window: int | None) -> None:
    """Write what the tokens of these rows see behind them. `window`: the shortest one of a layer."""
    start = 0
    for row in rows:
        length, context_len = batch.query_lens[row], batch.context_lens[row]
        seen = batch.sequences[row].seen_spans(context_len - length, context_len, window)
        spans[start : start + length] = seen
        start += length


def _write_more(host: HostViews, layout: StepLayout, seq: Sequence, tokens: slice, first: int) -> None:
    """Write the arrays that say themselves which values a sequence's tokens have, from its token `first` on."""
    for it in layout.token_arrays:
        if it.values is not None:
            host[it.name][..., tokens] = it.values(seq, first, first + tokens.stop - tokens.start)


def _pad(host: HostViews, layout: StepLayout, tokens: slice, slots: "NDArray[np.int64]") -> None:
    """Make tokens such that they change nothing that is read: they write to `slots`."""
    for it in layout.token_arrays:
        host[it.name][..., tokens] = 0
    host["slots"][tokens] = slots[: tokens.stop - tokens.start]


def _rounded_up(width: int) -> int:
    return -(-width // _TABLE_STEP) * _TABLE_STEP
