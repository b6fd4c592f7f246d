"""A step of nobody's prompt, up to its launch, leaves no trace."""

import queue
from itertools import count

from test_graphs import MAX_LEN, PAGE_SIZE, Subject, decoder
from tiny_llama import TinyLlama

from server.engine.process import Loop
from server.engine.scheduling.engine import Engine, EngineOptions
from server.engine.scheduling.pages import PagePool
from server.engine.scheduling.runner_api import StepResult
from server.engine.scheduling.scheduler import Scheduler, SchedulerLimits
from server.engine.scheduling.sequence import Batch
from server.engine.startup.rehearsal import Rehearsal
from server.model.decoder import Decoder
from server.protocol.messages import (
    FromEngine,
    Heartbeat,
    Knock,
    SamplingParams,
    Shutdown,
    StepOutput,
    Submit,
    ToEngine,
)

__all__ = ["decoder"]  # the fixture


def test_tokens_and_counts_are_the_same_with_rehearsals_between_steps(decoder: Decoder, tiny_llama: TinyLlama) -> None:
    plain = Subject(decoder).session.submit_all(tiny_llama.prompts).drain()
    subject = Subject(decoder)
    rehearsals: list[Batch] = []

    def prepare(batch: Batch) -> None:
        rehearsals.append(batch)
        runner.rehearse(batch)

    runner = subject.session.engine._runner
    assert hasattr(runner, "rehearse")
    rehearsal = Rehearsal(prepare, PAGE_SIZE, clock=count(1).__next__)
    subject.session.submit_all(tiny_llama.prompts)
    while subject.session.engine.has_work:
        rehearsal()
        num_replays = subject.graphs.num_replays
        subject.session.step()
        assert subject.graphs.num_replays <= num_replays + 1
    assert len(rehearsals) == len(subject.session.outputs)
    assert subject.graphs.find(rehearsals[0]) is not None  # it is a graph's step
    assert subject.session.all_tokens(len(tiny_llama.prompts)) == tiny_llama.greedy
    assert subject.session.launches() == plain.launches()
    assert rehearsals[0].num_tokens < MAX_LEN


def test_it_rehearses_again_only_after_a_while() -> None:
    now, rehearsals = [1.0], []
    rehearsal = Rehearsal(rehearsals.append, 64, clock=lambda: now[0])
    rehearsal()
    now[0] += 0.005
    rehearsal()
    assert len(rehearsals) == 1
    now[0] += 0.006
    rehearsal()
    assert len(rehearsals) == 2


class Landed:
    def __init__(self, num_rows: int) -> None:
        self._num_rows = num_rows

    def result(self) -> StepResult:
        return StepResult([1] * self._num_rows)


class Ones:
    def launch(self, batch: Batch) -> Landed:
        return Landed(len(batch.sampled_rows))


def test_only_an_idle_loop_rehearses_and_it_goes_on_waiting_for_the_request() -> None:
    inbox: queue.SimpleQueue[ToEngine] = queue.SimpleQueue()
    request = Submit("a", [1, 2], SamplingParams(max_tokens=1))
    for message in (Knock(), request, Knock(), Shutdown()):  # the second one comes with work
        inbox.put(message)
    engine = Engine(Scheduler(SchedulerLimits(64, 4, 32), PagePool(32, 4)), Ones(), EngineOptions(10, (), seed=0))
    sent: list[FromEngine] = []
    seen: list[int] = []
    Loop(engine, inbox, sent.append, rehearse=lambda: seen.append(engine.num_waiting)).run()
    assert seen == [0]
    assert not any(isinstance(message, StepOutput) for message in sent)


class Overdue:
    """An attestor whose time has come."""

    is_busy, is_due = False, True

    def __init__(self) -> None:
        self.num_polls = 0

    def ask(self, trigger: str) -> None: ...

    def poll(self) -> None:
        self.num_polls += 1


def test_who_only_knocks_keeps_an_idle_engine_neither_from_its_heartbeat_nor_from_its_attestations() -> None:
    """A client without a key knocks too: the supervisor would kill an engine that it keeps from beating for 30 s."""
    inbox: queue.SimpleQueue[ToEngine] = queue.SimpleQueue()
    for message in (Knock(), Knock(), Shutdown()):
        inbox.put(message)
    engine = Engine(Scheduler(SchedulerLimits(64, 4, 32), PagePool(32, 4)), Ones(), EngineOptions(10, (), seed=0))
    sent: list[FromEngine] = []
    attestor = Overdue()
    Loop(engine, inbox, sent.append, attestor).run()
    assert [type(message) for message in sent] == [Heartbeat]
    assert attestor.num_polls == 1
