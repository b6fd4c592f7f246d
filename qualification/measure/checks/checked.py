"""Measured values as checks against their limits, whatever the operator."""

import math
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Protocol, TypeVar

import torch

from qualification.evidence.evidence import CHECK_LIMITS, Check, strain


class AnyCase(Protocol):
    """One input, of any operator."""

    @property
    def name(self) -> str: ...
    @property
    def seed(self) -> int: ...


Case = TypeVar("Case", bound=AnyCase)


def uniquely_named(cases: Iterable[Case]) -> Iterator[Case]:
    """Yield the cases of one shape. Raises ValueError for a second one of the same name and seed.

    References are kept by both, so the second would be compared with the truth of the first.
    """
    seen: set[tuple[str, int]] = set()
    for case in cases:
        if (case.name, case.seed) in seen:
            raise ValueError(f"two inputs of one shape are named {case.name!r} with seed {case.seed}; rename one")
        seen.add((case.name, case.seed))
        yield case


def worst_of_each(checks: Iterable[Check]) -> tuple[Check, ...]:
    """Return the worst check of each name, sorted by name; of equally bad ones the first."""
    worst: dict[str, Check] = {}
    for check in checks:
        known = worst.get(check.name)
        if known is None or strain(check.measured, check.limit) > strain(known.measured, known.limit):
            worst[check.name] = check
    return tuple(worst[name] for name in sorted(worst))


def checked(name: str, case: AnyCase, measured: float, where: str = "") -> Check:
    """Return a measured value as a check against its limit; `where` is kept if it fails."""
    limit, unit = CHECK_LIMITS[name]
    check = Check(name, case.name, _finite(measured), limit, unit, case.seed)
    return check if check.is_passed else replace(check, where=where)


@contextmanager
def one_thread() -> Iterator[None]:
    """Use one thread for thousands of tiny CPU operations: on a busy 2-core machine two took 27 s, one takes 1.2 s."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(num_threads)


def _finite(value: float) -> float:
    """Six digits, for readable diffs. JSON has no NaN: what is no number becomes the largest, which passes no limit."""
    return float(f"{value:.6g}") if math.isfinite(value) else sys.float_info.max
