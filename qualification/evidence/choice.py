"""The choice among proven paths of a shape: by times that are believed, else by the order of the catalog.

Servers decide by it (`qualification/decision`), and so do the commands that read a matrix without a catalog.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from kernels.vocabulary.path import Tier
from kernels.vocabulary.path_order import competes_on, is_chosen_by_time, place_of, tier_of
from qualification.evidence.evidence import Evidence, Timing, is_clearly_faster

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Rated(Generic[T]):
    """A path that can compute the shape, of a status that all it is compared with have."""

    of: T  # what the caller calls it
    index: int  # in the catalog's order
    timing: Timing | None  # None: none that is believed
    is_fallback: bool
    may_compete: bool  # a fallback that serves before the first tier here, where it is clearly faster


def first_of(paths: Iterable[Rated[T]]) -> Rated[T] | None:
    """Return the path that serves: the first tier before fallbacks, but one that may compete and is clearly faster."""
    found = list(paths)
    first = [path for path in found if not path.is_fallback]
    chosen = _first_of_tier(first or found)
    if chosen is None or chosen.timing is None or chosen.is_fallback:
        return chosen
    faster = [path for path in found if beats(path, chosen)]
    return _first_of_tier(faster) or chosen


def beats(path: Rated[T], chosen: Rated[T]) -> bool:
    """True when a fallback that may compete serves in place of a path of the first tier."""
    if not (path.is_fallback and path.may_compete) or path.timing is None or chosen.timing is None:
        return False
    return is_clearly_faster(path.timing, chosen.timing)


def _first_of_tier(paths: Sequence[Rated[T]]) -> Rated[T] | None:
    """The fastest has its place in the catalog among those whose times are not believed; the first of these serves."""
    timed = [path for path in paths if path.timing is not None]
    fastest = min(timed, key=lambda path: (_p50_us(path), path.index), default=None)
    left = [path for path in paths if path.timing is None] + ([] if fastest is None else [fastest])
    return min(left, key=lambda path: path.index, default=None)


def _p50_us(path: Rated[T]) -> float:
    assert path.timing is not None
    return path.timing.p50_us


def time_of(evidence: Evidence) -> float:
    """Microseconds; infinite where it was not timed, or its time is not believed."""
    timing = evidence.believed_timing
    return float("inf") if timing is None else timing.p50_us


def choice_of(entries: Iterable[Evidence]) -> Evidence | None:
    """Return the entry that serves, from one shape's valid evidence."""
    rated = [
        Rated(
            of=entry,
            index=place_of(entry.path),
            timing=entry.believed_timing if is_chosen_by_time(entry.path) else None,
            is_fallback=tier_of(entry.path) is Tier.FALLBACK,
            may_compete=entry.fingerprint.device in competes_on(entry.path),
        )
        for entry in sorted(entries, key=lambda entry: entry.path)
        if entry.is_proven
    ]
    chosen = first_of(rated)
    return None if chosen is None else chosen.of


def is_left_to_fallback(chosen: Evidence, entries: Iterable[Evidence]) -> bool:
    """True when a fallback serves because no path of the first tier is proven, not because it is clearly faster."""
    proven_tiers = {tier_of(entry.path) for entry in entries if entry.is_proven}
    return tier_of(chosen.path) is Tier.FALLBACK and Tier.FIRST not in proven_tiers
