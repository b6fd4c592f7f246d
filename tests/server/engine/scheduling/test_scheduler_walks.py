"""The scheduler under random traffic: conservation of pages, states and tokens, no starvation, one order."""

import random
from dataclasses import replace
from functools import cache

import pytest

from kernels.vocabulary.buckets import Bucket, bucket_of
from kernels.vocabulary.shape import Dtype, Phase
from qualification.decision.model_shapes import AttentionSignature, ServingLimits, shapes_needed
from server.engine.scheduling.pages import PagePool
from server.engine.scheduling.scheduler import Scheduler, SchedulerLimits
from server.engine.scheduling.sequence import Batch, Sequence, SequenceStatus
from server.engine.scheduling.states import StatePool
from server.protocol.messages import SamplingParams


def sequence(name: str, num_prompt: int, max_tokens: int) -> Sequence:
    sampling = SamplingParams(max_tokens=max_tokens)
    return Sequence(name, list(range(num_prompt)), num_prompt, sampling, seed=0, submitted_at=0.0)


def rows(batch: Batch) -> list[tuple[str, int, int]]:
    names = [seq.request_id for seq in batch.sequences]
    return list(zip(names, batch.query_lens, batch.context_lens, strict=True))


class Walk:
    """A scheduler under random traffic, with a ledger of its own that every batch is held against.

    contents  of each slot of a state: the tokens that it has seen, behind their salt
    """

    def __init__(self, seed: int, *, num_forks: tuple[int, ...] = (0, 0, 1, 3)) -> None:
        self.rng = random.Random(seed)
        self.num_forks = num_forks  # of a prompt, one of these
        self.num_shared = 0  # pages that forks began with
        self.page_size = self.rng.choice([1, 3, 16])
        self.seqs = self.rng.randrange(1, 9)
        self.budget = self.seqs + self.rng.randrange(1, 30)
        self.shares = self.rng.random() < 0.6
        num_slots = random.Random(seed + 100).choice([None, None, 1, self.seqs, 3 * self.seqs])
        self.states = None if num_slots is None else StatePool(num_slots)
        self.contents: dict[int, tuple[object, ...]] = {}
        self.num_resumed = 0  # from snapshots
        self.pool = PagePool(self.rng.randrange(30, 80) // self.page_size + 2, self.page_size, self.states)
        self.attended = self.rng.choice([None, None, 40, 100, 700])
        chunk = random.Random(seed + 200).choice([None, None, 2, 5])
        self.chunk = None if chunk is None else chunk * self.page_size
        interleaved = self.rng.choice([None, 1, 5, 12])
        limits = SchedulerLimits(60, self.seqs, self.budget, interleaved, self.attended, chunk=self.chunk)
        self.interleaved = limits.max_num_interleaved_tokens or self.budget
        self.subject = Scheduler(limits, self.pool, shares_pages=self.shares)
        self.alive: dict[str, Sequence] = {}  # in order of arrival
        self.computed: dict[str, int] = {}
        self.preemptions: dict[str, int] = {}
        self.ahead: dict[str, int] = {}  # tokens of later arrivals that were admitted while it waited
        self.most_waiting = 0
        self.num_found = 0
        self.num_arrived = 0

    def arrive(self) -> None:
        name = f"r{self.num_arrived}"
        seq = sequence(name, self.rng.randrange(1, self.subject.max_len), self.rng.randrange(1, 20))
        seq.tokens[0] = self.rng.randrange(2)  # half of the prompts begin alike
        seq.cache_salt = self.rng.choice([b"", b"", b"tenant"])
        self.num_arrived += 1
        names = [f"{name}-{i}" for i in range(self.rng.choice(self.num_forks))]
        seq.lead([replace(seq, request_id=it, tokens=[*seq.tokens], followers=[]) for it in names])
        self.subject.add(seq)
        for it in (seq, *seq.followers):
            self.alive[it.request_id] = it
            self.computed[it.request_id] = self.preemptions[it.request_id] = self.ahead[it.request_id] = 0

    def cancel(self) -> None:
        self.end(self.rng.choice(list(self.alive.values())), is_sound=self.rng.random() < 0.5)

    def end(self, seq: Sequence, *, is_sound: bool = True) -> None:
        self.subject.finish(seq, is_sound=is_sound)
        del self.alive[seq.request_id]

    def step(self) -> list[tuple[str, int, int]]:
        waiting = [
            seq
            for seq in self.alive.values()
            if seq.status is SequenceStatus.WAITING and not seq.num_preemptions and seq.leader is None
        ]
        self.most_waiting = max(self.most_waiting, sum(len(seq.tokens) for seq in waiting))
        streaming = [seq for seq in self.alive.values() if seq.is_decoding and not seq.followers]
        batch = self.subject.plan(now=1.0)
        assert batch is not None, "somebody is waiting and nothing is planned"
        if batch.forks and self.rng.random() < 0.2:  # it cannot be launched
            self.subject.abandon(batch)
            self.subject.check_integrity()
            assert all(fork.sequence.leader is batch.sequences[fork.row] for fork in batch.forks)
            batch = self.subject.plan(now=1.0)
            assert batch is not None
        if any(seq.is_decoding for seq in streaming):
            assert batch.num_tokens - len(streaming) <= self.interleaved
        attended = [context - i for seq, n, context in self.rows_of(batch) if seq not in streaming for i in range(n)]
        if self.attended is not None and attended:  # but for one token, so that there is progress
            assert sum(attended) - max(attended) < self.attended, "the step's prompts attend to too many keys"
        prompts = [seq for seq in self.alive.values() if seq.status is SequenceStatus.RUNNING and seq not in streaming]
        if prompts:
            first = min(prompts, key=lambda seq: seq.rank)
            assert first in batch.sequences, "the first prompt by rank makes no progress"
        self.note_who_went_ahead(waiting, batch)
        self.hold_against_ledger(batch)
        self.hold_pages_against_each_other(batch)
        self.compute_states(batch)
        self.hold_decode_rows_against_new_ones(batch)
        self.subject.advance(batch)
        self.subject.settle(batch)
        for seq in batch.drawn_sequences:
            assert seq.num_uncomputed == 0
            seq.tokens.append(7)
            if seq.num_generated >= seq.sampling.max_tokens or len(seq.tokens) >= self.subject.max_len:
                self.end(seq)
        self.subject.check_integrity()
        return rows(batch)

    def note_who_went_ahead(self, waiting: list[Sequence], batch: Batch) -> None:
        unfinished = [seq for seq, _, context_len in self.rows_of(batch) if context_len < len(seq.tokens)]
        for seq in waiting:
            if seq.status is SequenceStatus.WAITING:
                others = [it for it in waiting if it.status is SequenceStatus.RUNNING]
                self.ahead[seq.request_id] += sum(
                    len(it.tokens) for it in others if it.rank[1] > seq.rank[1] and it.rank < seq.rank
                )
                if any(it.rank > seq.rank for it in others):
                    assert any(it.rank < seq.rank for it in unfinished), "one of a higher rank took its chunk"

    def hold_against_ledger(self, batch: Batch) -> None:
        assert batch.num_tokens <= self.budget
        assert batch.num_rows <= self.subject.num_running <= self.seqs
        for seq, query_len, context_len in self.rows_of(batch):
            name = seq.request_id
            if seq.num_preemptions > self.preemptions[name]:
                self.preemptions[name] = seq.num_preemptions
                self.computed[name] = 0
            first = context_len - query_len
            if self.chunk is not None:
                assert first // self.chunk == (context_len - 1) // self.chunk, "a row has tokens of two chunks"
            if not self.computed[name]:  # what it found is whole pages, and not all of it
                assert first % self.page_size == 0
                assert self.shares or not first
                self.num_found += first
                self.computed[name] = first
            assert query_len >= 1
            assert first == self.computed[name], "a token is skipped or computed twice"
            self.computed[name] = context_len
        for fork in batch.forks:
            assert fork.row in batch.sampled_rows
            assert not self.computed[fork.sequence.request_id]
            self.computed[fork.sequence.request_id] = batch.context_lens[fork.row]
            self.num_shared += batch.context_lens[fork.row] // self.page_size

    def compute_states(self, batch: Batch) -> None:
        """Assert that each row goes on from the state of all its tokens before, whatever slot it finds that in."""
        if self.states is None:
            return
        assert batch.states is not None
        zero, written = self.states.zero_slot, [*batch.states.targets, *[it.slot for it in batch.states.writes]]
        assert len({*written, zero}) == 1 + len(written), "a slot is written twice, or the one that is zero"
        pairs = list(zip(batch.states.sources, batch.states.targets, strict=True))
        read = {source for source, target in pairs if source != target}
        assert read.isdisjoint(written), "a step writes to a state that another row of it reads"
        for (seq, query_len, context_len), (source, _) in zip(self.rows_of(batch), pairs, strict=True):
            seen = seq.cache_salt, *seq.tokens[: context_len - query_len]
            assert (self.contents[source] if source != zero else seen[:1]) == seen
            self.num_resumed += source not in (zero, self.states.slot(seq.request_id))
        for row, num_tokens, slot in [
            *[(row, batch.context_lens[row], slot) for row, slot in enumerate(batch.states.targets)],
            *[(it.row, it.num_tokens, it.slot) for it in batch.states.writes],
        ]:
            seq = batch.sequences[row]
            assert batch.context_lens[row] - batch.query_lens[row] < num_tokens <= batch.context_lens[row]
            self.contents[slot] = seq.cache_salt, *seq.tokens[:num_tokens]

    def hold_decode_rows_against_new_ones(self, batch: Batch) -> None:
        """Assert that the rows cached from step to step are what the sequences themselves say."""
        running = [seq for seq in self.alive.values() if seq.status is SequenceStatus.RUNNING]
        decoding = [seq for seq in running if seq.is_decoding and not seq.followers]
        found = {}
        for row in batch.rows_of(Phase.DECODE):
            if row in batch.sampled_rows:
                found[batch.sequences[row]] = (batch.query_lens[row], batch.context_lens[row], batch.page_tables[row])
        pages = {seq: self.pool.table(seq.request_id, self.pool.pages_for(len(seq.tokens))) for seq in decoding}
        assert found == {seq: (1, len(seq.tokens), pages[seq]) for seq in decoding}
        left = [seq for seq in self.alive.values() if seq not in decoding and seq.leader is None]
        assert self.subject.num_waiting_tokens == sum(seq.num_uncomputed for seq in left)

    def rows_of(self, batch: Batch) -> list[tuple[Sequence, int, int]]:
        return list(zip(batch.sequences, batch.query_lens, batch.context_lens, strict=True))

    def hold_pages_against_each_other(self, batch: Batch) -> None:
        """Assert that no sequence writes to another's page, and that shared pages hold one tenant's same tokens."""
        owners: dict[int, list[tuple[Sequence, int]]] = {}
        for seq in self.alive.values():
            for index, page in enumerate(self.pool.table(seq.request_id)):
                owners.setdefault(page, []).append((seq, index))
        for page, found in owners.items():
            if len(found) > 1:
                ends = [(seq, (index + 1) * self.page_size) for seq, index in found]
                contents = {(seq.cache_salt, *seq.tokens[:end]) for seq, end in ends}
                assert len(contents) == 1, f"page {page} is shared by different prompts"
        for (seq, query_len, context_len), table in zip(self.rows_of(batch), batch.page_tables, strict=True):
            assert len(table) == self.pool.pages_for(context_len)
            forks = [fork.sequence for fork in batch.forks if batch.sequences[fork.row] is seq]
            for page in table[(context_len - query_len) // self.page_size :]:
                assert {it for it, _ in owners[page]} <= {seq, *forks}, "a step writes to a shared page"
        for fork in batch.forks:
            num_tokens, table = batch.context_lens[fork.row], self.pool.table(fork.sequence.request_id)
            if num_tokens % self.page_size:
                assert (batch.page_tables[fork.row][-1], table[-1]) in batch.page_copies
                assert len(owners[table[-1]]) == 1


@cache
def walked(seed: int) -> tuple[Walk, list[list[tuple[str, int, int]]]]:
    """A walk of random traffic to its end, and every batch of it."""
    walk, batches = Walk(seed), []
    for _ in range(150):
        if walk.rng.random() < 0.3:
            walk.arrive()
        if walk.alive and walk.rng.random() < 0.03:
            walk.cancel()
        if walk.alive:
            batches.append(walk.step())
    while walk.alive and len(batches) < 20_000:
        batches.append(walk.step())
    return walk, batches


@pytest.mark.parametrize("seed", range(12))
def test_a_walk_computes_every_token_once_and_returns_all(seed: int) -> None:
    walk, _ = walked(seed)
    assert not walk.alive
    assert walk.subject.is_idle
    assert walk.pool.num_used == 0
    assert walk.shares or not walk.pool.num_cached
    assert walk.states is None or walk.states.num_used == 0
    assert walk.states is None or walk.shares or not walk.states.num_snapshots


@pytest.mark.parametrize("seed", range(12))
def test_later_arrivals_go_ahead_for_twice_a_prompts_tokens(seed: int) -> None:
    walk = Walk(seed, num_forks=(0,))
    prompts: dict[str, int] = {}
    for _ in range(150):  # more arrives than can be computed
        for _ in range(2):
            if walk.subject.num_waiting < 12:
                walk.arrive()
        prompts |= {name: seq.num_prompt for name, seq in walk.alive.items()}
        walk.step()
    assert walk.num_arrived > 20
    for name, num_ahead in walk.ahead.items():
        assert num_ahead <= 2 * prompts[name] + walk.most_waiting


def test_the_same_traffic_is_planned_the_same_way() -> None:
    for seed in range(2):
        assert walked.__wrapped__(seed)[1] == walked(seed)[1]


def test_the_random_walks_do_preempt_overtake_and_share() -> None:
    walks = [walked(seed)[0] for seed in range(10)]
    assert sum(walk.num_resumed for walk in walks) >= 10
    assert sum(sum(walk.preemptions.values()) for walk in walks) >= 10
    assert sum(sum(walk.ahead.values()) for walk in walks) >= 100
    assert sum(walk.num_found for walk in walks if walk.shares) >= 100
    assert sum(walk.num_shared for walk in walks) >= 100


@pytest.mark.parametrize(("model_len", "batched"), [(700, 300), (700, 2048), (200, 150), (3000, 600)])
def test_batches_that_find_prefixes_have_shapes_of_the_plan(model_len: int, batched: int) -> None:
    serving = ServingLimits(model_len, batched, 16, Dtype.FP32, Dtype.FP32)
    shapes = shapes_needed(AttentionSignature(4, 2, 16), serving)
    planned = {(shape.phase, shape.query_bucket, shape.context_bucket) for shape in shapes}
    rng = random.Random(model_len + batched)
    subject = Scheduler(SchedulerLimits(model_len, 8, batched, batched // 2), PagePool(400, 16), shares_pages=True)
    met = set()
    for index in range(150):
        subject.add(sequence(str(index), rng.randrange(1, model_len), rng.randrange(1, 4)))  # each a prefix of others
        while not subject.is_idle and (index % 3 == 0 or subject.num_waiting > 3):
            batch = subject.plan(now=0.0)
            assert batch is not None
            for phase in Phase:
                of_phase = batch.rows_of(phase)
                if of_phase:
                    queries = max(batch.query_lens[row] for row in of_phase)
                    bucket = Bucket.LE_128 if phase is Phase.DECODE else bucket_of(queries)
                    met.add((phase, bucket, bucket_of(max(batch.context_lens[row] for row in of_phase))))
            subject.advance(batch)
            subject.settle(batch)
            for row in batch.sampled_rows:
                seq = batch.sequences[row]
                seq.tokens.append(7)
                if seq.num_generated >= seq.sampling.max_tokens or len(seq.tokens) >= model_len:
                    subject.finish(seq)
    assert met <= planned
    assert sum(phase is Phase.EXTEND for phase, _, _ in met) >= 2
