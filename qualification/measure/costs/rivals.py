"""Timing two paths in turns, before the one that may compete serves in place of the other.

Paths of a shape are measured one after another, seconds apart. What else a machine does in one of these seconds would
choose the path.
"""

from collections.abc import Callable
from dataclasses import replace

import torch

from kernels.vocabulary.fingerprint import Device
from kernels.vocabulary.operators import AnyShape
from kernels.vocabulary.path import AnyPath, Tier
from qualification.evidence.evidence import Evidence, is_clearly_faster
from qualification.measure.costs.timing import default_budget_s, time_together

MakeCall = Callable[[AnyShape, Callable[..., None]], Callable[[], None]]  # the call that is timed


class Rivals:
    """The evidence of a run so far: of paths that compete, and of those they compete with."""

    def __init__(self, machine: Device, device: torch.device, make_call: MakeCall, budget_s: float | None) -> None:
        self._machine = machine
        self._device = device
        self._make_call = make_call
        self._budget_s = 2 * (budget_s or default_budget_s(device))
        self._first: dict[AnyShape, list[tuple[AnyPath, Evidence]]] = {}
        self._competing: dict[AnyShape, list[tuple[AnyPath, Evidence]]] = {}

    def timed_again(self, path: AnyPath, found: Evidence) -> list[Evidence]:
        """Evidence to take the place of what was found before: of each pair that would change places by its times."""
        if not found.is_proven:
            return []
        is_first = path.tier is Tier.FIRST
        if not is_first and self._machine not in path.competes_on:
            return []
        own, others = (self._first, self._competing) if is_first else (self._competing, self._first)
        own.setdefault(found.shape, []).append((path, found))
        again: list[Evidence] = []
        for other_path, other in others.get(found.shape, []):
            first, rival = ((path, found), (other_path, other)) if is_first else ((other_path, other), (path, found))
            if _would_win(rival[1], first[1]):
                again += self._in_turns(first, rival)
        return again

    def _in_turns(self, *pairs: tuple[AnyPath, Evidence]) -> list[Evidence]:
        calls = {}
        for path, found in pairs:
            assert path.run is not None, "a path without a kernel is not proven"
            calls[path.name] = self._make_call(found.shape, path.run)
        timings = time_together(calls, self._device, budget_s=self._budget_s)
        return [replace(found, timing=timings[path.name]) for path, found in pairs]


def _would_win(rival: Evidence, first: Evidence) -> bool:
    timings = rival.believed_timing, first.believed_timing
    return timings[0] is not None and timings[1] is not None and is_clearly_faster(timings[0], timings[1])
