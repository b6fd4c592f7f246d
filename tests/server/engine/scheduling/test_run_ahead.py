"""The engine launches a step before it reads the tokens of the one before."""

import logging
import random
from concurrent.futures import Future

import pytest
from msgspec.structs import replace

from kernels.vocabulary.shape import Phase
from server.engine.scheduling.engine import Engine, EngineOptions
from server.engine.scheduling.matcher import Matcher
from server.engine.scheduling.pages import PagePool
from server.engine.scheduling.runner_api import BatchError, ChoiceError, Runner, StepResult
from server.engine.scheduling.scheduler import Scheduler, SchedulerLimits
from server.engine.scheduling.sequence import Batch
from server.errors import InvalidGrammar
from server.protocol.messages import (
    FinishReason,
    Fork,
    Grammar,
    GrammarKind,
    SamplingParams,
    StepOutput,
    Submit,
    TokenDelta,
)
from support.engine.fake_runner import DeviceTwin, Done


def engine(runner: Runner, *, pages: int = 32, seqs: int = 8, model_len: int = 64, ahead: bool = True) -> Engine:
    scheduler = Scheduler(SchedulerLimits(model_len, seqs, 32), PagePool(pages, 4), shares_pages=True)
    return Engine(scheduler, runner, EngineOptions(97, (), seed=0, runs_ahead=ahead))


def submit(name: str, prompt: list[int], **sampling: object) -> Submit:
    return Submit(name, prompt, SamplingParams(**{"max_tokens": 6, "temperature": 0.0, **sampling}))  # type: ignore[arg-type]


def drain(subject: Engine) -> list[StepOutput]:
    outputs = []
    while subject.has_work:
        output = subject.step()
        assert output is not None
        outputs.append(output)
    assert subject.step() is None  # idle: the pages are counted
    return outputs


def by_request(outputs: list[StepOutput]) -> dict[str, list[TokenDelta]]:
    found: dict[str, list[TokenDelta]] = {}
    for output in outputs:
        for delta in output.deltas:
            found.setdefault(delta.request_id, []).append(delta)
    return found


def tokens(deltas: list[TokenDelta]) -> list[int]:
    return [token for delta in deltas for token in delta.token_ids]


def test_a_step_is_launched_before_the_one_before_is_read() -> None:
    twin = DeviceTwin()
    subject = engine(twin)
    subject.submit(submit("a", [1, 2], max_tokens=3))
    assert tokens(by_request(drain(subject))["a"]) == twin.answer([1, 2], 3)
    assert twin.log == ["launch 1", "launch 2", "read 1", "launch 3", "read 2", "read 3"]


def test_a_request_cancelled_with_a_row_ahead_says_no_more() -> None:
    twin = DeviceTwin()
    subject = engine(twin)
    subject.submit(submit("a", [1, 2]))
    subject.step()
    subject.cancel("a")
    subject.submit(submit("a", [9, 9]))  # a new one of the same name
    found = by_request(drain(subject))["a"]
    assert found[0].finish_reason is FinishReason.CANCELLED
    assert tokens(found[1:]) == twin.answer([9, 9], 6)


class Failing(DeviceTwin):
    """Fails where two sequences decode."""

    def launch(self, batch: Batch):  # type: ignore[no-untyped-def]
        if len(batch.sequences) == 2 and batch.rows_of(Phase.DECODE):
            raise BatchError("internal_error", "no path", range(2), [])
        return super().launch(batch)


def test_a_row_that_fails_behind_the_last_token_ends_well() -> None:
    twin = Failing()
    subject = engine(twin)
    subject.submit(submit("a", [1, 2], stop_token_ids=tuple(twin.answer([1, 2], 1))))
    subject.submit(submit("b", [3, 4]))
    found = by_request(drain(subject))
    assert [delta.finish_reason for delta in found["a"]] == [FinishReason.STOP]
    assert [delta.error_code for delta in found["b"]] == [None, "internal_error"]


class AnyToken:
    """A matcher that allows every token."""

    is_complete = False

    def accept(self, _: int) -> None:
        pass

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
    grammar: Future[Matcher] = Future()
    grammar.set_result(AnyToken())
    scheduler = Scheduler(SchedulerLimits(64, 8, 32), PagePool(32, 4), shares_pages=True)
    options = EngineOptions(97, (), seed=0, runs_ahead=True)
    twin = FailingFork(is_launched=is_launched)
    subject = Engine(scheduler, twin, options, compile_grammar=lambda _: grammar)
    subject.submit(submit("other", [1, 2], grammar=Grammar(GrammarKind.REGEX, ".*")))
    subject.step()
    subject.submit(replace(submit("first", [3, 4]), forks=[Fork("second", None)]))
    subject.step()
    subject.cancel(cancelled)
    outputs = drain(subject)
    found = by_request(outputs)
    ended = {name for name, deltas in found.items() if deltas[-1].error_code == "internal_error"}
    due = {"other", "first", "second"} - {cancelled}
    if cancelled == "first" and not is_launched:  # the second answer computes the prompt itself
        due.remove("second")
        assert tokens(found["second"]) == twin.answer([3, 4], 6)
    assert ended == due
    assert [output.record.oom_stage for output in outputs].count("prefill") == 1
    assert f"{len(due)} requests end: no memory" in caplog.text


class NoToken(AnyToken):
    """A matcher that refuses every token, as one does whose grammar costs too much."""

    def accept(self, _: int) -> None:
        raise InvalidGrammar("too costly")


@pytest.mark.parametrize("is_clients", [True, False])
def test_a_clients_fault_is_no_error_in_the_log(is_clients: bool, caplog: pytest.LogCaptureFixture) -> None:
    matcher: Future[Matcher] = Future()
    matcher.set_result(NoToken())
    twin = FailingFork(is_launched=True) if is_clients else Failing()
    scheduler = Scheduler(SchedulerLimits(64, 8, 32), PagePool(32, 4))
    subject = Engine(scheduler, twin, EngineOptions(97, (), seed=0), compile_grammar=lambda _: matcher)
    grammar = Grammar(GrammarKind.REGEX, ".*")
    for name in ("a",) if is_clients else ("a", "b"):  # of two, the step fails
        subject.submit(submit(name, [1, 2], grammar=grammar if is_clients else None))
    with caplog.at_level(logging.INFO):
        found = by_request(drain(subject))
    assert found["a"][-1].error_code == ("invalid_grammar" if is_clients else "internal_error")
    levels = {record.levelno for record in caplog.records if "ends early" in record.message}
    assert levels == {logging.INFO if is_clients else logging.ERROR}


def test_a_penalty_makes_every_step_wait_for_the_tokens_before() -> None:
    twin = DeviceTwin()
    subject = engine(twin)
    subject.submit(submit("a", [1, 2], max_tokens=3, frequency_penalty=0.5))
    subject.submit(submit("b", [1, 2], max_tokens=3))
    drain(subject)
    assert twin.log == ["launch 1", "read 1", "launch 2", "read 2", "launch 3", "read 3"]
    subject.submit(submit("c", [1, 2], max_tokens=2))
    drain(subject)
    assert twin.log[6:] == ["launch 4", "launch 5", "read 4", "read 5"]


def test_bad_logits_end_a_sequence_whose_next_row_is_ahead() -> None:
    class Sick(DeviceTwin):
        def launch(self, batch: Batch):  # type: ignore[no-untyped-def]
            landing = super().launch(batch)
            sick = [place for place, seq in enumerate(batch.drawn_sequences) if seq.request_id == "sick"]
            found = [[] if place in sick else tokens for place, tokens in enumerate(landing.known.tokens)]
            return Done(StepResult(found, nonfinite=tuple(sick)))

    subject = engine(Sick())
    subject.submit(submit("sick", [1, 2]))
    subject.submit(submit("well", [3, 4]))
    outputs = drain(subject)
    found = by_request(outputs)
    assert [delta.error_code for delta in found["sick"]] == ["nonfinite_logits"]
    assert tokens(found["well"]) == DeviceTwin().answer([3, 4], 6)


@pytest.mark.parametrize("ahead", [True, False])
@pytest.mark.parametrize("seed", range(12))
def test_whatever_happens_each_request_gets_its_own_tokens(seed: int, ahead: bool) -> None:
    """Random arrivals, cancels, stops and penalties over few pages, so that many are preempted."""
    rng = random.Random(seed)
    twin = DeviceTwin()
    subject = engine(twin, pages=rng.choice([9, 14, 40]), seqs=rng.choice([2, 6]), model_len=36, ahead=ahead)
    due: dict[str, list[int]] = {}
    cancelled = set()
    outputs = []
    for step in range(150):
        if rng.random() < 0.25:
            shared = [1] * rng.choice([0, 8, 12])
            prompt = shared + [rng.randrange(97) for _ in range(rng.randint(1, 8))]
            answer = twin.answer(prompt, min(rng.randint(1, 15), 36 - len(prompt)))
            options: dict[str, object] = {"max_tokens": len(answer)}
            if rng.random() < 0.4 and len(answer) > 1:
                cut = rng.randrange(1, len(answer))
                options = {"max_tokens": 40, "stop_token_ids": (answer[cut],)}
                answer = answer[: answer.index(answer[cut]) + 1]
            if rng.random() < 0.1:
                options["presence_penalty"] = 0.1
            names = [f"r{step}-{choice}" for choice in range(rng.choice([1, 1, 2, 4]))]
            due |= dict.fromkeys(names, answer)
            forks = [Fork(name, None) for name in names[1:]]
            subject.submit(replace(submit(names[0], prompt, **options), forks=forks))
        if rng.random() < 0.07 and due:
            cancelled.add(name := rng.choice(list(due)[-8:]))
            subject.cancel(name)
        output = subject.step()
        if output is not None:
            outputs.append(output)
    outputs += drain(subject)
    found = by_request(outputs)
    assert found.keys() == due.keys()
    for name, deltas in found.items():
        answer = tokens(deltas)
        assert answer == due[name] or (name in cancelled and answer == due[name][: len(answer)])
        assert [delta.finish_reason is not None for delta in deltas] == [False] * (len(deltas) - 1) + [True]
