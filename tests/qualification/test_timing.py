import time

import pytest
import torch

from qualification.timing import median_spread, time_call

CPU = torch.device("cpu")


def test_a_call_takes_as_long_as_it_sleeps() -> None:
    timing = time_call(lambda: time.sleep(0.002), CPU, budget_s=0.05)
    assert 2000 <= timing.p50_us < 20_000
    assert timing.n >= 5


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
