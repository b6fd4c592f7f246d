"""The kernels that the profiler saw: of each marked call, and of everything around the calls.

On a GPU these are the kernels as CUPTI reports them, on a CPU the operators that do arithmetic. Names are shortened to
what a person recognises: template arguments, signatures and tile sizes are left out.
"""

from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch._C._autograd import DeviceType
from torch.autograd.profiler import profile, record_function

from kernels.driver.kernel_names import is_helper, short_name
from kernels.driver.seen import Seen

_MARK = "attention call "  # the marked range of call n is named so, with n behind it
# In the names of operators that do arithmetic.
_CPU_WORK = ("scaled_dot_product", "attention", "softmax", "mm")


@dataclass(frozen=True, slots=True)
class _Event:
    """A kernel or an operator, and when the host started it."""

    name: str
    started_ns: int


Mark = Callable[[], AbstractContextManager[object]]  # around one call


def profiled(work: Callable[[Mark], object], device: torch.device) -> Seen:
    """Run `work` under the profiler. It gets a factory of contexts, and puts one around each call to distinguish.

    Waits for the device, before and after. Costs some milliseconds; the first use on a GPU may take seconds.
    """
    num_calls = 0

    def mark() -> AbstractContextManager[object]:
        nonlocal num_calls
        num_calls += 1
        return record_function(f"{_MARK}{num_calls - 1}")

    is_cuda = device.type == "cuda"
    _synchronize(device)
    # Not torch.profiler: what that adds, function events by operator, takes ten times as long as the forward pass.
    with profile(use_device="cuda" if is_cuda else None, use_kineto=True) as profiler:
        work(mark)
        _synchronize(device)
    results: Any = profiler.kineto_results
    return _sort(list(results.events()), num_calls, is_cuda=is_cuda)


def calls_seen(calls: Sequence[Callable[[], object]], device: torch.device) -> Seen:
    """Profile each of `calls` as one marked call."""

    def work(mark: Mark) -> None:
        for call in calls:
            with mark():
                call()

    return profiled(work, device)


def temporary_bytes(call: Callable[[], object], device: torch.device) -> int | None:
    """Return the peak of what one call allocates; None on a CPU, where torch counts no allocations."""
    if device.type != "cuda":
        return None
    torch.cuda.synchronize(device)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    call()
    torch.cuda.synchronize(device)
    return max(0, torch.cuda.max_memory_allocated(device) - before)


def _sort(events: list[Any], num_calls: int, *, is_cuda: bool) -> Seen:
    """Give each kernel to the call during which the host launched it."""
    on_host = [event for event in events if event.device_type() == DeviceType.CPU]
    marks = {event.name(): event for event in on_host if event.name().startswith(_MARK)}
    ranges = [marks[f"{_MARK}{n}"] for n in range(num_calls) if f"{_MARK}{n}" in marks]
    found = _kernels(events, on_host) if is_cuda else _operators(on_host)
    calls: list[Counter[str]] = [Counter() for _ in range(num_calls)]
    outside: Counter[str] = Counter()
    starts = [event.start_ns() for event in ranges]

    def call_at(started_ns: int) -> int | None:
        n = bisect_right(starts, started_ns) - 1
        return n if n >= 0 and started_ns <= ranges[n].end_ns() else None

    for event in found:
        n = call_at(event.started_ns)
        (outside if n is None else calls[n])[event.name] += 1
    if is_cuda:
        return Seen(tuple(calls), outside, _kernel_seconds(events))
    in_calls = [event for event in on_host if call_at(event.start_ns()) is not None]
    return Seen(tuple(calls), outside, _own_seconds(on_host), _own_seconds(in_calls))


def _kernels(events: Iterable[Any], on_host: Iterable[Any]) -> list[_Event]:
    """Kernels by the moment of their launch: the driver's call has their correlation id, an operator links to them."""
    launched = {event.correlation_id(): event.start_ns() for event in on_host if event.name().startswith("cu")}
    operators = {event.correlation_id(): event.start_ns() for event in on_host if not event.name().startswith("cu")}
    found = []
    for event in events:
        name = event.name()
        if event.device_type() != DeviceType.CUDA or name.startswith(_MARK) or is_helper(short_name(name)):
            continue
        started = launched.get(event.correlation_id())
        if started is None:
            started = operators.get(event.linked_correlation_id(), 0)
        found.append(_Event(short_name(name), started))
    return found


def _operators(on_host: Iterable[Any]) -> list[_Event]:
    """Operators that do arithmetic, the innermost only: those around them would count the same work again."""
    working = [event for event in on_host if _is_work(event.name())]
    found = []
    for event in working:
        inner = (it for it in working if it is not event and event.start_ns() <= it.start_ns() <= event.end_ns())
        if not any(it.end_ns() <= event.end_ns() for it in inner):
            found.append(_Event(event.name(), event.start_ns()))
    return found


def _kernel_seconds(events: Iterable[Any]) -> dict[str, float]:
    """Return the time of the device's kernels and copies by name."""
    found: dict[str, float] = {}
    for event in events:
        if event.device_type() == DeviceType.CUDA and not event.name().startswith(_MARK):
            found[event.name()] = found.get(event.name(), 0.0) + event.duration_ns() / 1e9
    return found


def _own_seconds(on_host: Iterable[Any]) -> dict[str, float]:
    """Return the time of operators by name, each less the operators that it called on its thread."""
    found: dict[str, float] = {}
    around: dict[int, list[Any]] = {}  # by thread: events that have not ended, outermost first
    for event in sorted(on_host, key=lambda it: (it.start_ns(), -it.end_ns())):
        calling = around.setdefault(event.start_thread_id(), [])
        while calling and calling[-1].end_ns() < event.end_ns():
            calling.pop()
        seconds = event.duration_ns() / 1e9
        if calling and _is_operator(calling[-1].name()):
            found[calling[-1].name()] -= seconds
        if _is_operator(event.name()):
            found[event.name()] = found.get(event.name(), 0.0) + seconds
        calling.append(event)
    return found


def _is_operator(name: str) -> bool:
    """Return whether an event of the host is an operator, and no range that somebody marked."""
    return "::" in name


def _is_work(name: str) -> bool:
    return name.startswith("aten::") and any(part in name for part in _CPU_WORK)


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
