"""Drafts by the model's own head, which computes the tokens of each step too, behind the model.

An entry of the head's pages at position p is made of the model's output of token p and of token p + 1. So behind a step
it computes those of the step's tokens whose next token is known by then; of a sequence whose newest token has just been
chosen the last of these gives the first drafted token, and each drafted token, computed by the head alone, another.
"""

import logging
from array import array
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from typing import Protocol

from server.engine.scheduling.pages import PagePool
from server.engine.scheduling.sequence import PENDING, Batch, Sequence, SequenceStatus

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class HeadRow:
    """Tokens of a sequence that the head computes behind a step.

    row, num_before   of the batch, and how many tokens of it come before the first one
    first             its place in the sequence
    next_ids          the token behind each
    table             page numbers that cover all of them
    is_drafted_for    whether a token is drafted behind the last one
    """

    sequence: Sequence
    row: int
    num_before: int
    first: int
    next_ids: list[int]
    table: "array[int]"
    is_drafted_for: bool


@dataclass(frozen=True, slots=True)
class DraftedRow:
    """A drafted token that the head computes, for one more.

    place     of the token among those that were drafted last
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

    def take(self) -> list[list[int]]:
        """Return what was drafted since `follow`, in the order of the rows of each call; waits for it."""


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
        self._places: dict[Sequence, tuple[int, int]] = {}  # among the drafted tokens, and the tokens of the sequence

    def follow(self, batch: Batch, tokens: SequenceOf[SequenceOf[int]]) -> None:
        """Have the head compute the tokens of a step that is computed; `tokens` are those that it has chosen and hold.

        Call it when drafts that do not hold are taken back, and before others may find the pages.
        """
        self._places = {}
        if self._is_lost:
            return
        drawn = dict(zip(batch.drawn_sequences, tokens, strict=True))
        is_on = sum(map(bool, tokens)) <= self._most_rows
        rows = [self._row(batch, row, seq, drawn.get(seq), is_on=is_on) for row, seq in enumerate(batch.sequences)]
        rows += [self._row(batch, fork.row, fork.sequence, drawn[fork.sequence], is_on=is_on) for fork in batch.forks]
        found = sorted((it for it in rows if it is not None), key=self._phase)
        if not found:
            return
        self._is_lost = not self.head.follow(batch, found)
        drafted = [it for it in found if it.is_drafted_for]
        self._places = {it.sequence: (place, it.first + len(it.next_ids) + 1) for place, it in enumerate(drafted)}

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
        stop = first + len(known)
        table = self.pool.pages(seq.request_id)[: self.pool.pages_for(stop)]
        return HeadRow(seq, row, first - start, first, known, table, is_drafted_for=is_on and bool(chosen))

    def draft(self, wanted: SequenceOf[tuple[Sequence, int]]) -> list[list[int]]:
        """Return so many drafted tokens of each sequence, or none; it has pages for all of them."""
        found: list[list[int]] = [[] for _ in wanted]
        places: dict[int, list[int]] = {}  # by index in `wanted`, of each of its tokens among those of its pass
        for index, (seq, most) in enumerate(wanted):
            place, num_tokens = self._places.get(seq, (0, -1))
            if num_tokens == len(seq.tokens) and most:
                places[index] = [place]
        num_drafted = 1
        while rows := [self._drafted(*wanted[it], own, num_drafted) for it, own in places.items()]:
            left = [(index, row) for index, row in zip(places, rows, strict=True) if row is not None]
            if not left:
                break
            if not self.head.go_on([row for _, row in left]):
                self._is_lost = True
                return found
            for place, (index, _) in enumerate(left):
                places[index].append(place)
            num_drafted += 1
        drafted, self._places = self.head.take() if places else [], {}
        for index, own in places.items():
            found[index] = [of_pass[place] for of_pass, place in zip(drafted, own, strict=False)]
        return found

    def _drafted(self, seq: Sequence, most: int, places: list[int], num_drafted: int) -> DraftedRow | None:
        """Return a sequence's latest drafted token of `num_drafted`, for one more; None where it has enough."""
        if len(places) != num_drafted or most <= num_drafted:
            return None
        num_tokens = len(seq.tokens) - 1 + num_drafted
        table = self.pool.pages(seq.request_id)[: self.pool.pages_for(num_tokens)]
        return DraftedRow(seq, places[-1], num_tokens - 1, table)
