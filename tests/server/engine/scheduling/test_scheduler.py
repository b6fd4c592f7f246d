import pytest

from kernels.vocabulary.shape import Phase
from server.engine.scheduling.pages import PagePool
from server.engine.scheduling.scheduler import Scheduler, SchedulerLimits, SequenceTooLong
from server.engine.scheduling.sequence import Batch, Sequence, Status
from server.protocol.messages import SamplingParams


def sequence(name: str, num_prompt: int, max_tokens: int = 4) -> Sequence:
    sampling = SamplingParams(max_tokens=max_tokens)
    return Sequence(name, list(range(num_prompt)), num_prompt, sampling, seed=0, submitted_at=0.0)


def scheduler(
    *,
    pages: int = 64,
    page_size: int = 4,
    seqs: int = 8,
    tokens: int = 64,
    interleaved: int | None = None,
    shares: bool = False,
) -> Scheduler:
    limits = SchedulerLimits(256, seqs, tokens, interleaved)
    return Scheduler(limits, PagePool(pages, page_size), shares_pages=shares)


def step(subject: Scheduler) -> Batch:
    """Plan, compute and append a token to each complete sequence."""
    batch = subject.plan(now=1.0)
    assert batch is not None
    subject.advance(batch)
    subject.settle(batch)
    for row in batch.sampled_rows:
        batch.sequences[row].tokens.append(7)
    return batch


def rows(batch: Batch) -> list[tuple[str, int, int]]:
    names = [seq.request_id for seq in batch.sequences]
    return list(zip(names, batch.query_lens, batch.context_lens, strict=True))


def test_nothing_to_do_is_no_batch() -> None:
    assert scheduler().plan(now=0.0) is None


def test_a_long_prompt_is_computed_in_chunks_and_then_sampled() -> None:
    subject = scheduler(tokens=10)
    subject.add(sequence("a", 25))
    batches = [step(subject) for _ in range(4)]
    assert [rows(b) for b in batches] == [[("a", 10, 10)], [("a", 10, 20)], [("a", 5, 25)], [("a", 1, 26)]]
    assert [b.sampled_rows for b in batches] == [(), (), (0,), (0,)]
    assert [len(b.rows_of(Phase.EXTEND)) for b in batches] == [0, 1, 1, 0]
    assert batches[0].sequences[0].num_chunks == 3


def test_prompts_of_a_lower_priority_go_first() -> None:
    subject = scheduler(pages=7, seqs=3, tokens=24)
    seqs = {name: sequence(name, 8, max_tokens=9) for name in ("first", "late", "urgent")}
    for (name, seq), priority in zip(seqs.items(), (2, 2, -1), strict=True):
        seq.priority = priority
        if name == "first":
            seq.num_prompt = 7
            seq.tokens.pop()
        subject.add(seq)
    assert [name for name, _, _ in rows(step(subject))] == ["urgent", "first", "late"]
    for _ in range(4):
        step(subject)
    assert {name: seq.status for name, seq in seqs.items()} == {
        "first": Status.RUNNING,
        "late": Status.WAITING,
        "urgent": Status.RUNNING,
    }


def test_decode_tokens_are_budgeted_first_and_stand_last() -> None:
    subject = scheduler(tokens=10)
    subject.add(sequence("a", 3))
    subject.add(sequence("b", 12))
    step(subject)
    subject.add(sequence("c", 9))
    batch = step(subject)
    assert rows(batch) == [("c", 4, 4), ("b", 5, 12), ("a", 1, 4)]
    assert [len(batch.rows_of(phase)) for phase in (Phase.PREFILL, Phase.EXTEND, Phase.DECODE)] == [1, 1, 1]


def test_a_prompt_without_room_is_refused_with_limit_and_value() -> None:
    with pytest.raises(SequenceTooLong, match="256 tokens, the limit is 256"):
        scheduler().add(sequence("a", 256))
    with pytest.raises(SequenceTooLong, match="9 tokens, the limit is 8"):
        scheduler(pages=2).add(sequence("a", 9))


def test_the_latest_arrival_gives_up_its_pages() -> None:
    subject = scheduler(pages=5, page_size=4)
    old, new = sequence("old", 7), sequence("new", 5)
    subject.add(old)
    subject.add(new)
    for _ in range(2):
        step(subject)
    assert (old.num_computed, new.num_computed) == (8, 6)
    batch = step(subject)  # `old` needs a third page, 4 are used and 1 is free
    assert sorted(rows(batch)) == [("new", 1, 7), ("old", 1, 9)]
    for _ in range(2):
        step(subject)  # `new` grows past 8 tokens: no page is left, and it is the latest itself
    assert new.status is Status.WAITING
    assert new.num_preemptions == 1
    num_tokens = len(new.tokens)
    subject.finish(old)
    assert rows(step(subject)) == [("new", num_tokens, num_tokens)]


def test_an_admission_leaves_one_page_in_a_hundred_free() -> None:
    """Free pages are for the growth of what runs; a sequence that runs alone may take the last page."""
    subject = scheduler(pages=200, tokens=1024)
    for name in ("a", "b", "c"):
        subject.add(sequence(name, 253))  # 64 pages each, with room for the tokens to come
    step(subject)
    tight, fits = sequence("tight", 28), sequence("fits", 24)  # 7 and 6 of the 8 pages left
    subject.add(tight)
    step(subject)
    assert (subject.num_running, tight.status) == (3, Status.WAITING)
    subject.add(fits)
    step(subject)
    assert (tight.status, fits.status) == (Status.WAITING, Status.RUNNING)
    alone = scheduler(pages=4)
    alone.add(sequence("whole", 15))
    step(alone)
    assert alone.num_pages_used == 4


def test_a_short_prompt_goes_ahead_of_an_earlier_long_one() -> None:
    subject = scheduler(tokens=10)
    subject.add(sequence("long", 100))
    step(subject)
    subject.add(sequence("short", 5))
    assert rows(step(subject)) == [("short", 5, 5), ("long", 5, 15)]


def test_equal_prompts_keep_the_order_in_which_they_came() -> None:
    subject = scheduler(tokens=10)
    for name in "abc":
        subject.add(sequence(name, 5))
    assert [name for name, _, _ in rows(step(subject))] == ["a", "b"]


def test_nothing_goes_ahead_after_twice_a_prompts_tokens() -> None:
    subject = scheduler(tokens=10, seqs=4)
    long = sequence("long", 30)
    subject.add(long)
    admitted = []
    for index in range(9):  # each of them shorter, and as long as the part of the step that is not the long one's
        subject.add(sequence(f"s{index}", 10, max_tokens=1))
        batch = step(subject)
        admitted += [seq.request_id for seq in batch.sequences if seq is not long]
        for row in batch.sampled_rows:
            if batch.sequences[row] is not long:
                subject.finish(batch.sequences[row])
        if long.num_computed:
            break
    # the ranks are 60, 20, 30, 40, 50, and 60 of a later arrival
    assert admitted == ["s0", "s1", "s2", "s3"]


def test_an_unfinished_prompt_leaves_half_of_the_step() -> None:
    subject = scheduler(tokens=16)
    long = sequence("long", 100)
    subject.add(long)
    for index in range(8):  # their ranks are 24, 136, 148, ... 208, that of the long one is 200
        ahead = sequence(f"s{index}", 12, max_tokens=1)
        subject.add(ahead)
        if ahead.rank > long.rank:
            subject.finish(ahead)
            break
        assert rows(step(subject))[0] == (f"s{index}", 12, 12)
        subject.finish(ahead)
    assert index == 7
    behind = sequence("behind", 8, max_tokens=1)
    subject.add(behind)
    assert behind.rank > long.rank
    assert rows(step(subject)) == [("behind", 8, 8), ("long", 8, 36)]


def test_beside_streams_a_step_holds_limited_prompt_tokens() -> None:
    subject = scheduler(tokens=64, interleaved=8)
    subject.add(sequence("streams", 4, max_tokens=100))
    step(subject)
    subject.add(sequence("long", 100))
    subject.add(sequence("short", 6))
    assert rows(step(subject)) == [("short", 6, 6), ("long", 2, 2), ("streams", 1, 5)]
    assert sum(query_len for _, query_len, _ in rows(step(subject))) == 8 + 2


def test_a_prompt_alone_takes_the_whole_step() -> None:
    subject = scheduler(tokens=64, interleaved=8)
    subject.add(sequence("long", 200))
    assert rows(step(subject)) == [("long", 64, 64)]
    subject.add(sequence("short", 6))
    assert rows(step(subject)) == [("short", 6, 6), ("long", 4, 68)]


def test_short_prompts_pass_one_without_pages_for_a_while() -> None:
    subject = scheduler(pages=10, page_size=4)
    subject.add(sequence("runs", 20, max_tokens=1000))
    step(subject)
    subject.add(sequence("wide", 24))  # 6 pages of the 5 that are free; its rank is 20 + 48
    num_ahead = 0
    for index in range(20):
        tiny = sequence(f"tiny{index}", 4)
        subject.add(tiny)
        step(subject)
        if tiny.status is Status.WAITING:
            break
        subject.finish(tiny)
        num_ahead += 1
    assert num_ahead == 10  # the ranks are 20 + 8, 24 + 8, ... up to 56 + 8; 60 + 8 came later than 68
    assert subject.num_waiting == 2


def test_all_but_the_last_token_of_a_known_prefix_is_skipped() -> None:
    subject = scheduler(shares=True)
    first = sequence("a", 12)
    subject.add(first)
    step(subject)
    subject.finish(first)
    subject.add(sequence("same", 12))
    subject.add(sequence("longer", 15))
    batch = step(subject)
    assert rows(batch) == [("same", 4, 12), ("longer", 3, 15)]
    assert [seq.num_cached for seq in batch.sequences] == [8, 12]
    assert (batch.num_queried, batch.num_found) == (27, 20)
    assert len(batch.rows_of(Phase.EXTEND)) == 2


def test_a_known_prompt_of_full_pages_is_a_decode_row() -> None:
    subject = scheduler(shares=True)
    subject.add(sequence("a", 9))
    step(subject)
    subject.add(sequence("b", 9))
    batch = step(subject)
    assert sorted(rows(batch)) == [("a", 1, 10), ("b", 1, 9)]
    assert len(batch.rows_of(Phase.DECODE)) == 2
    assert batch.sampled_rows == (0, 1)


def test_generated_tokens_are_found_too() -> None:
    subject = scheduler(shares=True)
    first = sequence("a", 3, max_tokens=10)
    subject.add(first)
    for _ in range(6):
        step(subject)
    subject.finish(first)
    following = Sequence("b", [*first.tokens, 1], 10, SamplingParams(max_tokens=1), seed=0, submitted_at=0.0)
    subject.add(following)
    assert rows(step(subject)) == [("b", 2, 10)]


def test_other_salts_find_nothing() -> None:
    subject = scheduler(shares=True)
    subject.add(sequence("a", 12))
    step(subject)
    other = sequence("b", 12)
    other.cache_salt = b"another tenant"
    subject.add(other)
    assert sorted(rows(step(subject))) == [("a", 1, 13), ("b", 12, 12)]


def test_a_preempted_sequence_finds_its_own_pages() -> None:
    subject = scheduler(pages=6, shares=True)
    old, new = sequence("old", 12, max_tokens=50), sequence("new", 8, max_tokens=50)
    new.cache_salt = b"shares nothing with the other"
    for seq in (old, new):
        subject.add(seq)
    while not new.num_preemptions:
        step(subject)
    subject.finish(old)
    assert rows(step(subject)) == [("new", len(new.tokens) - 1 - 8, len(new.tokens) - 1)]


@pytest.mark.parametrize("limits", [(0, 1, 1), (1, 0, 1), (1, 1, 0), (1, 1, 1, 0)])
def test_limits_below_one_are_refused(limits: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="at least 1"):
        Scheduler(SchedulerLimits(*limits), PagePool(4, 4))
