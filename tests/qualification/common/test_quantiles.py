"""Quantiles, their intervals, and the samples they need."""

import random

import pytest

from qualification.common.quantiles import needed_samples, quantile, quantile_interval, ratio_interval


@pytest.mark.parametrize(("q", "expected"), [(0.5, 5), (0.9, 29), (0.1, 29), (0.95, 59), (0.99, 299)])
def test_the_samples_a_quantile_needs_are_those_of_wilks(q: float, expected: int) -> None:
    assert needed_samples(q) == expected


def test_one_sample_too_few_gives_no_quantile() -> None:
    assert quantile([1.0] * 298, 0.99) is None
    assert quantile([1.0] * 299, 0.99) == 1.0


def test_a_quantile_lies_between_its_neighbours() -> None:
    assert quantile([5, 1, 4, 2, 3], 0.5) == 3
    assert quantile(list(range(1, 301)), 0.99) == pytest.approx(297.01)


def test_median_interval_needs_six_samples() -> None:
    assert quantile_interval(range(5), 0.5) is None
    found = quantile_interval(range(6), 0.5)
    assert found is not None
    assert (found.lo, found.hi) == (0, 5)


@pytest.mark.parametrize("q", [0.5, 0.9])
def test_intervals_have_their_stated_coverage(q: float) -> None:
    """Draw from an exponential distribution, which is nothing like a normal one; 2,000 draws of 60."""
    chance = random.Random(5)
    truth = {0.5: 0.693147, 0.9: 2.302585}[q]
    hits = 0
    for _ in range(2000):
        found = quantile_interval([chance.expovariate(1.0) for _ in range(60)], q)
        assert found is not None
        hits += found.lo <= truth <= found.hi
    assert 0.945 <= hits / 2000 <= 0.99


def test_ratio_interval_holds_1_only_for_equal_sides() -> None:
    chance = random.Random(6)
    side = [chance.uniform(0.9, 1.1) for _ in range(30)]
    other = [chance.uniform(0.9, 1.1) for _ in range(30)]
    equal, slower = ratio_interval(side, other, 0.5), ratio_interval([1.3 * x for x in side], other, 0.5)
    assert equal is not None
    assert equal.lo < 1 < equal.hi
    assert slower is not None
    assert 1.1 < slower.lo < 1.3 < slower.hi < 1.5


def test_very_many_samples_are_no_trouble() -> None:
    found = quantile_interval(range(30_000), 0.99)
    assert found is not None
    assert 29_600 < found.lo < 29_700 < found.hi < 29_800


def test_a_quantile_outside_of_0_to_1_is_refused() -> None:
    with pytest.raises(ValueError, match="between 0 and 1, got 1"):
        needed_samples(1)
