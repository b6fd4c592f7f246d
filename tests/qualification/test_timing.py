import time

import pytest
import torch

from qualification.timing import median_spread, time_call, time_together

CPU = torch.device("cpu")


def test_a_call_takes_as_long_as_it_sleeps() -> None:
    began_at = time.perf_counter()
    timing = time_call(lambda: time.sleep(0.002), CPU, budget_s=0.05)
    took_us = 1e6 * (time.perf_counter() - began_at)
    assert timing.n >= 5
    assert 2000 <= timing.p50_us <= took_us / (timing.n / 2)  # half of the calls took at least as long


def test_a_call_longer_than_the_budget_is_timed_three_times() -> None:
    assert time_call(lambda: time.sleep(0.01), CPU, budget_s=0.001).n == 3


def test_a_steady_call_ends_before_the_budget() -> None:
    assert time_call(lambda: time.sleep(0.001), CPU, max_spread=10.0, budget_s=60.0).n == 20


def test_the_spread_of_many_samples_is_that_of_their_middle() -> None:
    """Of 100 samples the interval reaches from the 40th to the 60th. An outlier does not widen it."""
    samples = [float(n) for n in range(1, 100)] + [1e9]
    assert median_spread(samples) == pytest.approx(10 / 50.5, abs=0.02)


def test_the_spread_of_few_samples_is_their_whole_range() -> None:
    assert median_spread([10.0, 11.0, 12.0]) == pytest.approx(1 / 11)


@pytest.mark.gpu
def test_a_gpu_is_timed_by_its_own_clock() -> None:
    x = torch.randn(4096, 4096, device="cuda", dtype=torch.float16)
    timing = time_call(lambda: x @ x, x.device)
    assert 100 < timing.p50_us < 5000


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


def test_steady_calls_end_together_before_the_budget() -> None:
    timings = time_together(dict.fromkeys("ab", lambda: time.sleep(0.001)), CPU, max_spread=10.0, budget_s=60.0)
    assert {timing.n for timing in timings.values()} == {20}


def test_nothing_to_time_takes_no_time() -> None:
    assert time_together({}, CPU) == {}
