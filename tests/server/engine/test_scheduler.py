import random
from collections import deque

import pytest

from kernels.shape import Phase
from server.engine.messages import SamplingParams
from server.engine.pages import PagePool
from server.engine.scheduler import Scheduler, SchedulerLimits, SequenceTooLong
from server.engine.sequence import Batch, Sequence, Status


def sequence(name: str, num_prompt: int, max_tokens: int = 4) -> Sequence:
    sampling = SamplingParams(max_tokens=max_tokens)
    return Sequence(name, list(range(num_prompt)), num_prompt, sampling, seed=0, submitted_at=0.0)


def scheduler(
    *, pages: int = 64, page_size: int = 4, seqs: int = 8, tokens: int = 64, model_len: int = 256
) -> Scheduler:
    return Scheduler(SchedulerLimits(model_len, seqs, tokens), PagePool(pages, page_size))


def step(subject: Scheduler) -> Batch:
    """Plan, compute and append a token to each complete sequence."""
    batch = subject.plan(now=1.0)
    assert batch is not None
    subject.advance(batch)
    for row in batch.sampled_rows:
        batch.sequences[row].tokens.append(7)
    return batch


def rows(batch: Batch) -> list[tuple[str, int, int]]:
    names = [seq.request_id for seq in batch.sequences]
    return list(zip(names, batch.query_lens, batch.context_lens, strict=True))


def test_nothing_to_do_is_no_batch() -> None:
    assert scheduler().plan(now=0.0) is None


def test_a_long_prompt_is_computed_in_chunks_and_sampled_after_the_last() -> None:
    subject = scheduler(tokens=10)
    subject.add(sequence("a", 25))
    batches = [step(subject) for _ in range(4)]
    assert [rows(b) for b in batches] == [[("a", 10, 10)], [("a", 10, 20)], [("a", 5, 25)], [("a", 1, 26)]]
    assert [b.sampled_rows for b in batches] == [(), (), (0,), (0,)]
    assert [len(b.rows_of(Phase.EXTEND)) for b in batches] == [0, 1, 1, 0]
    assert batches[0].sequences[0].num_chunks == 3


def test_decode_tokens_come_before_chunks_in_the_budget_and_after_them_in_the_rows() -> None:
    subject = scheduler(tokens=10)
    subject.add(sequence("a", 3))
    subject.add(sequence("b", 12))
    step(subject)
    subject.add(sequence("c", 9))
    batch = step(subject)
    assert rows(batch) == [("c", 4, 4), ("b", 5, 12), ("a", 1, 4)]
    assert [len(batch.rows_of(phase)) for phase in (Phase.PREFILL, Phase.EXTEND, Phase.DECODE)] == [1, 1, 1]


def test_no_more_sequences_run_than_allowed() -> None:
    subject = scheduler(seqs=2)
    for name in "abc":
        subject.add(sequence(name, 3))
    assert [name for name, _, _ in rows(step(subject))] == ["a", "b"]
    assert (subject.num_running, subject.num_waiting, subject.num_waiting_tokens) == (2, 1, 3)


def test_a_prompt_that_leaves_no_room_is_refused_with_limit_and_value() -> None:
    with pytest.raises(SequenceTooLong, match="256 tokens, the limit is 256"):
        scheduler().add(sequence("a", 256))
    with pytest.raises(SequenceTooLong, match="9 tokens, the limit is 8"):
        scheduler(pages=2).add(sequence("a", 9))


def test_the_latest_arrival_pays_for_pages_and_is_computed_again_with_its_own_tokens() -> None:
    subject = scheduler(pages=5, page_size=4)
    old, new = sequence("old", 7), sequence("new", 5)
    subject.add(old)
    subject.add(new)
    for _ in range(2):
        step(subject)
    assert (old.num_computed, new.num_computed) == (8, 6)
    batch = step(subject)  # `old` needs a third page, 4 are used and 1 is free
    assert rows(batch) == [("old", 1, 9), ("new", 1, 7)]
    for _ in range(2):
        step(subject)  # `new` grows past 8 tokens: no page is left, and it is the latest itself
    assert new.status is Status.WAITING
    assert new.num_preemptions == 1
    num_tokens = len(new.tokens)
    subject.finish(old)
    assert rows(step(subject)) == [("new", num_tokens, num_tokens)]


def test_finishing_works_in_any_state() -> None:
    subject = scheduler(seqs=1)
    running, waiting = sequence("a", 3), sequence("b", 3)
    subject.add(running)
    subject.add(waiting)
    step(subject)
    subject.finish(waiting)
    subject.finish(running)
    assert subject.is_idle
    assert {running.status, waiting.status} == {Status.FINISHED}
    subject.check_integrity()


class Walk:
    """A scheduler under random traffic, with a ledger of its own that every batch is held against."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.page_size = self.rng.choice([1, 3, 16])
        self.seqs = self.rng.randrange(1, 9)
        self.budget = self.seqs + self.rng.randrange(1, 30)
        self.pool = PagePool(self.rng.randrange(30, 80) // self.page_size + 2, self.page_size)
        self.subject = Scheduler(SchedulerLimits(60, self.seqs, self.budget), self.pool)
        self.alive: deque[Sequence] = deque()  # in order of arrival
        self.computed: dict[str, int] = {}
        self.preemptions: dict[str, int] = {}
        self.num_arrived = 0

    def arrive(self) -> None:
        seq = sequence(f"r{self.num_arrived}", self.rng.randrange(1, self.subject.max_len), self.rng.randrange(1, 20))
        self.num_arrived += 1
        self.subject.add(seq)
        self.alive.append(seq)
        self.computed[seq.request_id] = self.preemptions[seq.request_id] = 0

    def cancel(self) -> None:
        seq = self.rng.choice(self.alive)
        self.subject.finish(seq)
        self.alive.remove(seq)

    def step(self) -> None:
        batch = self.subject.plan(now=1.0)
        assert batch is not None, "somebody is waiting and nothing is planned"
        self.hold_against_ledger(batch)
        self.subject.advance(batch)
        for row in batch.sampled_rows:
            seq = batch.sequences[row]
            assert seq.num_uncomputed == 0
            seq.tokens.append(7)
            if seq.num_generated >= seq.sampling.max_tokens or len(seq.tokens) >= self.subject.max_len:
                self.subject.finish(seq)
                self.alive.remove(seq)
        self.subject.check_integrity()

    def hold_against_ledger(self, batch: Batch) -> None:
        assert batch.sequences.count(self.alive[0]) == 1, "the oldest sequence makes no progress"
        assert batch.num_tokens <= self.budget
        assert batch.num_rows <= self.subject.num_running <= self.seqs
        pages = [page for table in batch.page_tables for page in table]
        assert len(pages) == len(set(pages)), "two sequences share a page"
        for seq, query_len, context_len, table in zip(
            batch.sequences, batch.query_lens, batch.context_lens, batch.page_tables, strict=True
        ):
            name = seq.request_id
            if seq.num_preemptions > self.preemptions[name]:
                self.preemptions[name] = seq.num_preemptions
                self.computed[name] = 0
            assert query_len >= 1
            assert context_len - query_len == self.computed[name], "a token is skipped or computed twice"
            self.computed[name] = context_len
            assert len(table) == self.pool.pages_for(context_len)


@pytest.mark.parametrize("seed", range(40))
def test_a_random_walk_computes_every_token_once_starves_nobody_and_returns_every_page(seed: int) -> None:
    walk = Walk(seed)
    for _ in range(250):
        if walk.rng.random() < 0.3:
            walk.arrive()
        if walk.alive and walk.rng.random() < 0.03:
            walk.cancel()
        if walk.alive:
            walk.step()
    for _ in range(20_000):
        if not walk.alive:
            break
        walk.step()
    assert not walk.alive
    assert walk.subject.is_idle
    assert walk.pool.num_used == 0


def test_the_random_walks_do_preempt() -> None:
    total = 0
    for seed in range(40):
        walk = Walk(seed)
        for _ in range(6):
            walk.arrive()
        while walk.alive:
            walk.step()
        total += sum(walk.preemptions.values())
    assert total >= 10


@pytest.mark.parametrize("limits", [(0, 1, 1), (1, 0, 1), (1, 1, 0)])
def test_limits_below_one_are_refused(limits: tuple[int, int, int]) -> None:
    with pytest.raises(ValueError, match="at least 1"):
        Scheduler(SchedulerLimits(*limits), PagePool(4, 4))
