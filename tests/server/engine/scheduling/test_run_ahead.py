"""Steps that are launched before the tokens of the one before are read, and drafted tokens, change no answer."""

import logging
import random
from dataclasses import dataclass

import pytest

from kernels.vocabulary.shape import Phase
from server.engine.scheduling.runner_api import BatchError, ChoiceError, StepResult
from server.engine.scheduling.sequence import PENDING, Batch, Sequence
from server.errors import InvalidGrammar
from server.protocol.messages import FinishReason, Grammar, GrammarKind
from support.engine.fake_runner import DeviceTwin, Done, Landing
from support.engine.twin_bench import Bench, tokens

ANY = Grammar(GrammarKind.REGEX, ".*")
MODEL_LEN = 36


def test_a_step_is_launched_before_the_one_before_is_read() -> None:
    twin = DeviceTwin()
    bench = Bench(twin)
    bench.submit("a", [1, 2], max_tokens=3)
    assert tokens(bench.drain()["a"]) == twin.answer([1, 2], 3)
    assert twin.log == ["launch 1", "launch 2", "read 1", "launch 3", "read 2", "read 3"]


def test_a_request_cancelled_with_a_row_ahead_says_no_more() -> None:
    twin = DeviceTwin()
    bench = Bench(twin)
    bench.submit("a", [1, 2])
    bench.step()
    bench.outputs.clear()
    bench.engine.cancel("a")
    bench.submit("a", [9, 9])  # a new one of the same name
    found = bench.drain()["a"]
    assert found[0].finish_reason is FinishReason.CANCELLED
    assert tokens(found[1:]) == twin.answer([9, 9], 6)


class Failing(DeviceTwin):
    """Fails where two sequences decode."""

    def launch(self, batch: Batch) -> Landing:
        if len(batch.sequences) == 2 and batch.rows_of(Phase.DECODE):
            raise BatchError("internal_error", "no path", range(2), [])
        return super().launch(batch)


def test_a_row_that_fails_behind_the_last_token_ends_well() -> None:
    twin = Failing()
    bench = Bench(twin)
    bench.submit("a", [1, 2], stop_token_ids=tuple(twin.answer([1, 2], 1)))
    bench.submit("b", [3, 4])
    found = bench.drain()
    assert [delta.finish_reason for delta in found["a"]] == [FinishReason.STOP]
    assert [delta.error_code for delta in found["b"]] == [None, "internal_error"]


@dataclass
class AnyToken:
    """A matcher that allows every token, or refuses every one, as one does whose grammar costs too much."""

    is_refusing: bool = False
    is_complete = False

    def accept(self, _: int) -> None:
        if self.is_refusing:
            raise InvalidGrammar("too costly")

    def copy(self) -> "AnyToken":
        return self


class FailingFork(DeviceTwin):
    """Fails in the step in which a second answer begins: at its launch, or when its tokens are to be chosen."""

    def __init__(self, *, is_launched: bool) -> None:
        super().__init__()
        self.is_launched = is_launched

    def launch(self, batch: Batch):  # type: ignore[no-untyped-def]
        has_failed = bool(batch.forks)
        if has_failed and not self.is_launched:
            raise BatchError("internal_error", "no memory", range(batch.num_rows), [], oom_stage="prefill")
        landing = super().launch(batch)
        return Chosen(landing.known, fails=has_failed)


class Chosen(Done):
    def __init__(self, known: StepResult, *, fails: bool) -> None:
        super().__init__(known)
        self.fails = fails

    def choose(self) -> None:
        if self.fails:
            raise ChoiceError("internal_error", "no memory", [], oom_stage="prefill")


@pytest.mark.parametrize("cancelled", ["nobody", "other", "first", "second"])
@pytest.mark.parametrize("is_launched", [False, True])
def test_a_failed_step_ends_each_request_of_it_once(
    is_launched: bool, cancelled: str, caplog: pytest.LogCaptureFixture
) -> None:
    """A request is cancelled when the launch has failed, or before its tokens are to be chosen."""
    twin = FailingFork(is_launched=is_launched)
    bench = Bench(twin, matcher=AnyToken())
    bench.submit("other", [1, 2], grammar=ANY)
    bench.step()
    bench.submit("first", [3, 4], forks=["second"])
    bench.step()
    bench.engine.cancel(cancelled)
    found = bench.drain()
    ended = {name for name, deltas in found.items() if deltas[-1].error_code == "internal_error"}
    due = {"other", "first", "second"} - {cancelled}
    if cancelled == "first" and not is_launched:  # the second answer computes the prompt itself
        due.remove("second")
        assert tokens(found["second"]) == twin.answer([3, 4], 6)
    assert ended == due
    assert [output.record.oom_stage for output in bench.outputs].count("prefill") == 1
    assert f"{len(due)} requests end: no memory" in caplog.text


@pytest.mark.parametrize("is_clients", [True, False])
def test_a_clients_fault_is_no_error_in_the_log(is_clients: bool, caplog: pytest.LogCaptureFixture) -> None:
    twin = FailingFork(is_launched=True) if is_clients else Failing()
    bench = Bench(twin, ahead=False, matcher=AnyToken(is_refusing=True))
    for name in ("a",) if is_clients else ("a", "b"):  # of two, the step fails
        bench.submit(name, [1, 2], grammar=ANY if is_clients else None)
    with caplog.at_level(logging.INFO):
        found = bench.drain()
    assert found["a"][-1].error_code == ("invalid_grammar" if is_clients else "internal_error")
    levels = {record.levelno for record in caplog.records if "ends early" in record.message}
    assert levels == {logging.INFO if is_clients else logging.ERROR}


def test_a_penalty_makes_every_step_wait_for_the_tokens_before() -> None:
    twin = DeviceTwin()
    bench = Bench(twin)
    bench.submit("a", [1, 2], max_tokens=3, frequency_penalty=0.5)
    bench.submit("b", [1, 2], max_tokens=3)
    bench.drain()
    assert twin.log == ["launch 1", "read 1", "launch 2", "read 2", "launch 3", "read 3"]
    bench.submit("c", [1, 2], max_tokens=2)
    bench.drain()
    assert twin.log[6:] == ["launch 4", "launch 5", "read 4", "read 5"]


def test_bad_logits_end_a_sequence_whose_next_row_is_ahead() -> None:
    class Sick(DeviceTwin):
        def launch(self, batch: Batch):  # type: ignore[no-untyped-def]
            landing = super().launch(batch)
            sick = [place for place, seq in enumerate(batch.drawn_sequences) if seq.request_id == "sick"]
            found = [[] if place in sick else tokens for place, tokens in enumerate(landing.known.tokens)]
            return Done(StepResult(found, nonfinite=tuple(sick)))

    bench = Bench(Sick())
    bench.submit("sick", [1, 2])
    bench.submit("well", [3, 4])
    found = bench.drain()
    assert [delta.error_code for delta in found["sick"]] == ["nonfinite_logits"]
    assert tokens(found["well"]) == DeviceTwin().answer([3, 4], 6)


# --- drafted tokens --------------------------------------------------------------------------------------------------


class Bounded(DeviceTwin):
    """Holds each batch against the most tokens of a step and of a sequence."""

    def __init__(self, budget: int = 32) -> None:
        super().__init__()
        self.budget = budget

    def launch(self, batch: Batch) -> Landing:
        assert batch.num_tokens <= self.budget
        assert max(batch.context_lens) <= MODEL_LEN
        return super().launch(batch)


@dataclass
class Oracle:
    """Knows the twin's next tokens, and lies in half of its drafts about one of them."""

    bench: Bench
    twin: DeviceTwin
    rng: random.Random
    num_drafted: int = 0

    def __call__(self, seq: Sequence, most: int) -> list[int]:
        assert 0 < most < seq.max_len - len(seq.tokens), "more than the answer may have"
        assert PENDING not in seq.tokens
        assert not seq.num_drafted
        pool = self.bench.pool
        assert len(pool.pages(seq.request_id)) == pool.pages_for(len(seq.tokens)), "a page was not taken back"
        drafted = self.twin.answer(seq.tokens, self.rng.randint(0, most + 1))
        if drafted and self.rng.random() < 0.5:
            drafted[self.rng.randrange(len(drafted))] = self.rng.randrange(97)
        self.num_drafted += len(drafted[:most])
        return drafted


def drafting(twin: DeviceTwin, most: int = 5, chunk: int | None = None) -> Bench:
    """Return an engine whose drafts never lie, and are as long as they may be."""
    bench = Bench(twin, model_len=MODEL_LEN, most=most, chunk=chunk)
    bench.engine.drafter = lambda seq, most: twin.answer(seq.tokens, most)
    return bench


def test_the_next_step_is_launched_when_one_is_settled() -> None:
    twin = Bounded()
    bench = drafting(twin, most=2)
    bench.submit("a", [1, 2, 3], max_tokens=20)
    bench.step()
    assert twin.log == ["launch 1", "read 1", "launch 2"]
    bench.engine.step(may_run_ahead=False)
    assert twin.log[3:] == ["read 2"]


def test_right_drafts_save_steps_and_stop_at_every_length() -> None:
    for num_tokens in range(1, 15):
        twin = Bounded()
        bench = drafting(twin, most=4)
        bench.submit("a", [1, 2, 3], max_tokens=num_tokens)
        deltas = bench.drain()["a"]
        assert tokens(deltas) == twin.answer([1, 2, 3], num_tokens)
        assert deltas[-1].finish_reason is FinishReason.LENGTH
        assert len(deltas) == 1 + -(-(num_tokens - 1) // 5)  # the first, then four drafted ones and one more a step


def test_drafted_tokens_end_with_a_chunk_of_positions() -> None:
    bench = drafting(Bounded(), most=4, chunk=8)
    bench.submit("a", [1, 2, 3], max_tokens=16)
    # The newest token of a row is at position 3, 8, 13 and 16.
    assert [len(delta.token_ids) for delta in bench.drain()["a"]] == [1, 5, 5, 3, 2]


def test_pages_of_verified_tokens_are_found_by_others() -> None:
    twin = Bounded()
    bench = drafting(twin)
    bench.submit("a", [1, 2, 3], max_tokens=14)
    bench.drain()
    following = [1, 2, 3, *twin.answer([1, 2, 3], 14), 7]
    bench.submit("b", following, max_tokens=2)
    assert tokens(bench.drain()["b"]) == twin.answer(following, 2)
    assert sum(output.record.num_prefix_hit_tokens for output in bench.outputs) == 16  # all full pages of 3 + 13 tokens


class FailingOnce(Bounded):
    """Cannot launch the first batch that verifies, of which the first row is to blame."""

    has_failed = False

    def launch(self, batch: Batch) -> Landing:
        if batch.rows_of(Phase.VERIFY) and not self.has_failed:
            self.has_failed = True
            raise BatchError("internal_error", "no path", range(1), [])
        return super().launch(batch)


def test_drafts_of_a_step_that_cannot_be_launched_are_forgotten() -> None:
    twin = FailingOnce()
    bench, prompts = drafting(twin), {"a": [1, 2], "b": [3, 4]}
    for name, prompt in prompts.items():
        bench.submit(name, prompt)
    found = bench.drain()
    assert sorted(str(deltas[-1].error_code) for deltas in found.values()) == ["None", "internal_error"]
    (well,) = [name for name, deltas in found.items() if deltas[-1].error_code is None]
    assert tokens(found[well]) == twin.answer(prompts[well], 6)


@pytest.mark.parametrize(("ahead", "drafts"), [(True, False), (False, False), (True, True)])
@pytest.mark.parametrize("seed", range(12))
def test_whatever_happens_each_request_gets_its_own_tokens(seed: int, ahead: bool, drafts: bool) -> None:
    """Random arrivals, cancels, stops and penalties over few pages, so that many are preempted."""
    rng = random.Random(seed)
    seqs = rng.choice([2, 6])
    twin = Bounded(seqs + rng.choice([2, 20]) if drafts else 32)
    pages, most = rng.choice([9, 14, 40]), rng.choice([1, 5]) if drafts else 0
    bench = Bench(
        twin, pages=pages, seqs=seqs, model_len=MODEL_LEN, step_tokens=twin.budget, most=most, ahead=ahead
    )  # fmt: skip
    oracle = Oracle(bench, twin, rng)
    bench.engine.drafter = oracle if drafts else None
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
            if rng.random() < 0.1 and not drafts:
                options["presence_penalty"] = 0.1
            name, *forks = [f"r{step}-{choice}" for choice in range(rng.choice([1, 1, 2, 4]))]
            due |= dict.fromkeys((name, *forks), answer)
            bench.submit(name, prompt, forks, **options)
        if rng.random() < 0.07 and due:
            cancelled.add(name := rng.choice(list(due)[-8:]))
            bench.engine.cancel(name)
        bench.step()
    found = bench.drain()
    assert found.keys() == due.keys()
    for name, deltas in found.items():
        answer = tokens(deltas)
        assert answer == due[name] or (name in cancelled and answer == due[name][: len(answer)])
        assert [delta.finish_reason is not None for delta in deltas] == [False] * (len(deltas) - 1) + [True]
    assert drafts == any(len(delta.token_ids) > 1 for deltas in found.values() for delta in deltas)
    assert not drafts or oracle.num_drafted > 20
