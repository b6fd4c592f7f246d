"""Which tokens the next step computes: continuous batching, chunked prefill, admission and preemption by pages."""

from array import array
from collections import deque
from dataclasses import dataclass
from itertools import chain

from kernels.shape import Phase
from server.engine.pages import PagePool
from server.engine.sequence import Batch, Sequence, Status, phase_of


class SequenceTooLong(Exception):
    """The prompt leaves no room for a single new token, however empty the server is."""


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    max_model_len: int  # tokens of a sequence
    max_num_seqs: int  # sequences that run at once
    max_num_batched_tokens: int  # tokens of a step


class Scheduler:
    """First come, first served. The running sequences are always the oldest ones, in order of arrival:

        running (own pages)   | waiting (own none)
        oldest ......... latest | oldest .......... latest

    because only the head of the waiting is admitted, and only the latest of the running is preempted (to that head).
    So the oldest sequence of all always makes progress, and nobody starves.
    """

    def __init__(self, limits: SchedulerLimits, pool: PagePool) -> None:
        """Raises ValueError when a limit is below 1."""
        if min(limits.max_model_len, limits.max_num_seqs, limits.max_num_batched_tokens) < 1:
            raise ValueError(f"every limit must be at least 1, got {limits}")
        self._limits = limits
        self._pool = pool
        self._running: dict[str, Sequence] = {}
        self._waiting: deque[Sequence] = deque()
        # Pages kept free at an admission, so that what runs can grow for a while before it must preempt the newcomer.
        self._headroom = max(1, pool.num_pages // 100)

    @property
    def max_len(self) -> int:
        """The most tokens a sequence may have: the model's limit, or all pages there are."""
        return min(self._limits.max_model_len, self._pool.num_pages * self._pool.page_size)

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_pages(self) -> int:
        return self._pool.num_pages

    @property
    def num_pages_used(self) -> int:
        return self._pool.num_used

    @property
    def num_waiting_tokens(self) -> int:
        """Prompt tokens not yet computed (after a preemption the generated tokens are prompt too)."""
        prefilling = (seq.num_uncomputed for seq in self._running.values() if not seq.is_decoding)
        return sum(chain(prefilling, (seq.num_uncomputed for seq in self._waiting)))

    @property
    def is_idle(self) -> bool:
        return not self._running and not self._waiting

    def check_integrity(self) -> None:
        """Prove that exactly the running sequences own pages. Raises IntegrityError."""
        self._pool.check_integrity(self._running)

    def add(self, seq: Sequence) -> None:
        """Queue a new sequence behind all others. Raises SequenceTooLong."""
        if len(seq.tokens) >= self.max_len:
            message = f"the prompt has {len(seq.tokens)} tokens, the limit is {self.max_len} with one to generate"
            raise SequenceTooLong(message)
        self._waiting.append(seq)

    def finish(self, seq: Sequence) -> None:
        """Drop a waiting or running sequence and free its pages."""
        if self._running.pop(seq.request_id, None) is None:
            self._waiting.remove(seq)
        self._pool.release(seq.request_id)
        seq.status = Status.FINISHED

    def is_complete(self, seq: Sequence, num_tokens: int) -> bool:
        """Whether a sequence of that many tokens, its prompt included, has all that it may have."""
        return num_tokens - seq.num_prompt >= seq.sampling.max_tokens or num_tokens >= self.max_len

    def plan(self, now: float) -> Batch | None:
        """The next batch at time `now` (seconds): decode tokens first, then chunks of prompts, oldest first.

        None when there is nothing to compute. The caller launches the batch, calls `advance`, and appends a token (or
        PENDING, when it plans on before it knows them) to the sequences of the sampled rows. A sequence whose last
        token is still to come is not planned, one that is preempted before its token is known waits for it.
        """
        num_preempted = self._make_room()
        budget = self._limits.max_num_batched_tokens
        work: list[tuple[Sequence, int]] = []
        prefilling = []
        for seq in self._running.values():
            if not seq.is_decoding:
                prefilling.append(seq)
            elif budget and not self._awaits_end(seq):
                work.append((seq, 1))
                budget -= 1
        for seq in prefilling:
            if budget:
                work.append((seq, min(seq.num_uncomputed, budget)))
                budget -= work[-1][1]
        if not num_preempted:
            self._admit(work, budget, now)
        return self._batch(work, num_preempted) if work else None

    def advance(self, batch: Batch) -> None:
        """Record that `batch` is launched; call it before the new tokens are appended."""
        for seq, context_len in zip(batch.sequences, batch.context_lens, strict=True):
            seq.num_computed = context_len
            if not seq.num_generated:
                seq.num_chunks += 1

    def _awaits_end(self, seq: Sequence) -> bool:
        """Whether the token that is on its way is its last one."""
        return seq.is_pending and self.is_complete(seq, len(seq.tokens))

    def _make_room(self) -> int:
        """Give each decoding sequence the page of its next token; the latest arrivals pay. Returns how many did."""
        num_preempted = 0
        for seq in list(self._running.values()):
            if self._awaits_end(seq):
                continue
            while seq.status is Status.RUNNING and not self._pool.grow(seq.request_id, len(seq.tokens)):
                self._preempt(next(reversed(self._running.values())))
                num_preempted += 1
        return num_preempted

    def _preempt(self, seq: Sequence) -> None:
        """Take the pages back; its tokens, generated ones included, become a prompt to compute again."""
        del self._running[seq.request_id]
        self._pool.release(seq.request_id)
        seq.status = Status.WAITING
        seq.num_computed = 0
        seq.num_preemptions += 1
        self._waiting.appendleft(seq)

    def _admit(self, work: list[tuple[Sequence, int]], budget: int, now: float) -> None:
        """Start waiting sequences while tokens, seats and pages for their whole prompts last; extends `work`."""
        while budget and self._waiting and len(self._running) < self._limits.max_num_seqs:
            seq = self._waiting[0]
            if seq.is_pending:
                return
            headroom = self._headroom if self._running else 0
            if self._pool.pages_for(len(seq.tokens)) + headroom > self._pool.num_free:
                return
            self._pool.grow(seq.request_id, len(seq.tokens))
            self._running[seq.request_id] = self._waiting.popleft()
            seq.status = Status.RUNNING
            if seq.scheduled_at is None:
                seq.scheduled_at = now
            work.append((seq, min(len(seq.tokens), budget)))
            budget -= work[-1][1]

    def _batch(self, work: list[tuple[Sequence, int]], num_preempted: int) -> Batch:
        parts: dict[Phase, list[tuple[Sequence, int, int]]] = {phase: [] for phase in Phase}
        for seq, query_len in work:
            context_len = seq.num_computed + query_len
            parts[phase_of(query_len, context_len)].append((seq, query_len, context_len))
        rows = [*parts[Phase.PREFILL], *parts[Phase.EXTEND], *parts[Phase.DECODE]]
        return Batch(
            sequences=tuple(seq for seq, _, _ in rows),
            query_lens=tuple(query_len for _, query_len, _ in rows),
            context_lens=tuple(context_len for _, _, context_len in rows),
            page_tables=tuple(self._table(seq, context_len) for seq, _, context_len in rows),
            sampled_rows=tuple(i for i, (seq, _, context_len) in enumerate(rows) if context_len == len(seq.tokens)),
            num_prefill=len(parts[Phase.PREFILL]),
            num_extend=len(parts[Phase.EXTEND]),
            num_preempted=num_preempted,
        )

    def _table(self, seq: Sequence, context_len: int) -> "array[int]":
        return self._pool.table(seq.request_id)[: self._pool.pages_for(context_len)]
