"""Which of several proven paths serves a shape: by measured times where they are believed, else by the catalog's order.

The one rule of who decides in a server (`decide.py`) and of who reads a matrix without a catalog (`choice.py`).
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from qualification.evidence.evidence import Timing, is_clearly_faster

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
    """What serves: the first tier before fallbacks, but for one that may compete and is clearly faster."""
    found = list(paths)
    first = [path for path in found if not path.is_fallback]
    chosen = _first_of_tier(first or found)
    if chosen is None or chosen.timing is None or chosen.is_fallback:
        return chosen
    faster = [path for path in found if beats(path, chosen)]
    return _first_of_tier(faster) or chosen


def beats(path: Rated[T], chosen: Rated[T]) -> bool:
    """Whether a fallback that may compete serves in place of a path of the first tier."""
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
