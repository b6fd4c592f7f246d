"""The rows of the sequences that compute one token a step. Most steps change only their lengths."""

from array import array
from dataclasses import replace

import numpy as np

from server.engine.scheduling.sequence import Batch, Sequence


class DecodeRows:
    """Rows that stay from step to step: a new sequence is appended, a removed one is swapped with the last.

    A row's border is the number of tokens up to which it needs nothing but its next token. Past the border the row
    needs a page, or its sequence waits for its last token.
    """

    def __init__(self, max_rows: int) -> None:
        self._sequences: list[Sequence] = []
        self._tables: list[array[int]] = []
        self._row_of: dict[Sequence, int] = {}
        self._lens = np.zeros(max_rows, np.int64)  # tokens, the newest included: the contexts of the next step
        self._borders = np.zeros(max_rows, np.int64)
        self._latest: Batch | None = None  # None after a row was added or removed

    def __len__(self) -> int:
        return len(self._sequences)

    def add(self, seq: Sequence, table: "array[int]", border: int) -> None:
        """Append a row. `table` holds the sequence's page numbers and grows with it."""
        row = self._row_of[seq] = len(self._sequences)
        self._sequences.append(seq)
        self._tables.append(table)
        self._lens[row], self._borders[row] = len(seq.tokens), border
        self._latest = None

    def discard(self, seq: Sequence) -> None:
        """Remove the row of a sequence, if it has one."""
        row = self._row_of.pop(seq, None)
        if row is None:
            return
        last, table = self._sequences.pop(), self._tables.pop()
        if last is not seq:
            end = len(self._sequences)
            self._sequences[row], self._tables[row], self._row_of[last] = last, table, row
            self._lens[row], self._borders[row] = self._lens[end], self._borders[end]
        self._latest = None

    @property
    def sequences(self) -> tuple[Sequence, ...]:
        return tuple(self._sequences)

    def past_border(self) -> list[Sequence]:
        """Return the sequences that have more tokens than their border."""
        num_rows = len(self._sequences)
        if not num_rows:  # after a pause numpy is out of the CPU's caches, and its first use takes 20 us and more
            return []
        rows = (self._lens[:num_rows] > self._borders[:num_rows]).nonzero()[0]
        return [self._sequences[row] for row in rows.tolist()]

    def set_border(self, seq: Sequence, border: int) -> None:
        self._borders[self._row_of[seq]] = border

    def rollback(self, seq: Sequence, border: int) -> None:
        """Take a sequence's tokens and border anew, if it has a row, after a step that verified drafted tokens."""
        row = self._row_of.get(seq)
        if row is not None:
            self._lens[row], self._borders[row] = len(seq.tokens), border

    def advance(self) -> None:
        """Record that every row has one more token."""
        if self._sequences:
            self._lens[: len(self._sequences)] += 1

    def batch(self, num_preempted: int) -> Batch:
        """Return all rows as one step computes them; tuples but the lengths are reused while no row comes or goes."""
        known, num_rows = self._latest, len(self._sequences)
        lens = tuple(self._lens[:num_rows].tolist()) if num_rows else ()
        if known is None:
            tables, rows = tuple(self._tables), tuple(range(num_rows))
            known = Batch(tuple(self._sequences), (1,) * num_rows, lens, tables, rows, 0, 0, num_preempted)
        else:
            same = (known.sequences, known.query_lens, lens, known.page_tables, known.sampled_rows)
            known = Batch(*same, 0, 0, num_preempted)
        self._latest = known
        return known

    def drafted_batch(self, num_preempted: int, drafted_at: tuple[int, ...]) -> Batch:
        """Return all rows as a step computes them that verifies the tokens drafted behind them.

        `drafted_at`: of those that the device alone knows.
        """
        batch = self.batch(num_preempted)
        lens = [1 + seq.num_drafted for seq in self._sequences]
        ends = [seq.num_computed + length for seq, length in zip(self._sequences, lens, strict=True)]
        query_lens, context_lens = tuple(lens), tuple(ends)
        return replace(batch, query_lens=query_lens, context_lens=context_lens, verifies=True, drafted_at=drafted_at)
