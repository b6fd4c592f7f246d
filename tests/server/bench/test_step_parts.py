"""Where the time of a step is said to go."""

import pytest
import torch
from test_graphs import Subject
from tiny_llama import TinyLlama

from server.bench.steps.parts import Stopwatch, Timeline, Times, watched
from server.bench.steps.row import Part
from server.engine.attention.timer import CpuDevice, Device
from server.engine.execution import runner
from server.engine.execution.runner import ModelRunner
from server.engine.scheduling.engine import Engine
from server.model.load.load import load_config, load_decoder
from server.settings import LoadFormat

PROMPTS = [[5, 6, 7], [8, 9, 10, 11]]


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def wait(self, seconds: float) -> None:
        self.now += seconds


def subject(tiny_llama: TinyLlama, path: str = "graphable") -> Subject:
    config = load_config(tiny_llama.folder)
    device, load_format = torch.device("cpu"), LoadFormat.AUTO
    decoder = load_decoder(tiny_llama.folder, config, dtype=torch.float32, device=device, load_format=load_format)
    return Subject(decoder, path=path)


def timed(subject: Subject, device: Device) -> tuple[Times, float | None]:
    """What two requests' steps were made of, and how busy the device was."""
    watch, timeline = Stopwatch({Part.WAIT}), Timeline(device)
    with watched(watch, timeline):
        subject.session.submit_all(PROMPTS, max_tokens=4).drain()
    return watch.take()[0], timeline.take()


def test_a_part_is_counted_without_those_inside_of_it_and_the_host_without_those_apart() -> None:
    clock, cpu_clock = Clock(), Clock()
    watch = Stopwatch({Part.FILL}, clock, cpu_clock)

    def fill() -> None:
        clock.wait(2)
        cpu_clock.wait(1)

    filling = watch.timed(Part.FILL, fill)

    def launch() -> str:
        clock.wait(3)
        cpu_clock.wait(10)
        filling()
        clock.wait(5)
        cpu_clock.wait(20)
        filling()
        return "launched"

    assert watch.timed(Part.LAUNCH, launch)() == "launched"
    clock.wait(100)  # nobody's
    cpu_clock.wait(100)
    filling()
    assert watch.take() == ({Part.LAUNCH: 8, Part.FILL: 6}, 30)
    assert watch.take() == ({}, 0)


def test_a_part_that_raises_is_counted_and_ends() -> None:
    clock = Clock()
    watch = Stopwatch((), clock, Clock())

    def fail() -> None:
        clock.wait(1)
        raise ValueError("lost")

    with pytest.raises(ValueError, match="lost"):
        watch.timed(Part.FORWARD, fail)()
    watch.timed(Part.PLAN, lambda: clock.wait(4))()
    assert watch.take()[0] == {Part.FORWARD: 1, Part.PLAN: 4}


class Event:
    """At a moment that the test has set."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.at = 0.0

    def record(self) -> None:
        self.at = self.clock()

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, end: "Event") -> float:
        return end.at - self.at


class Events(CpuDevice):
    def __init__(self, clock: Clock) -> None:
        self.clock = clock

    def event(self, is_captured: bool) -> Event:
        assert not is_captured
        return Event(self.clock)


def test_the_device_is_busy_but_between_two_steps() -> None:
    clock = Clock()
    timeline = Timeline(Events(clock))
    for pause in (50, 1, 2):  # what was before the first step is nobody's
        clock.wait(pause)
        timeline.begin()
        clock.wait(7 if pause == 50 else 6)
        timeline.end()
    assert timeline.take() == pytest.approx(1 - 3 / 15)
    assert timeline.take() is None


def test_every_part_of_an_eager_step_is_seen(tiny_llama: TinyLlama) -> None:
    times, busy = timed(subject(tiny_llama, "eager"), CpuDevice())
    assert times.keys() == set(Part) - {Part.WAIT}  # a CPU has nothing to wait for
    assert min(times.values()) > 0
    assert busy is not None
    assert 0 < busy < 1


def test_every_part_of_a_replayed_step_is_seen(tiny_llama: TinyLlama) -> None:
    replayed = subject(tiny_llama)
    times, busy = timed(replayed, CpuDevice())
    assert replayed.graphs.num_replays > 0
    assert times.keys() >= {Part.PLAN, Part.FILL, Part.LAUNCH, Part.FORWARD, Part.TELL}
    assert busy is not None
    assert 0 < busy < 1


def test_the_choice_of_likeliest_tokens_is_seen_as_sampling() -> None:
    watch = Stopwatch(())
    with watched(watch, Timeline(CpuDevice())):
        assert runner.greedy(torch.tensor([[0.0, 1.0]])).token_ids.tolist() == [1]
    assert watch.take()[0].keys() == {Part.SAMPLE}


def test_a_wait_for_an_event_is_seen_and_what_was_replaced_is_put_back() -> None:
    before = Engine.step, ModelRunner.launch, torch.cuda.Event.synchronize
    watch = Stopwatch(())
    with watched(watch, Timeline(CpuDevice())):
        assert Engine.step is not before[0]
        with pytest.raises(AttributeError):  # there is no event without a GPU, but the call is timed
            torch.cuda.Event.synchronize(None)  # type: ignore[arg-type]
    assert watch.take()[0].keys() == {Part.WAIT}
    assert (Engine.step, ModelRunner.launch, torch.cuda.Event.synchronize) == before
