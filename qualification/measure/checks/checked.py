"""Measured values as checks against their limits, whatever the operator."""

import math
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Protocol

import torch

from qualification.evidence.evidence import CHECK_LIMITS, Check, strain


class AnyCase(Protocol):
    """One input, of any operator."""

    @property
    def name(self) -> str: ...
    @property
    def seed(self) -> int: ...


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
