"""The path that serves among those that are proven, with several fallbacks and times of all kinds."""

import random

import pytest

from qualification.evidence.choice import Rated, first_of
from qualification.evidence.evidence import Timing

CLEAR = 0.5  # of the first tier's time: a fallback that is faster beyond any doubt


def rated(
    name: str, index: int, p50_us: float | None, *, is_fallback: bool = True, may_compete: bool = True
) -> Rated[str]:
    return Rated(name, index, None if p50_us is None else Timing(p50_us, 0.01, 20), is_fallback, may_compete)


@pytest.mark.parametrize("seed", range(200))
def test_whatever_the_order_the_fastest_believed_path_serves(seed: int) -> None:
    """All are timed: the fastest of the first tier, or the fastest of the fallbacks that clearly beat it."""
    rng = random.Random(seed)
    places = rng.sample(range(20), 6)
    first = [rated(f"first {i}", places[i], rng.uniform(10, 20), is_fallback=False) for i in range(2)]
    best = min(first, key=lambda it: it.timing.p50_us if it.timing else 0.0)
    assert best.timing is not None
    others = []
    for i in range(4):
        share = rng.choice([rng.uniform(0.1, CLEAR), rng.uniform(1.0, 3.0)])
        others.append(rated(f"other {i}", places[2 + i], share * best.timing.p50_us, may_compete=rng.random() < 0.7))
    beating = [it for it in others if it.may_compete and it.timing and it.timing.p50_us < best.timing.p50_us]
    expected = min(beating, key=lambda it: it.timing.p50_us if it.timing else 0.0, default=best)
    paths = rng.sample([*first, *others], 6)
    chosen = first_of(paths)
    assert chosen is not None
    assert chosen.of == expected.of


def test_without_times_the_first_tier_serves_in_its_order() -> None:
    paths = [rated("b", 2, None, is_fallback=False), rated("a", 1, None, is_fallback=False), rated("c", 0, 1.0)]
    chosen = first_of(paths)
    assert chosen is not None
    assert chosen.of == "a"
    assert first_of([]) is None
