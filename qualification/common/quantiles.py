"""Quantiles of few samples, said honestly: how many carry one, and how far off it may be. Assumes no distribution.

Everything rests on one fact: of n independent samples the number below the true q-quantile is binomial with n and q.
Source: Wilks 1941, "Determination of sample sizes for setting tolerance limits", Ann. Math. Statist. 12(1):91-96;
intervals by order statistics: David and Nagaraja 2003, "Order Statistics", 3rd ed., section 7.1.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

CONFIDENCE = 0.95


@dataclass(frozen=True, slots=True)
class Interval:
    """`[lo, hi]` holds the true value with the confidence that was asked for."""

    lo: float
    hi: float


def needed_samples(q: float, confidence: float = CONFIDENCE) -> int:
    """The fewest samples that carry the q-quantile: their extremes lie beyond it with `confidence`.

    With fewer, the largest of all samples is itself likely to be below the p99, so no rule could name one. 5 for a
    median, 29 for a p90, 299 for a p99 (Wilks 1941, one-sided).
    """
    if not 0 < q < 1:
        raise ValueError(f"a quantile is between 0 and 1, got {q}")
    return math.ceil(math.log(1 - confidence) / math.log(max(q, 1 - q)))


def quantile(samples: Sequence[float], q: float) -> float | None:
    """The q-quantile, by linear interpolation between order statistics; None from too few samples to carry one."""
    if len(samples) < needed_samples(q):
        return None
    ordered = sorted(samples)
    place = q * (len(ordered) - 1)
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def quantile_interval(samples: Sequence[float], q: float, confidence: float = CONFIDENCE) -> Interval | None:
    """The narrowest pair of order statistics that holds the true q-quantile, with equal tails; None from too few."""
    ordered, n = sorted(samples), len(samples)
    tail = (1 - confidence) / 2
    # P(X_(i) > quantile) = P(at most i - 1 samples below it): the largest i with at most `tail` of it; above likewise.
    below = _cumulative(n, q)
    lo = max((i for i in range(1, n + 1) if below[i - 1] <= tail), default=None)
    hi = min((i for i in range(1, n + 1) if 1 - below[i - 1] <= tail), default=None)
    return None if lo is None or hi is None else Interval(ordered[lo - 1], ordered[hi - 1])


def ratio_interval(
    ours: Sequence[float], theirs: Sequence[float], q: float, confidence: float = CONFIDENCE
) -> Interval | None:
    """Bounds of our q-quantile over theirs; None from too few samples on either side. All samples are positive.

    Each side's interval is made with half of the error, so that both hold together with `confidence` (Bonferroni):
    wider than a bootstrap's, but its promise is exact for any distribution and any number of samples.
    """
    each = 1 - (1 - confidence) / 2
    a, b = quantile_interval(ours, q, each), quantile_interval(theirs, q, each)
    return None if a is None or b is None else Interval(a.lo / b.hi, a.hi / b.lo)


def _cumulative(n: int, q: float) -> list[float]:
    """P(Binomial(n, q) <= k) for k = 0..n, in logarithms: q**n leaves the range of a float near n = 100,000."""
    total, sums = 0.0, []
    for k in range(n + 1):
        log_ways = math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1)
        total += math.exp(log_ways + k * math.log(q) + (n - k) * math.log1p(-q))
        sums.append(min(total, 1.0))
    return sums
