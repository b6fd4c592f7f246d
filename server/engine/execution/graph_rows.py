"""The decode rows among the inputs of a CUDA graph: what is in the host's memory already is not written again."""

from array import array
from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from server.engine.execution.graph_memory import HostArrays
from server.engine.scheduling.sequence import PENDING, Batch, Sequence


class HostRows:
    """The decode rows of one graph in one of the host's buffers, which other graphs use too."""

    def __init__(self, host: HostArrays, size: int, page_size: int, padding_slots: "NDArray[np.int64]") -> None:
        """`size` rows, the last tokens of the graph. `padding_slots` [size] int64."""
        self._host = host
        self._page_size = page_size
        self._padding_slots = padding_slots
        self._start, self._stop = host.token_ids.size - size, host.token_ids.size
        self._tables: tuple[array[int], ...] = ()  # of the rows that are there
        self._num_pages = np.zeros(size, np.int64)  # of each table, that are there
        self._last_pages = np.zeros(size, np.int64)  # the first slot of the last of them
        self._chosen_at: Mapping[Sequence, int] | None = None  # that all rows are read by; None where some were known

    def forget(self) -> None:
        """Another graph uses the memory from now on. No sequence is held any more, for there are many graphs."""
        self._tables, self._chosen_at = (), None

    def fill(self, batch: Batch, first: int, chosen_at: Mapping[Sequence, int]) -> None:
        """Write the rows of a batch from `first` on, at least one, and padding behind them."""
        host, tables = self._host, batch.page_tables[first:]
        num_rows = len(tables)
        if tables is not self._tables:  # somebody came or went
            self._replace(tables)
        contexts = np.array(batch.context_lens[first:], np.int64)
        places = contexts - 1
        pages, offsets = np.divmod(places, self._page_size)
        self._add_pages(pages + 1)
        rows = slice(self._start, self._start + num_rows)
        host.positions[rows] = places
        host.slots[rows] = self._last_pages[:num_rows] + offsets
        host.context_lens[:num_rows] = contexts
        self._fill_tokens(batch, first, chosen_at)

    def _replace(self, tables: "tuple[array[int], ...]") -> None:
        """Note whose rows are to be there. A table that is the same as before has only grown."""
        num_rows, num_known = len(tables), len(self._tables)
        self._num_pages[num_known:] = 0
        for row, (table, known) in enumerate(zip(tables, self._tables, strict=False)):
            if table is not known:
                self._num_pages[row] = 0
        self._tables, self._chosen_at = tables, None
        host = self._host
        host.pad(self._start + num_rows, self._stop, self._padding_slots)
        host.context_lens[num_rows:] = host.chosen_at[num_rows:] = 0
        host.is_pending[num_rows:] = False

    def _add_pages(self, num_pages: "NDArray[np.int64]") -> None:
        """Write the pages that are not there yet: of a row, one in page_size steps."""
        known = self._num_pages[: num_pages.size]
        for row in (known != num_pages).nonzero()[0].tolist():
            pages, table = slice(known[row], num_pages[row]), self._tables[row]
            self._host.page_table[row, pages] = table[pages]
            self._last_pages[row] = table[num_pages[row] - 1] * self._page_size
        known[:] = num_pages

    def _fill_tokens(self, batch: Batch, first: int, chosen_at: Mapping[Sequence, int]) -> None:
        """The rows' tokens, or where they will be found."""
        sequences, lens = batch.sequences[first:], batch.context_lens[first:]
        if chosen_at is self._chosen_at and sequences[0].tokens[lens[0] - 1] == PENDING:
            return  # one step chose the tokens of all rows, so none of them is known
        host, num_rows = self._host, len(sequences)
        token_ids = [seq.tokens[num_tokens - 1] for seq, num_tokens in zip(sequences, lens, strict=True)]
        pending = [token_id == PENDING for token_id in token_ids]
        host.token_ids[self._start : self._start + num_rows] = token_ids
        host.is_pending[:num_rows] = pending
        places = [chosen_at[seq] if is_due else 0 for seq, is_due in zip(sequences, pending, strict=True)]
        host.chosen_at[:num_rows] = places
        self._chosen_at = chosen_at if all(pending) else None
