"""Choice of the next step's tokens: continuous batching, chunked prefill, admission and preemption by pages."""

import math
from array import array
from bisect import insort
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from heapq import merge

from kernels.recurrence.sizes import CHUNK
from kernels.vocabulary.shape import Phase
from server.engine.scheduling.decode_rows import DecodeRows
from server.engine.scheduling.drafter import Drafter
from server.engine.scheduling.embeddings import EmbeddingPool, SpanName
from server.engine.scheduling.head_drafter import HeadDrafter
from server.engine.scheduling.page_keys import PageKeys
from server.engine.scheduling.page_seals import PageSeals
from server.engine.scheduling.pages import PagePool
from server.engine.scheduling.seal_chain import SealChain
from server.engine.scheduling.sequence import PENDING, Batch, BatchFork, Sequence, SequenceStatus, phase_of
from server.engine.scheduling.states import BatchStates, StatePool, StateWrite
from server.protocol.messages import StateCounts

# Prompt tokens that may be admitted, for each of a prompt's own, before no new arrival can go ahead of it. Simulated
# for an 8B on an H200 at half load with log-normal lengths, the p99 of TTFT falls from 1.6 s to 0.2 s up to 2k tokens
# and to 1.0 s up to 8k, and rises from 2.6 to 2.9 s above. At 4 that is 3.2 s; at 1, 2k to 8k gain a tenth only.
_PATIENCE = 2
_BORROWED_SHARE = 8  # of this share of all pages cached content may make room for what is borrowed


_Row = tuple[Sequence, int, int]  # a sequence, its tokens to compute in the step, its tokens in pages after it


class SequenceTooLong(Exception):
    """The prompt leaves no room for a single new token, however empty the server is."""


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    max_model_len: int  # tokens of a sequence
    max_num_seqs: int  # sequences that run at once
    max_num_batched_tokens: int  # tokens of a step
    max_num_interleaved_tokens: int | None = None  # prompt tokens of a step that others wait for; None: no such limit
    max_attended_keys: int | None = None  # that all prompt tokens of a step attend to together; None: no such limit
    max_drafted_tokens: int = 0  # of a sequence, that one step verifies
    max_drafting_seqs: int | None = None  # decoding sequences, with more of which none is drafted; None: any number
    max_embedded_tokens: int = 0  # of the prompts that are computed at once, that have embeddings of their own
    max_written_tokens: int | None = None  # of these, that a step makes embeddings for; None: no such limit
    chunk: int | None = None  # positions: no row of a step has tokens of two multiples of it; None: rows may


@dataclass(frozen=True, slots=True)
class Borrowed:
    """Memory of the pool that belongs to no sequence of the scheduler.

    page_table  numbers of its pages, of `page_size` tokens
    slots       of a recurrent state: the one that is zero, and its own; None for a model without
    """

    page_table: "array[int]"
    page_size: int
    slots: tuple[int, int] | None


@dataclass(slots=True)
class _StepPlan:
    """The prompts that the scheduler has chosen for a step so far, beside its decode rows.

    prompts  each with the number of its tokens to compute
    forks    each with the sequence whose prompt the step ends; `page_copies` are theirs
    num_prefix_queried_tokens  of prompts that were admitted for the first time, looked up in the pages of others
    num_prefix_hit_tokens      those of them that were found there
    written  the embedded spans that are written before the step, with their tokens
    drafted_at  see Batch
    """

    num_decode: int
    num_preempted: int
    prompts: list[tuple[Sequence, int]] = field(default_factory=list)
    forks: list[tuple[Sequence, Sequence]] = field(default_factory=list)
    page_copies: list[tuple[int, int]] = field(default_factory=list)
    num_prefix_queried_tokens: int = 0
    num_prefix_hit_tokens: int = 0
    written: dict[SpanName, int] = field(default_factory=dict)
    drafted_at: tuple[int, ...] = ()

    def batch(self, decode: Batch, pool: PagePool) -> Batch:
        """Return the batch of these prompts and the decode rows."""
        whole, chunks, single = self._by_phase()
        decoding = zip(decode.sequences, decode.query_lens, decode.context_lens, strict=True)
        rows = [*whole, *chunks, *decoding, *single]
        sequences, query_lens, context_lens = zip(*rows, strict=True)
        row_of = {seq: row for row, seq in enumerate(sequences)} if self.forks else {}
        return Batch(
            sequences=sequences,
            query_lens=query_lens,
            context_lens=context_lens,
            page_tables=(*_tables(whole, pool), *_tables(chunks, pool), *decode.page_tables, *_tables(single, pool)),
            sampled_rows=tuple([row for row, (seq, _, n) in enumerate(rows) if n == len(seq.tokens)]),
            num_prefill=len(whole),
            num_extend=len(chunks),
            num_preempted=self.num_preempted,
            num_prefix_queried_tokens=self.num_prefix_queried_tokens,
            num_prefix_hit_tokens=self.num_prefix_hit_tokens,
            forks=tuple([BatchFork(row_of[leader], seq) for leader, seq in self.forks]),
            page_copies=tuple(self.page_copies),
            verifies=decode.verifies,
            drafted_at=decode.drafted_at,
        )

    def _by_phase(self) -> tuple[list[_Row], list[_Row], list[_Row]]:
        """Return whole prompts, chunks behind a context, and single tokens, which are decode rows."""
        rows: dict[Phase, list[_Row]] = {phase: [] for phase in Phase}
        for seq, query_len in self.prompts:
            context_len = seq.num_computed + query_len
            rows[phase_of(query_len, context_len)].append((seq, query_len, context_len))
        return rows[Phase.PREFILL], rows[Phase.EXTEND], rows[Phase.DECODE]


class Scheduler:
    """Decode rows first, then prompts in the order of their priority, the lowest first, and of their rank:

        rank = prompt tokens admitted before it came + 2 x its own tokens

    A short prompt thus goes ahead of a long one that waits or is being computed, and prompts of equal length keep their
    order. A prompt that does not end with a step leaves half of that step to later prompts that do. Waiting prompts are
    admitted by rank, each with pages for its whole prompt: where the first does not fit, no later one is admitted. When
    a running sequence needs a page and none is left, the latest arrival of those that run with the highest priority is
    preempted.

    Other answers to a prompt wait until the step that ends it is planned: then they share its full pages, get a copy of
    the last one, and their first tokens are drawn from the same logits. Those that find no room then, or lose their
    pages later, are computed like any prompt.

    No prompt starves by others of its own priority; one waits for as long as those of a lower priority come. A rank
    never changes, and those of new arrivals grow with every prompt that is admitted: when
    2 x its own tokens were admitted, no new arrival goes ahead of a prompt any more. The first by rank gets at least
    half of each step's tokens for prompts. Only a preemption undoes computation, and only so that an earlier arrival
    gets a page for its generated tokens; generated tokens are never lost.

    Where the pool has states, a sequence that runs has a slot beside its pages. A snapshot is taken at a prompt's last
    page border, from which the same prompt or a longer one goes on, and where a prompt leaves pages that others have
    without a snapshot: the next one that shares them finds it.

    Drafted tokens take what is left of a step's tokens and of the pages when its prompts are chosen. A step that only
    verifies folds no token into a state that may be taken back. One with prompts folds all of its rows, so that drafts
    end before a border of the states' chunks there.
    """

    def __init__(
        self,
        limits: SchedulerLimits,
        pool: PagePool,
        *,
        shares_pages: bool = False,
        looks_ahead: bool = False,
        seals: PageSeals | None = None,
    ) -> None:
        """`shares_pages`: whether sequences find the pages of others that began with the same tokens.

        `looks_ahead`: whether what a page holds of its last token depends on the token behind, as of a draft head.
        `seals` of the pool's pages; None for such that know no bytes.
        Raises ValueError when a limit is below 1, or when not every sequence that runs can compute a token a step.
        """
        interleaved = limits.max_num_interleaved_tokens
        self._max_interleaved = limits.max_num_batched_tokens if interleaved is None else interleaved
        least = min(limits.max_model_len, limits.max_num_seqs, limits.max_num_batched_tokens, self._max_interleaved)
        if least < 1:
            raise ValueError(f"every limit must be at least 1, got {limits}")
        if limits.max_num_seqs > limits.max_num_batched_tokens:
            raise ValueError(f"a step must have a token for every sequence, got {limits}")
        self._limits = limits
        self._pool = pool
        self._max_len = min(limits.max_model_len, pool.num_pages * pool.page_size)
        self._shares_pages = shares_pages
        self._looks_ahead = looks_ahead
        self._num_undrafted_steps = 0
        self._seals = PageSeals(pool) if seals is None else seals
        self._embeddings = EmbeddingPool(limits.max_embedded_tokens)
        self._running: dict[str, Sequence] = {}  # computing a prompt, decoding, or waiting for the last token
        self._prefilling: dict[str, Sequence] = {}  # those that compute a prompt
        self._decoding = DecodeRows(limits.max_num_seqs)
        self._waiting: list[Sequence] = []  # by rank
        self._num_following = 0  # sequences that wait for a leader
        self._borrowers: set[str] = set()  # who has pages of the pool without a sequence here
        self._num_arrived = 0
        self._num_admitted_tokens = 0  # of prompts, each counted once
        self._latest_states: tuple[tuple[Sequence, ...], BatchStates] | None = None  # of decode rows alone
        # Pages kept free at an admission, so that what runs can grow for a while before it must preempt a sequence.
        self._headroom = max(1, pool.num_pages // 100)

    @property
    def pool(self) -> PagePool:
        """The pages; nobody but the scheduler changes them."""
        return self._pool

    @property
    def max_len(self) -> int:
        """The most tokens a sequence may have: the model's limit, or all pages there are."""
        return self._max_len

    @property
    def max_embedded_tokens(self) -> int:
        """The most tokens of a prompt that may have embeddings of their own."""
        return self._embeddings.num_rows

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting) + self._num_following

    @property
    def num_pages(self) -> int:
        return self._pool.num_pages

    def take_page_mismatches(self) -> int:
        """Return how many pages were dropped since the last call, because they did not hold what they should."""
        return self._seals.take_mismatches()

    def take_undrafted_steps(self) -> int:
        """Return in how many steps since the last call too many sequences decoded for any to be drafted for."""
        found, self._num_undrafted_steps = self._num_undrafted_steps, 0
        return found

    def take_state_counts(self) -> StateCounts | None:
        """Return the slots of recurrent states, and how prompts began since the last call; None without states."""
        return None if self._pool.states is None else self._pool.states.take_counts()

    @property
    def num_pages_used(self) -> int:
        return self._pool.num_used

    @property
    def num_waiting_tokens(self) -> int:
        """Prompt tokens not yet computed (after a preemption the generated tokens are prompt too)."""
        left = [seq.num_uncomputed for seq in self._prefilling.values() if not seq.is_decoding or seq.followers]
        return sum(left) + sum([seq.num_uncomputed for seq in self._waiting])

    @property
    def is_idle(self) -> bool:
        return not self._running and not self._waiting

    def check_integrity(self) -> None:
        """Prove that exactly the running sequences own pages, and rows of embeddings. Raises IntegrityError."""
        self._pool.check_integrity([*self._running, *self._borrowers])
        self._embeddings.check_integrity(self._running.values())

    def borrow(self, owner: str, num_tokens: int) -> Borrowed | None:
        """Return pages for `num_tokens` tokens that no sequence has; None if too few.

        Where none is left that is not cached, those least recently used make room, up to a share of the pool. Pages
        that are borrowed count as used until `give_back`, and none of them can be found by others.
        """
        most_cached = self._pool.num_pages // _BORROWED_SHARE
        if not self._pool.admit_unused(owner, num_tokens, most_cached=most_cached):
            return None
        self._borrowers.add(owner)
        states = self._pool.states
        slots = None if states is None else (states.zero_slot, states.slot(owner))
        return Borrowed(self._pool.table(owner), self._pool.page_size, slots)

    def chunk(self, num_computed: int, num_left: int) -> int:
        """Return how many of the tokens left behind `num_computed` one step may compute beside nothing else."""
        most = min(num_left, self._max_interleaved, self._limits.max_num_batched_tokens)
        most = min(most, self._left_of_chunk(num_computed))
        keys = self._limits.max_attended_keys
        return most if keys is None else max(1, min(most, _tokens_fitting(keys, num_computed)))

    def _left_of_chunk(self, num_computed: int) -> int:
        """Return how many tokens behind `num_computed` are in the first one's chunk."""
        chunk = self._limits.chunk
        return self._limits.max_model_len if chunk is None else chunk - num_computed % chunk

    def _num_fitting(self, num_keys: float, seq: Sequence) -> int:
        """Return how many of a sequence's tokens one row may compute that attend to at most so many keys together."""
        most = min(seq.num_uncomputed, self._left_of_chunk(seq.num_computed))
        if _num_keys(seq.num_computed, most) <= num_keys:
            return most
        return min(most, _tokens_fitting(num_keys, seq.num_computed))

    def give_back(self, owner: str) -> None:
        """Take back what `owner` has borrowed, if it has."""
        if owner in self._borrowers:
            self._borrowers.remove(owner)
            self._pool.release(owner)

    def add(self, seq: Sequence) -> None:
        """Queue a new sequence, and those that follow it. Raises SequenceTooLong."""
        num_tokens = len(seq.tokens)
        generates = seq.sampling.pooling is None
        if num_tokens + generates > self.max_len:
            room = " with one to generate" if generates else ""
            message = f"the prompt has {num_tokens} tokens, the limit is {self.max_len}{room}"
            raise SequenceTooLong(message)
        for it in (seq, *seq.followers):
            it.rank = (self._num_admitted_tokens + _PATIENCE * num_tokens, self._num_arrived)
            self._num_arrived += 1
            it.max_len = min(it.num_prompt + it.sampling.max_tokens, self._max_len)
            if self._shares_pages and it.sampling.prompt_logprobs is None:  # a scored prompt is computed whole
                it.page_keys = PageKeys(self._pool.page_size, it.cache_salt, it.embedded, looks_ahead=self._looks_ahead)
                it.page_seals = SealChain(self._pool.page_size, it.cache_salt, it.tokens, it.embedded, it.positions)
        self._num_following += len(seq.followers)
        insort(self._waiting, seq, key=_rank)

    def finish(self, seq: Sequence, *, is_sound: bool = True) -> None:
        """Drop a waiting or running sequence and free its pages; unless `is_sound`, no prompt may find them again.

        The first of those that follow it leads the others from now on, and computes the prompt from its beginning.
        """
        if seq.request_id in self._running:
            self._leave(seq)
        elif seq.leader is None:
            self._waiting.remove(seq)
        else:
            self._num_following -= 1
        heir = seq.leave_group()
        if heir is not None:
            self._num_following -= 1
            insort(self._waiting, heir, key=_rank)
        self._pool.release(seq.request_id, is_sound=is_sound)
        seq.status = SequenceStatus.FINISHED

    def plan(self, now: float, drafter: Drafter | HeadDrafter | None = None) -> Batch | None:
        """Return the next batch at time `now` (seconds), None when there is nothing to compute.

        With a drafter, decoding sequences get drafted tokens behind their newest ones, all of which must be known: of a
        head PENDING ones, unless the host must know them to launch the step. When such a batch is computed, `rollback`
        says for each sequence of it which tokens hold, before `settle`.

        The caller launches the batch, calls `advance`, and appends a token to each sequence that is sampled or forked:
        PENDING while the token is not known. Where the launch fails it calls `abandon`. When the batch has been
        computed the caller calls `settle`. It may plan one more batch before that: a sequence whose last token is then
        still pending has no row in it.
        """
        for seq in list(self._prefilling.values()):
            if seq.is_decoding and not seq.followers:  # with these, one token is left of its prompt: they fork with it
                self._decode(seq)
        num_preempted = self._make_room()
        step = _StepPlan(len(self._decoding), num_preempted)
        if self._prefilling or (self._waiting and len(self._running) < self._limits.max_num_seqs):
            self._add_prompts(step, sorted(self._prefilling.values(), key=_rank), now)
        if not step.prompts and not step.num_decode:
            return None
        states = self._pool.states
        if drafter is not None and self._draft(drafter, step):
            decode = self._decoding.drafted_batch(num_preempted, step.drafted_at)
        else:
            decode = self._decoding.batch(num_preempted)
        batch = step.batch(decode, self._pool) if step.prompts else decode
        if self._embeddings.num_used:
            batch = self._with_embeddings(batch)
        return batch if states is None else replace(batch, states=self._states_of(batch, states, step.prompts))

    def advance(self, batch: Batch) -> None:
        """Record that `batch`, the latest, is launched; call it before the new tokens are appended."""
        verifies_alone = batch.verifies and not batch.num_prefill and not batch.num_extend
        for seq, context_len in zip(batch.sequences, batch.context_lens, strict=True):
            seq.folded = seq.num_computed // CHUNK * CHUNK if verifies_alone else None
            seq.num_computed = context_len
            if context_len <= seq.num_prompt and not seq.num_generated:
                seq.num_chunks += 1
        if self._embeddings.num_used:
            for seq in batch.sequences:
                if seq.held and seq.num_computed >= seq.held[-1].span.stop:
                    self._embeddings.release(seq)
        for seq in batch.sequences[: batch.num_prefill + batch.num_extend]:
            if seq.page_keys is not None:  # here, while the device computes, and not between it and the first token
                num_full = self._num_full(seq, seq.num_computed)
                seq.page_keys.first(num_full, seq.tokens)
                if num_full and seq.page_seals is not None:
                    seq.page_seals[num_full - 1]  # this one too is hashed now
        for fork in batch.forks:
            seq, leader = fork.sequence, batch.sequences[fork.row]
            seq.num_computed = leader.num_computed
            seq.num_published = self._num_full(leader, leader.num_computed)  # the leader will have published them
            seq.num_chunks, seq.num_cached, seq.scheduled_at = leader.num_chunks, leader.num_cached, leader.scheduled_at
            seq.page_keys = None if leader.page_keys is None else leader.page_keys.copy()
            seq.is_forked = True
        states = self._pool.states
        if states is not None and states.has_beginnings:
            states.note_launched({seq.request_id for seq in batch.sequences})
        if not batch.verifies:  # else how many tokens a sequence gets is known when the batch is computed
            self._decoding.advance()

    def rollback(self, seq: Sequence, num_tokens: int) -> None:
        """Cut a running sequence to its first `num_tokens` tokens, of which the newest is not computed."""
        seq.rollback(num_tokens)
        self._pool.shrink(seq.request_id, num_tokens)
        self._decoding.rollback(seq, self._border(seq))

    def abandon(self, batch: Batch) -> None:
        """Take back the forks of `batch`, the latest, which was not launched: they wait for their leaders again.

        Its snapshots are given up: they are planned again with its rows. Tokens that were drafted for it are forgotten.
        """
        self._embeddings.put_back(batch.embeddings)
        if self._pool.states is not None and batch.states is not None:
            for write in batch.states.writes:
                self._pool.states.cancel(write)
        for row in batch.rows_of(Phase.VERIFY):
            seq = batch.sequences[row]
            if seq.num_drafted:
                self.rollback(seq, len(seq.tokens) - seq.num_drafted)
        for fork in batch.forks:
            seq = fork.sequence
            self._leave(seq)
            self._pool.release(seq.request_id)
            seq.status = SequenceStatus.WAITING
            batch.sequences[fork.row].lead([seq])
            self._num_following += 1

    def settle(self, batch: Batch) -> None:
        """Record that `batch` is computed: other sequences can find its full pages, unless they were taken by then."""
        if not self._shares_pages:
            return
        page_size, first = self._pool.page_size, batch.num_prefill + batch.num_extend
        if batch.verifies:
            for seq in batch.sequences:
                self._publish(seq, self._num_full(seq, seq.num_computed))
        else:
            last = self._looks_ahead % page_size  # of a page's tokens, or the one behind
            for row, context_len in enumerate(batch.context_lens):
                if row < first or context_len % page_size == last:  # a single token fills a page, or changes nothing
                    self._publish(batch.sequences[row], self._num_full(batch.sequences[row], context_len))
        if self._pool.states is not None and batch.states is not None:
            self._publish_snapshots(batch, batch.states.writes, self._pool.states)

    def _num_full(self, seq: Sequence, num_tokens: int) -> int:
        """Return how many pages the first `num_tokens` tokens fill that can be named."""
        if self._looks_ahead and (num_tokens >= len(seq.tokens) or seq.tokens[num_tokens] == PENDING):
            num_tokens -= 1
        return num_tokens // self._pool.page_size

    def _publish(self, seq: Sequence, num_full: int) -> None:
        """Let other sequences find the first `num_full` pages of a running sequence."""
        if seq.page_keys is not None and seq.status is SequenceStatus.RUNNING and num_full > seq.num_published:
            keys = seq.page_keys.first(num_full, seq.tokens)[seq.num_published :]
            self._pool.publish(seq.request_id, seq.num_published, keys)
            assert seq.page_seals is not None
            pages = self._pool.pages(seq.request_id)[seq.num_published : num_full]
            self._seals.seal(seq.page_seals, pages, seq.num_published)
            seq.num_published = num_full

    def _publish_snapshots(self, batch: Batch, writes: tuple[StateWrite, ...], states: StatePool) -> None:
        """Let other sequences find the snapshots that are still pending, as far as they find the pages before them."""
        for write in writes:
            if not states.is_pending(write):
                continue
            seq = batch.sequences[write.row]
            assert seq.page_keys is not None
            key = seq.page_keys.first(write.num_tokens // self._pool.page_size, seq.tokens)[-1]
            if key in self._pool.page_of_key:
                states.publish(write, key)
            else:
                states.cancel(write)

    def _states_of(self, batch: Batch, states: StatePool, prompts: list[tuple[Sequence, int]]) -> BatchStates:
        """Return the slots of a planned batch, those of its snapshots and forks included."""
        if not prompts and self._latest_states is not None and self._latest_states[0] is batch.sequences:
            return self._latest_states[1]
        names = [seq.request_id for seq in batch.sequences]
        sources, targets = tuple(map(states.source, names)), tuple(map(states.slot, names))
        writes = [
            StateWrite(fork.row, batch.context_lens[fork.row], states.slot(fork.sequence.request_id))
            for fork in batch.forks
        ]
        row_of = {seq: row for row, seq in enumerate(batch.sequences)} if prompts and self._shares_pages else {}
        for seq, _ in prompts if row_of else ():
            for num_pages in self._snapshot_borders(seq, batch.context_lens[row_of[seq]]):
                write = states.reserve(seq.request_id, row_of[seq], num_pages * self._pool.page_size)
                writes += [] if write is None else [write]
        found = BatchStates(sources, targets, tuple(writes))
        is_steady = not prompts and not states.has_beginnings
        self._latest_states = (batch.sequences, found) if is_steady else None
        return found

    def _snapshot_borders(self, seq: Sequence, context_len: int) -> list[int]:
        """Return how many pages are before each snapshot of a chunk that ends with `context_len` tokens, none or two.

        That is the last border of the prompt, which its last token is always behind, and the last one up to which the
        pages are found by others.
        """
        if seq.page_keys is None:
            return []
        page_size, found = self._pool.page_size, self._pool.page_of_key
        first, last = seq.num_computed // page_size, context_len // page_size
        num_shared, last_of_prompt = 0, (len(seq.tokens) - 1) // page_size
        for key in seq.page_keys.each(min(last, last_of_prompt), seq.tokens):
            if key not in found:
                break
            num_shared += 1
        return [num_pages for num_pages in sorted({num_shared, last_of_prompt}) if first < num_pages <= last]

    def _draft(self, drafter: Drafter | HeadDrafter, step: _StepPlan) -> bool:
        """Append drafted tokens to decoding sequences, as far as the step and free pages have room. Return whether any.

        No sequence is preempted for them.
        """
        most_seqs = self._limits.max_drafting_seqs
        if most_seqs is not None and len(self._decoding) > most_seqs:
            self._num_undrafted_steps += 1
            return False
        if self._pool.states is not None and step.prompts and not any(count > 1 for _, count in step.prompts):
            return False  # prompts of one token may need their states copied, which a step that verifies alone does not
        if isinstance(drafter, HeadDrafter):
            return self._draft_by_head(drafter, step)
        left, is_any = self._room_for_drafts(step), False
        for seq in self._decoding.sequences:
            most = self._most_drafted(seq, left, step)
            drafted = drafter(seq, most)[:most] if most > 0 else []
            drafted = drafted[: self._grown(seq, len(drafted))]
            left -= len(drafted)
            is_any |= self._append_drafted(seq, drafted)
        return is_any

    def _draft_by_head(self, drafter: HeadDrafter, step: _StepPlan) -> bool:
        """Do so for all sequences at once."""
        left, wanted = self._room_for_drafts(step), []
        for seq in self._decoding.sequences:
            most = self._most_drafted(seq, left, step)
            most = self._grown(seq, most) if most > 0 else 0
            wanted.append((seq, most))
            left -= most
        is_any, places = False, drafter.draft(wanted)
        if any(own and seq.reads_drafts for (seq, _), own in zip(wanted, places, strict=True)):
            tokens = drafter.take(places)
        else:
            tokens = [[PENDING] * len(own) for own in places]
            step.drafted_at = tuple([place for own in places for place in own])
        for (seq, _), drafted in zip(wanted, tokens, strict=True):
            if not drafted:
                self._pool.shrink(seq.request_id, len(seq.tokens))
            is_any |= self._append_drafted(seq, drafted)
        return is_any

    def _room_for_drafts(self, step: _StepPlan) -> int:
        """Return how many drafted tokens a step may have."""
        num_prompt_tokens = sum(num_tokens for _, num_tokens in step.prompts)
        return self._limits.max_num_batched_tokens - step.num_decode - num_prompt_tokens

    def _most_drafted(self, seq: Sequence, left: int, step: _StepPlan) -> int:
        """Return the most drafted tokens of a sequence that fit the step, which has room for `left`; or less than 1."""
        num_tokens = len(seq.tokens)
        most = min(left, self._limits.max_drafted_tokens, seq.max_len - num_tokens - 1) if seq.is_drafted_for else 0
        most = min(most, self._left_of_chunk(num_tokens - 1) - 1)  # behind the newest token, which is computed too
        if self._pool.states is not None and step.prompts:
            most = min(most, CHUNK - 1 - num_tokens % CHUNK)
        return most

    def _grown(self, seq: Sequence, num_drafted: int) -> int:
        """Give a sequence pages for so many drafted tokens, or for none; return for how many it has pages."""
        num_tokens = len(seq.tokens)
        if self._pool.grow(seq.request_id, num_tokens + num_drafted):
            return num_drafted
        return min(num_drafted, self._pool.room_of(seq.request_id) - num_tokens)

    def _append_drafted(self, seq: Sequence, drafted: list[int]) -> bool:
        seq.tokens += drafted
        seq.num_drafted = len(drafted)
        return bool(drafted)

    def _decode(self, seq: Sequence) -> None:
        """Give a sequence whose prompt is computed a row in every step from now on."""
        del self._prefilling[seq.request_id]
        self._decoding.add(seq, self._pool.pages(seq.request_id), self._border(seq))

    def _border(self, seq: Sequence) -> int:
        """Return the number of tokens up to which a sequence needs no page and does not wait for its last token."""
        return min(self._pool.room_of(seq.request_id), seq.max_len - 1)

    def _leave(self, seq: Sequence) -> None:
        """Remove a sequence from those that run."""
        del self._running[seq.request_id]
        self._prefilling.pop(seq.request_id, None)
        self._decoding.discard(seq)
        if seq.held:
            self._embeddings.release(seq)

    def _with_embeddings(self, batch: Batch) -> Batch:
        """Return a batch with what its step needs of the embeddings that sequences hold."""
        rows = zip(batch.sequences, batch.query_lens, batch.context_lens, strict=True)
        held = [(seq, end - length, end) for seq, length, end in rows if seq.held]
        names = {name: None for seq, _, end in held for name in self._embeddings.to_write(seq, end)}
        has_embedded = any(seq.has_embedded(start, end) for seq, start, end in held)
        return replace(batch, embeddings=self._embeddings.take_unwritten(names), has_embedded=has_embedded)

    def _whole(self, seq: Sequence, most: int, room: int) -> int:
        """Return how many of a sequence's next `most` tokens leave no span half computed.

        That is the span that comes next, where it is longer than `most` and the step has `room` for it.
        """
        if not seq.whole_spans:
            return most
        fitting = seq.border(seq.num_computed + most) - seq.num_computed
        if fitting > 0:
            return fitting
        least = seq.next_border(seq.num_computed) - seq.num_computed
        return least if least <= room else 0

    def _reach(self, seq: Sequence, most: int, step: _StepPlan) -> int:
        """Return how many of a sequence's next `most` tokens the step may compute, by the embeddings they need."""
        if not seq.held or self._limits.max_written_tokens is None:
            return most
        num_left = max(0, self._limits.max_written_tokens - sum(step.written.values()))
        return self._embeddings.reach(seq, most, num_left, step.written)

    def _make_room(self) -> int:
        """Give each decoding sequence the page of its next token, preempting others. Return how many.

        A sequence whose last token is being computed needs no page, and loses its row.
        """
        num_preempted = 0
        for seq in self._decoding.past_border():
            num_tokens = len(seq.tokens)
            if num_tokens >= seq.max_len and seq.is_pending:
                self._decoding.discard(seq)
                continue
            while seq.status is SequenceStatus.RUNNING and not self._pool.grow(seq.request_id, num_tokens):
                self._preempt(max(self._running.values(), key=_arrival))
                num_preempted += 1
            if seq.status is SequenceStatus.RUNNING:
                self._decoding.set_border(seq, self._border(seq))
        return num_preempted

    def _preempt(self, seq: Sequence) -> None:
        """Take a sequence's pages; its tokens, generated ones included, become a prompt to compute again."""
        self._leave(seq)
        self._pool.release(seq.request_id)
        seq.status = SequenceStatus.WAITING
        seq.num_computed = seq.num_published = 0
        seq.folded = None
        seq.num_preemptions += 1
        insort(self._waiting, seq, key=_rank)

    def _add_prompts(self, step: _StepPlan, prompts: list[Sequence], now: float) -> None:
        """Add running `prompts` and waiting ones by rank until the step is full: whole ones, and a chunk of one."""
        left = self._limits.max_num_batched_tokens - step.num_decode
        if step.num_decode:  # clients wait for their next token
            left = min(left, self._max_interleaved)
        keys_left = math.inf if self._limits.max_attended_keys is None else self._limits.max_attended_keys
        is_open = not step.num_preempted
        num_added = 0
        long: Sequence | None = None
        for seq in merge(prompts, list(self._waiting), key=_rank):
            if not left or keys_left <= 0:
                break
            if seq.status is SequenceStatus.WAITING:
                most = min(left, self._num_fitting(keys_left, seq))
                if not is_open or (long is not None and seq.num_uncomputed > most):
                    continue
                is_open = self._admit(seq, step, now)
                if not is_open:
                    continue
            # A token at least, whatever it attends to: the first by rank makes progress.
            most = self._whole(seq, min(left, max(1, self._num_fitting(keys_left, seq))), left)
            if seq.num_uncomputed <= self._reach(seq, most, step):
                chunk = seq.num_uncomputed
                step.prompts.append((seq, chunk))
                self._fork(seq, step)
            elif long is None:
                half = -(-min(left, self._max_interleaved) // 2)
                most = self._whole(seq, min(half, max(1, self._num_fitting(keys_left / 2, seq))), left)
                chunk = num_of_long = self._reach(seq, most, step)
                if not chunk:
                    continue
                long = seq
            else:
                continue
            if seq.held:
                step.written |= self._embeddings.to_write(seq, seq.num_computed + chunk)
            num_added += chunk
            left -= chunk
            keys_left -= _num_keys(seq.num_computed, chunk)
        if long is not None:
            # The long prompt takes what is left, but while others wait for this step no more than may be interleaved.
            rest = min(left, max(0, self._max_interleaved - num_added)) if step.num_decode or step.prompts else left
            whole = num_of_long + rest
            keys_of_long = keys_left + _num_keys(long.num_computed, num_of_long)
            whole = min(whole, max(num_of_long, self._num_fitting(keys_of_long, long)))
            whole = self._reach(long, self._whole(long, whole, whole), step)
            if long.held:
                step.written |= self._embeddings.to_write(long, long.num_computed + whole)
            step.prompts.append((long, whole))

    def _fork(self, leader: Sequence, step: _StepPlan) -> None:
        """Start what follows a sequence whose prompt this step ends; what finds no room waits like any prompt."""
        followers, leader.followers = leader.followers, []
        for seq in followers:
            seq.leader = None
            self._num_following -= 1
            copies = None
            if len(self._running) < self._limits.max_num_seqs:
                owner, num_tokens = seq.request_id, len(leader.tokens)
                copies = self._pool.fork(
                    leader.request_id, owner, num_tokens, headroom=self._headroom, has_own_last=self._looks_ahead
                )
            if copies is None:
                insort(self._waiting, seq, key=_rank)
                continue
            self._running[seq.request_id] = self._prefilling[seq.request_id] = seq
            seq.status = SequenceStatus.RUNNING
            step.forks.append((leader, seq))
            step.page_copies += copies

    def _up_to_borders(self, seq: Sequence, keys: Iterable[bytes]) -> Iterable[bytes]:
        """Yield the names of pages that are found, up to the last one that ends within none of the whole spans."""
        if not seq.whole_spans:
            yield from keys
            return
        waiting = []
        for num_pages, key in enumerate(keys, start=1):
            if key not in self._pool.page_of_key:
                return
            waiting.append(key)
            end = num_pages * self._pool.page_size
            if seq.border(end) == end:
                yield from waiting
                waiting.clear()

    def _admit(self, seq: Sequence, step: _StepPlan, now: float) -> bool:
        """Start a waiting sequence if fewer than max_num_seqs run, and there is room for it.

        That is pages for all of its tokens, and rows for the embeddings of those that are not in pages yet.
        """
        if len(self._running) >= self._limits.max_num_seqs or seq.is_pending:
            return False
        num_tokens, page_size = len(seq.tokens), self._pool.page_size
        # The last token is computed in any case: its logits give the next one.
        headroom = self._headroom if self._running else 0
        while True:
            keys: Iterable[bytes] = ()
            if seq.page_keys is not None and seq.page_seals is not None:
                named = seq.page_keys.each((num_tokens - 1) // page_size, seq.tokens)
                keys = self._up_to_borders(seq, self._seals.sound(seq.page_seals, named))
            num_hit_pages = self._pool.admit(seq.request_id, num_tokens, keys, headroom=headroom)
            if num_hit_pages is None:
                return False
            if not self._seals.drop_differing(self._pool.table(seq.request_id, num_hit_pages)):
                break
            self._pool.release(seq.request_id)
        if seq.embedded and not self._embeddings.hold(seq, num_hit_pages * page_size):
            self._pool.release(seq.request_id)
            return False
        self._waiting.remove(seq)
        self._running[seq.request_id] = self._prefilling[seq.request_id] = seq
        seq.status = SequenceStatus.RUNNING
        seq.num_computed = num_hit_pages * page_size
        seq.num_published = num_hit_pages
        if seq.scheduled_at is None:
            seq.scheduled_at = now
            self._num_admitted_tokens += num_tokens
            seq.num_cached = seq.num_computed
            if seq.page_keys is not None:
                step.num_prefix_queried_tokens += num_tokens
                step.num_prefix_hit_tokens += seq.num_cached
        return True


def _tables(rows: list[_Row], pool: PagePool) -> "list[array[int]]":
    return [pool.table(seq.request_id, pool.pages_for(num_tokens)) for seq, _, num_tokens in rows]


def _num_keys(num_computed: int, num_tokens: int) -> int:
    """Return how many keys so many tokens behind `num_computed` attend to, one after the other."""
    return num_tokens * num_computed + num_tokens * (num_tokens + 1) // 2


def _tokens_fitting(num_keys: float, num_computed: int) -> int:
    """Return how many tokens behind `num_computed` attend to at most so many keys together."""
    behind = num_computed + 0.5
    return max(0, int(math.sqrt(behind * behind + 2 * max(0.0, num_keys)) - behind))


def _rank(seq: Sequence) -> tuple[int, int, int]:
    return seq.priority, *seq.rank


def _arrival(seq: Sequence) -> tuple[int, int]:
    return seq.priority, seq.rank[1]
