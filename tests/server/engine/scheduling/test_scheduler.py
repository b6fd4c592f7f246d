import pytest

from server.engine.scheduling.pages import PagePool
from server.engine.scheduling.scheduler import Scheduler, SchedulerLimits, SequenceTooLong
from server.engine.scheduling.sequence import Batch, Sequence, SequenceStatus
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
        "first": SequenceStatus.RUNNING,
        "late": SequenceStatus.WAITING,
        "urgent": SequenceStatus.RUNNING,
    }


def test_a_prompt_without_room_is_refused_with_limit_and_value() -> None:
    with pytest.raises(SequenceTooLong, match="256 tokens, the limit is 256"):
        scheduler().add(sequence("a", 256))
    with pytest.raises(SequenceTooLong, match="9 tokens, the limit is 8"):
        scheduler(pages=2).add(sequence("a", 9))


def test_an_admission_leaves_one_page_in_a_hundred_free() -> None:
    """Free pages are for the growth of what runs; a sequence that runs alone may take the last page."""
    subject = scheduler(pages=200, tokens=1024)
    for name in ("a", "b", "c"):
        subject.add(sequence(name, 253))  # 64 pages each, with room for the tokens to come
    step(subject)
    tight, fits = sequence("tight", 28), sequence("fits", 24)  # 7 and 6 of the 8 pages left
    subject.add(tight)
    step(subject)
    assert (subject.num_running, tight.status) == (3, SequenceStatus.WAITING)
    subject.add(fits)
    step(subject)
    assert (tight.status, fits.status) == (SequenceStatus.WAITING, SequenceStatus.RUNNING)
    alone = scheduler(pages=4)
    alone.add(sequence("whole", 15))
    step(alone)
    assert alone.num_pages_used == 4


def test_a_prompt_alone_takes_the_whole_step() -> None:
    subject = scheduler(tokens=64, interleaved=8)
    subject.add(sequence("long", 200))
    assert rows(step(subject)) == [("long", 64, 64)]
    subject.add(sequence("short", 6))
    assert rows(step(subject)) == [("short", 6, 6), ("long", 4, 68)]


@pytest.mark.parametrize("limits", [(0, 1, 1), (1, 0, 1), (1, 1, 0), (1, 1, 1, 0)])
def test_limits_below_one_are_refused(limits: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="at least 1"):
        Scheduler(SchedulerLimits(*limits), PagePool(4, 4))
