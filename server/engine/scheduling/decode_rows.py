"""The sequences that compute one token a step, kept from step to step: most steps change nothing but their lengths."""

from array import array

import numpy as np

from server.engine.scheduling.sequence import Batch, Sequence


class DecodeRows:
    """Who comes takes the last row, and who goes leaves his to the last one.

    A row's border is the longest it can be and need nothing but its next token. Behind it the row needs a page, or is
    waiting for its last token.
    """

    def __init__(self, max_rows: int) -> None:
        self._sequences: list[Sequence] = []
        self._tables: list[array[int]] = []
        self._row_of: dict[Sequence, int] = {}
        self._lens = np.zeros(max_rows, np.int64)  # tokens, the newest included: the contexts of the next step
        self._borders = np.zeros(max_rows, np.int64)
        self._latest: Batch | None = None  # None since somebody came or went

    def __len__(self) -> int:
        return len(self._sequences)

    def add(self, seq: Sequence, table: "array[int]", border: int) -> None:
        """`table`: of its pages, which grows as the sequence does."""
        row = self._row_of[seq] = len(self._sequences)
        self._sequences.append(seq)
        self._tables.append(table)
        self._lens[row], self._borders[row] = len(seq.tokens), border
        self._latest = None

    def discard(self, seq: Sequence) -> None:
        """Take a sequence out, if it is here."""
        row = self._row_of.pop(seq, None)
        if row is None:
            return
        last, table = self._sequences.pop(), self._tables.pop()
        if last is not seq:
            end = len(self._sequences)
            self._sequences[row], self._tables[row], self._row_of[last] = last, table, row
            self._lens[row], self._borders[row] = self._lens[end], self._borders[end]
        self._latest = None

    def behind_border(self) -> list[Sequence]:
        num_rows = len(self._sequences)
        if not num_rows:  # a first prompt after a pause: numpy has left the caches, to touch it takes 20 us and more
            return []
        rows = (self._lens[:num_rows] > self._borders[:num_rows]).nonzero()[0]
        return [self._sequences[row] for row in rows.tolist()]

    def set_border(self, seq: Sequence, border: int) -> None:
        self._borders[self._row_of[seq]] = border

    def advance(self) -> None:
        """Every sequence here has one more token."""
        if self._sequences:
            self._lens[: len(self._sequences)] += 1

    def batch(self, num_preempted: int) -> Batch:
        """All rows as one step computes them. While nobody comes or goes each has the same tuples, but for lengths."""
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
