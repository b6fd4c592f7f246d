"""Drafts by the model's own head, which computes the tokens of each step too, behind the model.

An entry of the head's pages at position p is made of the model's output of token p and of token p + 1. So behind a step
it computes those of the step's tokens whose next token is known by then; of a sequence whose newest token has just been
chosen the last of these gives the first drafted token, and each drafted token, computed by the head alone, another.

Behind a step of few rows that only verifies, the head is launched with the step, before anybody knows what holds: it
computes all tokens, each with the one that the step has chosen behind it, and drafts one behind each. Which of those is
the first drafted token of a sequence is known when the step is. Entries of tokens that do not hold are written over, as
the model's own are. What is drafted stays on the device, where the step that verifies reads it.
"""

import logging
from array import array
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Protocol

from server.engine.scheduling.pages import PagePool
from server.engine.scheduling.sequence import PENDING, Batch, Sequence, SequenceStatus

logger = logging.getLogger(__name__)

# Of a step, behind which the head drafts behind each token that may hold. Of more it waits for what holds: to draft
# takes the GPU longer then than the host to read.
FEW_ROWS = 8


@dataclass(frozen=True, slots=True)
class HeadRow:
    """Tokens of a sequence that the head computes behind a step.

    row, num_before   of the batch, and how many tokens of it come before the first one
    first             its place in the sequence
    next_ids          the token behind each; PENDING for the one that the step has chosen there, which only verifies
    table             page numbers that cover all of them
    num_drafting      the last of them, so many, behind each of which a token is drafted
    """

    sequence: Sequence
    row: int
    num_before: int
    first: int
    next_ids: list[int]
    table: "array[int]"
    num_drafting: int


@dataclass(frozen=True, slots=True)
class DraftedRow:
    """A drafted token that the head computes, for one more.

    place     of the token among those of the latest pass
    position  of the head's entry that it makes: the place of the token before it
    """

    sequence: Sequence
    place: int
    position: int
    table: "array[int]"


class Head(Protocol):
    """Computes a draft head; see server/engine/execution/head_steps.py. It raises nothing but what ends the engine."""

    def follow(self, batch: Batch, rows: SequenceOf[HeadRow]) -> bool:
        """Compute rows behind the latest step, which was `batch`; the first tokens are drafted.

        Returns False where the head cannot be computed, now or ever again.
        """

    def go_on(self, rows: SequenceOf[DraftedRow]) -> bool:
        """Compute drafted tokens, and draft one behind each. Returns False likewise."""

    def take(self, places: SequenceOf[int]) -> list[int]:
        """Return tokens that were drafted since `follow`, by their places in the order of the calls; wait for them."""


class HeadDrafter:
    """Keeps the head's pages as far as the model's own, and drafts from them. One is the drafter of one engine."""

    def __init__(self, head: Head, pool: PagePool, *, most_rows: int, row_tokens: int) -> None:
        """`most_rows`: that choose a token in a step behind which some are drafted.

        `row_tokens`: of a row that verifies.
        """
        self.head = head
        self.pool = pool
        self._most_rows = most_rows
        self._row_tokens = row_tokens
        self._is_lost = False
        self._followed: Batch | None = None  # when it was launched
        self._num_first = 0  # tokens of the first pass
        self._places: dict[Sequence, tuple[int, int]] = {}  # among those, and the tokens of the sequence

    def follow_at_once(self, batch: Batch) -> None:
        """Have the head compute the tokens of a step that is launched, where it need not know what holds of them.

        Then the device goes on with it while the host reads the step.
        """
        self._followed = None
        only_verifies = batch.verifies and not batch.num_prefill and not batch.num_extend
        if self._is_lost or not only_verifies or batch.num_rows > min(FEW_ROWS, self._most_rows):
            return
        if any(seq.matcher is not None for seq in batch.sequences):  # its token is chosen later
            return
        rows = []
        for row, (seq, length, stop) in enumerate(
            zip(batch.sequences, batch.query_lens, batch.context_lens, strict=True)
        ):
            rows.append(HeadRow(seq, row, 0, stop - length, [PENDING] * length, self._table(seq, stop), length))
        self._is_lost = not self.head.follow(batch, rows)
        self._followed = batch

    def follow(self, batch: Batch, tokens: SequenceOf[SequenceOf[int]]) -> None:
        """Have the head compute the tokens of a step that is computed; `tokens` are those that it has chosen and hold.

        Call it when drafts that do not hold are taken back, and before others may find the pages.
        """
        self._places = {}
        if self._is_lost:
            return
        if batch is self._followed:
            self._note_holding(batch, tokens)
            return
        drawn = dict(zip(batch.drawn_sequences, tokens, strict=True))
        is_on = sum(map(bool, tokens)) <= self._most_rows
        rows = [self._row(batch, row, seq, drawn.get(seq), is_on=is_on) for row, seq in enumerate(batch.sequences)]
        rows += [self._row(batch, fork.row, fork.sequence, drawn[fork.sequence], is_on=is_on) for fork in batch.forks]
        found = sorted((it for it in rows if it is not None), key=self._phase)
        if not found:
            return
        if len(found) <= FEW_ROWS:
            found = [self._drafting_behind_each(it) for it in found]
        self._is_lost = not self.head.follow(batch, found)
        ends = [*accumulate(it.num_drafting for it in found)]
        self._num_first = ends[-1]
        self._places = {
            it.sequence: (end - 1, it.first + len(it.next_ids) + 1)
            for it, end in zip(found, ends, strict=True)
            if it.num_drafting
        }

    def _note_holding(self, batch: Batch, tokens: SequenceOf[SequenceOf[int]]) -> None:
        """Note where the first drafted tokens are behind what holds of a step that was followed at once."""
        ends = [*accumulate(batch.query_lens)]
        self._num_first = ends[-1]
        for seq, length, stop, end, new in zip(
            batch.sequences, batch.query_lens, batch.context_lens, ends, tokens, strict=True
        ):
            if new:
                self._places[seq] = end - length + len(new) - 1, stop - length + len(new) + 1

    def _drafting_behind_each(self, row: HeadRow) -> HeadRow:
        """Return a row of few tokens as the head computes it behind few rows."""
        num_tokens = len(row.next_ids)
        is_few = row.first and 1 < num_tokens <= self._row_tokens
        return replace(row, num_drafting=num_tokens) if is_few and row.num_drafting else row

    def _phase(self, row: HeadRow) -> int:
        """Return the place of a row's phase in a step: whole prompts, chunks, few tokens."""
        return 0 if not row.first else 1 + (len(row.next_ids) <= self._row_tokens)

    def _row(
        self, batch: Batch, row: int, seq: Sequence, chosen: "SequenceOf[int] | None", *, is_on: bool
    ) -> HeadRow | None:
        """Return what the head computes of a row of the batch; None where that is nothing."""
        if seq.status is not SequenceStatus.RUNNING:
            return None
        start = batch.context_lens[row] - batch.query_lens[row]
        first = start
        if seq is not batch.sequences[row]:  # a fork has pages of its own from the last one of the prompt on
            size = self.pool.page_size
            first = max(start, (batch.context_lens[row] - 1) // size * size)
        known = seq.tokens[first + 1 : batch.context_lens[row] + 1]
        if known and known[-1] == PENDING:
            known[-1:] = chosen[:1] if chosen else []
        if not known:
            return None
        table = self._table(seq, first + len(known))
        return HeadRow(seq, row, first - start, first, known, table, num_drafting=int(is_on and bool(chosen)))

    def _table(self, seq: Sequence, num_tokens: int) -> "array[int]":
        return self.pool.pages(seq.request_id)[: self.pool.pages_for(num_tokens)]

    def draft(self, wanted: SequenceOf[tuple[Sequence, int]]) -> list[list[int]]:
        """Draft so many tokens of each sequence, or none; it has pages for all of them. Return their places."""
        found: list[list[int]] = [[] for _ in wanted]
        latest: dict[int, int] = {}  # by index in `wanted`, of its latest token among those of its pass
        for index, (seq, most) in enumerate(wanted):
            place, num_tokens = self._places.get(seq, (0, -1))
            if num_tokens == len(seq.tokens) and most > 0:
                latest[index] = place
        self._places = {}
        start, num_of_pass = 0, self._num_first
        while latest:
            for index, place in latest.items():
                found[index].append(start + place)
            going = [index for index in latest if len(found[index]) < wanted[index][1]]
            rows = [self._drafted(wanted[index][0], latest[index], len(found[index])) for index in going]
            if not rows:
                break
            if not self.head.go_on(rows):
                self._is_lost = True
                break
            start, num_of_pass = start + num_of_pass, len(rows)
            latest = {index: place for place, index in enumerate(going)}
        return found

    def take(self, places: SequenceOf[SequenceOf[int]]) -> list[list[int]]:
        """Return the drafted tokens at the places that `draft` has returned; waits for them."""
        ids = iter(self.head.take([place for own in places for place in own]))
        return [[next(ids) for _ in own] for own in places]

    def _drafted(self, seq: Sequence, place: int, num_drafted: int) -> DraftedRow:
        """Return a sequence's latest drafted token of `num_drafted`, for one more."""
        num_tokens = len(seq.tokens) - 1 + num_drafted
        return DraftedRow(seq, place, num_tokens - 1, self._table(seq, num_tokens))
