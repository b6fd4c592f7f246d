"""The time of each part of a step, as `hallmark bench steps` measures it."""

import pytest

from bench.steps.parts import StepTimer, Stopwatch, Timeline, Times
from server.engine.operators.attention_timer import CpuDevice, Device
from server.engine.scheduling.step_parts import Part, unmarked
from server.model.decoder import Decoder
from support.engine.graph_subject import Subject

PROMPTS = [[5, 6, 7], [8, 9, 10, 11]]


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def wait(self, seconds: float) -> None:
        self.now += seconds


def timed(subject: Subject, device: Device, temperature: float) -> tuple[Times, float | None]:
    """Time of each part of two requests' steps, and the share of it in which the device was busy."""
    timer = StepTimer(Stopwatch({Part.WAIT}), Timeline(device))
    subject.session.engine.mark = subject.runner.worker.mark = timer.mark
    subject.session.submit_all(PROMPTS, max_tokens=4, temperature=temperature)
    timer.mark(Part.REPORT)
    subject.session.drain()
    return timer.watch.take()[0], timer.timeline.take()


def test_time_counts_for_the_part_marked_last() -> None:
    clock, cpu_clock = Clock(), Clock()
    watch = Stopwatch({Part.FILL}, clock, cpu_clock)
    for part, seconds, cpu_seconds in (
        (Part.LAUNCH, 3, 10),
        (Part.FILL, 2, 1),  # no time of the host
        (Part.LAUNCH, 5, 20),
        (Part.FILL, 2, 1),
        (None, 100, 100),  # outside a step
        (Part.FILL, 2, 1),
        (None, 0, 0),
    ):
        watch.mark(part)
        clock.wait(seconds)
        cpu_clock.wait(cpu_seconds)
    assert watch.take() == ({Part.LAUNCH: 8, Part.FILL: 6}, 30)
    assert watch.take() == ({}, 0)


class Event:
    """An event of a device whose clock the test sets."""

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


def test_device_is_idle_only_between_steps() -> None:
    clock = Clock()
    timeline = Timeline(Events(clock))
    for pause in (50, 1, 2):  # the pause before the first step does not count
        clock.wait(pause)
        timeline.begin()
        clock.wait(7 if pause == 50 else 6)
        timeline.end()
    assert timeline.take() == pytest.approx(1 - 3 / 15)
    assert timeline.take() is None


@pytest.mark.parametrize("path", ["eager", "graphable"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_every_part_of_a_step_is_timed(decoder: Decoder, path: str, temperature: float) -> None:
    built = Subject(decoder, path=path)
    times, busy = timed(built, CpuDevice(), temperature)
    assert (built.graphs.num_replays > 0) is (path == "graphable")
    is_inside_graph = path == "graphable" and temperature == 0.0
    assert times.keys() >= set(Part) - ({Part.SAMPLE} if is_inside_graph else set())
    assert min(times.values()) > 0
    assert busy is not None
    assert 0 < busy < 1


def test_an_engine_without_a_bench_marks_nothing(decoder: Decoder) -> None:
    built = Subject(decoder)
    assert built.session.engine.mark is built.runner.worker.mark is unmarked
