"""Drafted tokens change how many steps an answer takes and nothing else, whoever drafts them."""

import random

import pytest
from msgspec.structs import replace

from kernels.vocabulary.shape import Phase
from server.engine.scheduling.engine import Engine, EngineOptions
from server.engine.scheduling.pages import PagePool
from server.engine.scheduling.runner_api import BatchError
from server.engine.scheduling.scheduler import Scheduler, SchedulerLimits
from server.engine.scheduling.sequence import PENDING, Batch, Sequence
from server.protocol.messages import FinishReason, Fork, SamplingParams, StepOutput, Submit, TokenDelta
from support.engine.fake_runner import DeviceTwin, Landing

PAGE_SIZE, MODEL_LEN = 4, 36


class Twin(DeviceTwin):
    """Holds each batch against the most tokens of a step and of a sequence."""

    def __init__(self, budget: int = 32) -> None:
        super().__init__(page_size=PAGE_SIZE)
        self.budget = budget

    def launch(self, batch: Batch) -> Landing:
        assert batch.num_tokens <= self.budget
        assert max(batch.context_lens) <= MODEL_LEN
        return super().launch(batch)


class Oracle:
    """Knows the twin's next tokens, and lies in half of its drafts about one of them."""

    pool: PagePool  # of the engine that it drafts for

    def __init__(self, twin: DeviceTwin, rng: random.Random) -> None:
        self.twin = twin
        self.rng = rng
        self.num_drafted = 0

    def __call__(self, seq: Sequence, most: int) -> list[int]:
        assert 0 < most < seq.max_len - len(seq.tokens), "more than the answer may have"
        assert PENDING not in seq.tokens
        assert not seq.num_drafted
        assert len(self.pool.pages(seq.request_id)) == self.pool.pages_for(len(seq.tokens)), "a page was not taken back"
        drafted = self.twin.answer(seq.tokens, self.rng.randint(0, most + 1))
        if drafted and self.rng.random() < 0.5:
            drafted[self.rng.randrange(len(drafted))] = self.rng.randrange(97)
        self.num_drafted += len(drafted[:most])
        return drafted


class Bench:
    """An engine whose pages are counted after every step."""

    def __init__(
        self, runner: Twin, oracle: Oracle, *, pages: int = 32, seqs: int = 8, most: int = 5,
        chunk: int | None = None,
    ) -> None:  # fmt: skip
        self.pool = oracle.pool = PagePool(pages, PAGE_SIZE)
        limits = SchedulerLimits(MODEL_LEN, seqs, runner.budget, max_drafted_tokens=most, chunk=chunk)
        self.scheduler = Scheduler(limits, self.pool, shares_pages=True)
        options = EngineOptions(97, (), seed=0, runs_ahead=True)
        self.engine = Engine(self.scheduler, runner, options, drafter=oracle)
        self.outputs: list[StepOutput] = []

    def step(self) -> None:
        output = self.engine.step()
        self.scheduler.check_integrity()
        if output is not None:
            self.outputs.append(output)

    def drain(self) -> None:
        while self.engine.has_work:
            self.step()
        assert self.engine.step() is None
        assert self.pool.num_used == 0

    def deltas(self) -> dict[str, list[TokenDelta]]:
        found: dict[str, list[TokenDelta]] = {}
        for output in self.outputs:
            for delta in output.deltas:
                found.setdefault(delta.request_id, []).append(delta)
        return found


def submit(name: str, prompt: list[int], **sampling: object) -> Submit:
    return Submit(name, prompt, SamplingParams(**{"max_tokens": 6, "temperature": 0.0, **sampling}))  # type: ignore[arg-type]


def tokens(deltas: list[TokenDelta]) -> list[int]:
    return [token for delta in deltas for token in delta.token_ids]


class Truth(Oracle):
    """Never lies, and drafts as many tokens as it may."""

    def __call__(self, seq: Sequence, most: int) -> list[int]:
        self.num_drafted += most
        return self.twin.answer(seq.tokens, most)


def test_right_drafts_save_steps_and_stop_at_every_length() -> None:
    for num_tokens in range(1, 15):
        twin = Twin()
        bench = Bench(twin, Truth(twin, random.Random(0)), most=4)
        bench.engine.submit(submit("a", [1, 2, 3], max_tokens=num_tokens))
        bench.drain()
        deltas = bench.deltas()["a"]
        assert tokens(deltas) == twin.answer([1, 2, 3], num_tokens)
        assert deltas[-1].finish_reason is FinishReason.LENGTH
        assert len(deltas) == 1 + -(-(num_tokens - 1) // 5)  # the first, then four drafted ones and one more a step


def test_drafted_tokens_end_with_a_chunk_of_positions() -> None:
    twin = Twin()
    bench = Bench(twin, Truth(twin, random.Random(0)), most=4, chunk=8)
    bench.engine.submit(submit("a", [1, 2, 3], max_tokens=16))
    bench.drain()
    # The newest token of a row is at position 3, 8, 13 and 16.
    assert [len(delta.token_ids) for delta in bench.deltas()["a"]] == [1, 5, 5, 3, 2]


def test_a_stop_token_among_right_drafts_ends_the_answer() -> None:
    for cut in range(9):
        twin = Twin()
        answer = twin.answer([5, 2], 9)
        bench = Bench(twin, Truth(twin, random.Random(0)))
        bench.engine.submit(submit("a", [5, 2], max_tokens=20, stop_token_ids=(answer[cut],)))
        bench.drain()
        deltas = bench.deltas()["a"]
        assert tokens(deltas) == answer[: answer.index(answer[cut]) + 1]
        assert deltas[-1].finish_reason is FinishReason.STOP


def test_pages_of_verified_tokens_are_found_by_others() -> None:
    twin = Twin()
    bench = Bench(twin, Truth(twin, random.Random(0)))
    bench.engine.submit(submit("a", [1, 2, 3], max_tokens=14))
    bench.drain()
    answer = twin.answer([1, 2, 3], 14)
    bench.engine.submit(submit("b", [1, 2, 3, *answer, 7], max_tokens=2))
    bench.drain()
    assert sum(output.record.num_prefix_hit_tokens for output in bench.outputs) == 16  # all full pages of 3 + 13 tokens
    assert tokens(bench.deltas()["b"]) == twin.answer([1, 2, 3, *answer, 7], 2)


class Failing(Twin):
    """Cannot launch the first batch that verifies, of which the first row is to blame."""

    has_failed = False

    def launch(self, batch: Batch) -> Landing:
        if batch.rows_of(Phase.VERIFY) and not self.has_failed:
            self.has_failed = True
            raise BatchError("internal_error", "no path", range(1), [])
        return super().launch(batch)


def test_drafts_of_a_step_that_cannot_be_launched_are_forgotten() -> None:
    twin = Failing()
    bench = Bench(twin, Truth(twin, random.Random(0)))
    bench.engine.submit(submit("a", [1, 2]))
    bench.engine.submit(submit("b", [3, 4]))
    bench.drain()
    ends = {name: deltas[-1].error_code for name, deltas in bench.deltas().items()}
    assert sorted(map(str, ends.values())) == ["None", "internal_error"]
    (well,) = [name for name, code in ends.items() if code is None]
    assert tokens(bench.deltas()[well]) == twin.answer({"a": [1, 2], "b": [3, 4]}[well], 6)


@pytest.mark.parametrize("seed", range(12))
def test_answers_are_those_without_drafts_whatever_happens(seed: int) -> None:
    """Random arrivals, cancels and stops over few pages, so that many are preempted."""
    rng = random.Random(seed)
    seqs = rng.choice([2, 6])
    twin = Twin(seqs + rng.choice([2, 20]))
    oracle = Oracle(twin, rng)
    bench = Bench(
        twin,
        oracle,
        pages=rng.choice([9, 14, 40]),
        seqs=seqs,
        most=rng.choice([1, 5]),
    )
    due: dict[str, list[int]] = {}
    cancelled = set()
    for step in range(150):
        if rng.random() < 0.25:
            prompt = [1] * rng.choice([0, 8, 12]) + [rng.randrange(97) for _ in range(rng.randint(1, 8))]
            answer = twin.answer(prompt, min(rng.randint(1, 15), MODEL_LEN - len(prompt)))
            options: dict[str, object] = {"max_tokens": len(answer)}
            if rng.random() < 0.4 and len(answer) > 1:
                cut = rng.randrange(1, len(answer))
                options = {"max_tokens": 40, "stop_token_ids": (answer[cut],)}
                answer = answer[: answer.index(answer[cut]) + 1]
            names = [f"r{step}-{choice}" for choice in range(rng.choice([1, 1, 2, 4]))]
            due |= dict.fromkeys(names, answer)
            forks = [Fork(name, None) for name in names[1:]]
            bench.engine.submit(replace(submit(names[0], prompt, **options), forks=forks))
        if rng.random() < 0.07 and due:
            cancelled.add(name := rng.choice(list(due)[-8:]))
            bench.engine.cancel(name)
        bench.step()
    bench.drain()
    assert bench.deltas().keys() == due.keys()
    for name, deltas in bench.deltas().items():
        answer = tokens(deltas)
        assert answer == due[name] or (name in cancelled and answer == due[name][: len(answer)])
        assert [delta.finish_reason is not None for delta in deltas] == [False] * (len(deltas) - 1) + [True]
    assert any(len(delta.token_ids) > 1 for deltas in bench.deltas().values() for delta in deltas)
    assert oracle.num_drafted > 20
