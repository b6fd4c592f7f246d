import time

import pytest
import torch

from qualification.evidence.evidence import Timing
from qualification.measure.costs import timing
from qualification.measure.costs.timing import (
    Judged,
    fastest_us,
    median_spread,
    time_call,
    time_together,
    time_until_believed,
)

CPU = torch.device("cpu")


def test_a_call_takes_as_long_as_it_sleeps() -> None:
    began_at = time.perf_counter()
    found = time_call(lambda: time.sleep(0.002), CPU, budget_s=0.05)
    took_us = 1e6 * (time.perf_counter() - began_at)
    assert found.n >= 5
    assert 2000 <= found.p50_us <= took_us / (found.n / 2)  # half of the calls took at least as long


def test_slow_calls_are_timed_3_times_and_steady_ones_20() -> None:
    assert time_call(lambda: time.sleep(0.01), CPU, budget_s=0.001).n == 3
    assert time_call(lambda: time.sleep(0.001), CPU, max_spread=10.0, budget_s=60.0).n == 20
    together = time_together(dict.fromkeys("ab", lambda: time.sleep(0.001)), CPU, max_spread=10.0, budget_s=60.0)
    assert {it.n for it in together.values()} == {20}
    assert time_together({}, CPU) == {}


def test_the_spread_of_many_samples_is_that_of_their_middle() -> None:
    """100 samples have an interval from the 40th to the 60th. An outlier does not widen it."""
    samples = [float(n) for n in range(1, 100)] + [1e9]
    assert median_spread(samples) == pytest.approx(10 / 50.5, abs=0.02)


def test_the_spread_of_few_samples_is_their_whole_range() -> None:
    assert median_spread([10.0, 11.0, 12.0]) == pytest.approx(1 / 11)


BELIEVED, WIDE, WIDER = Judged(Timing(10.0, 0.2, 20), 12.0), Timing(9.0, 0.3, 20), Timing(8.0, 0.4, 20)
IMPOSSIBLE = Judged(Timing(10.0, 0.0, 20), 12.6)  # its floor is more than 1.25 times of it
UNKNOWN = Judged(Timing(10.0, float("nan"), 20), None)


@pytest.mark.parametrize(
    ("attempts", "kept", "factors"),
    [
        ([BELIEVED], 0, [1]),
        ([Judged(WIDE, None), BELIEVED], 1, [1, 2]),
        ([UNKNOWN, BELIEVED], 1, [1, 2]),
        ([IMPOSSIBLE, Judged(WIDER, 5.0), BELIEVED], 2, [1, 2, 4]),
        ([Judged(WIDER, 5.0), Judged(WIDE, 5.0), Judged(WIDER, 5.0)], 1, [1, 2, 4]),
        ([IMPOSSIBLE] * 3, 0, [1, 2, 4]),
    ],
)
def test_a_time_is_taken_again_until_it_is_believed(attempts: list[Judged], kept: int, factors: list[int]) -> None:
    asked: list[int] = []

    def attempt(factor: int) -> Judged:
        asked.append(factor)
        return attempts[len(asked) - 1]

    assert time_until_believed(attempt) is attempts[kept]
    assert asked == factors


def test_the_fastest_of_a_few_calls_is_what_a_machine_can_do() -> None:
    waits = iter([0.2, 0.0, 0.2, 0.01, 0.01, 0.01])
    assert fastest_us(lambda: time.sleep(next(waits)), CPU, budget_s=60.0, max_samples=3) < 200_000
    assert fastest_us(lambda: time.sleep(next(waits)), CPU, budget_s=0.0) >= 10_000  # two at least
    assert list(waits) == [0.01]


@pytest.mark.parametrize(
    ("needed", "taken"), [(3, [4, 4]), (20, [4, 8, 16, 32, 32]), (10**9, [4, 8, 16, 32, 64, 4, 4])]
)
def test_a_call_is_timed_behind_what_keeps_the_device_busy_while_it_is_launched(
    monkeypatch: pytest.MonkeyPatch, needed: int, taken: list[int]
) -> None:
    """The fake device comes to a call before the host has launched it where fewer flushes than `needed` are ahead."""
    flushes: list[int] = [0]

    class Flush:
        def zero_(self) -> None:
            flushes[-1] += 1

    class Event:
        def __init__(self, *, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None: ...

        def query(self) -> bool:
            return flushes[-1] < needed

        def synchronize(self) -> None:
            flushes.append(0)

        def elapsed_time(self, _end: "Event") -> float:
            return 0.01

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(timing, "_flush_buffer", lambda _device: Flush())
    fastest_us(lambda: None, CPU, max_samples=2)
    assert flushes[:-1] == taken


@pytest.mark.gpu
@pytest.mark.timed
def test_a_gpu_is_timed_by_its_own_clock() -> None:
    x = torch.randn(4096, 4096, device="cuda", dtype=torch.float16)
    found = time_call(lambda: x @ x, x.device)
    assert 100 < found.p50_us < 5000


def test_calls_timed_together_take_turns() -> None:
    order: list[str] = []
    time_together({name: lambda name=name: order.append(name) for name in "ab"}, CPU, max_samples=7)
    assert order == ["a", "b"] * 7


def test_a_slow_call_leaves_and_the_others_go_on() -> None:
    calls = {"slow": lambda: time.sleep(0.2), "fast": lambda: time.sleep(0.001)}
    timings = time_together(calls, CPU, budget_s=0.1, max_spread=0.0)
    assert timings["slow"].n == 3
    assert timings["fast"].n >= 5
    assert timings["slow"].p50_us > 5 * timings["fast"].p50_us
