"""Timing one call: medians, with the width of what is known about them."""

import math
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from qualification.evidence.evidence import Timing, timing_doubt

# Twice an H200's L2 (50 MB) and more: what a call reads comes from memory, as it does between a model's layers.
_FLUSH_BYTES = 256 * 2**20
# Each flush keeps an H200 busy for 65 us, a head start for the host: what the device waits for counts as the call's
# time. Four launches of a call took a host up to 150 us, and one that compiled beside it more than 260.
_NUM_FLUSHES, _MOST_FLUSHES = 4, 64
_MAX_ATTEMPTS = 3  # at a time that is believed
_MIN_KNOWN = 20  # samples, before their spread says anything


def time_call(
    call: Callable[[], object],
    device: torch.device,
    *,
    max_spread: float = 0.02,
    budget_s: float | None = None,
    max_samples: int = 400,
) -> Timing:
    """Call until the median is known to `max_spread` of itself, or the budget of time is spent.

    On CUDA by events with a cold L2, within 0.25 s; on a CPU by the clock with caches as the call before left them,
    within 0.04 s. At least 5 samples, 3 when one call takes longer than the whole budget.
    """
    is_cuda = device.type == "cuda"
    budget = budget_s if budget_s is not None else default_budget_s(device)
    clock = _Clock(call, _flush_buffer(device))
    if is_cuda:
        call()  # loads what is loaded once
    samples: list[float] = []
    started = time.perf_counter()
    while len(samples) < max_samples:
        samples.append(clock.once())
        is_spent = time.perf_counter() - started > budget
        if (is_spent and len(samples) >= _least(samples, budget)) or _is_known(samples, max_spread):
            break
    return _timing(samples)


@dataclass(frozen=True, slots=True)
class Judged:
    """A time, and the floor that was measured beside it."""

    timing: Timing
    floor_us: float | None  # None: not known

    @property
    def doubt(self) -> str | None:
        return timing_doubt(self.timing, self.floor_us)


def time_until_believed(attempt: Callable[[int], Judged]) -> Judged:
    """Time a call up to three times, until its time is believed; else give the time that is known best.

    attempt  times the call and its floor in so many times the usual budget: 1, 2, then 4
    """
    attempts: list[Judged] = []
    while len(attempts) < _MAX_ATTEMPTS:
        attempts.append(attempt(2 ** len(attempts)))
        if attempts[-1].doubt is None:
            return attempts[-1]
    return min(attempts, key=lambda judged: judged.timing.spread)


def fastest_us(
    call: Callable[[], object], device: torch.device, *, budget_s: float = 0.005, max_samples: int = 8
) -> float:
    """Microseconds of the fastest of a few calls, two at least: what the machine can do, were nothing in its way."""
    clock = _Clock(call, _flush_buffer(device))
    samples: list[float] = []
    while len(samples) < 2 or (len(samples) < max_samples and sum(samples) < budget_s * 1e6):
        samples.append(clock.once())
    return min(samples)


def time_together(
    calls: Mapping[str, Callable[[], object]],
    device: torch.device,
    *,
    max_spread: float = 0.01,
    budget_s: float | None = None,
    max_samples: int = 400,
) -> dict[str, Timing]:
    """Time several calls in rounds, one sample of each a round: what drifts in a machine drifts for all of them.

    A call drops out when it has spent `budget_s` (as in `time_call`); the rest end together, when all their medians are
    known to `max_spread`. At least 5 samples of each, 3 of what takes longer than its budget.
    """
    budget = budget_s if budget_s is not None else default_budget_s(device)
    flush = _flush_buffer(device)
    clocks = {name: _Clock(call, flush) for name, call in calls.items()}
    samples: dict[str, list[float]] = {name: [] for name in calls}
    for name in calls if device.type == "cuda" else ():
        clocks[name].once()  # loads what is loaded once
    left = list(calls)
    while left:
        for name in left:
            samples[name].append(clocks[name].once())
        left = [name for name in left if not _is_spent(samples[name], budget, max_samples)]
        if all(_is_known(samples[name], max_spread) for name in left):
            break
    return {name: _timing(values) for name, values in samples.items()}


def default_budget_s(device: torch.device) -> float:
    """Seconds of timing for one call."""
    return 0.25 if device.type == "cuda" else 0.04


def _is_spent(samples: list[float], budget: float, max_samples: int) -> bool:
    return len(samples) >= max_samples or (sum(samples) > budget * 1e6 and len(samples) >= _least(samples, budget))


def _least(samples: list[float], budget: float) -> int:
    return 3 if samples[0] > budget * 1e6 else 5


def _is_known(samples: list[float], max_spread: float) -> bool:
    return len(samples) >= _MIN_KNOWN and median_spread(samples) <= max_spread


def median_spread(samples: list[float]) -> float:
    """Half the 95% confidence interval of the median, as a share of the median, by order statistics.

    Below 6 samples no interval holds 95%: half the whole range is given.
    Source: Le Boudec, Performance Evaluation of Computer and Communication Systems, appendix A.
    """
    ordered = sorted(samples)
    n = len(ordered)
    reach = 0.98 * math.sqrt(n)  # 1.96 standard deviations of a binomial with p = 1/2
    lo = max(0, math.floor(n / 2 - reach))
    hi = min(n - 1, math.ceil(n / 2 + reach))
    return (ordered[hi] - ordered[lo]) / 2 / statistics.median(ordered)


def _timing(samples: list[float]) -> Timing:
    return Timing(float(f"{statistics.median(samples):.4g}"), round(median_spread(samples), 4), len(samples))


def _flush_buffer(device: torch.device) -> torch.Tensor | None:
    return torch.empty(_FLUSH_BYTES, dtype=torch.uint8, device=device) if device.type == "cuda" else None


class _Clock:
    """Times a call on a CPU, or on a GPU behind as many flushes as the host needs to launch it meanwhile."""

    def __init__(self, call: Callable[[], object], flush: torch.Tensor | None) -> None:
        """`flush`: a buffer that fills the L2; None on a CPU."""
        self._call, self._flush, self._num_flushes, self._may_grow = call, flush, _NUM_FLUSHES, True

    def once(self) -> float:
        """Microseconds of one call."""
        if self._flush is None:
            before = time.perf_counter()
            self._call()
            return (time.perf_counter() - before) * 1e6
        took_us, has_waited = self._behind_flushes(self._flush)
        while has_waited and self._may_grow:
            if self._num_flushes == _MOST_FLUSHES:  # the call itself waits for the device
                self._num_flushes, self._may_grow = _NUM_FLUSHES, False
            else:
                self._num_flushes = min(2 * self._num_flushes, _MOST_FLUSHES)
            took_us, has_waited = self._behind_flushes(self._flush)
        return took_us

    def _behind_flushes(self, flush: torch.Tensor) -> tuple[float, bool]:
        """(microseconds of a call, whether the device came to it before the host had launched all of it)."""
        for _ in range(self._num_flushes):
            flush.zero_()
        start = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        end = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        start.record()
        self._call()
        has_waited = bool(start.query())  # type: ignore[no-untyped-call]
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) * 1e3, has_waited
