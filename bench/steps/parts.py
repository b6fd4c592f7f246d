"""Time of each part of a step on the stepping thread, and the share of a step in which the device was busy."""

import time
from collections.abc import Callable, Collection
from itertools import pairwise

from server.engine.operators.attention_timer import Device, Event
from server.engine.scheduling.step_parts import Part

Times = dict[Part, float]  # seconds


class Stopwatch:
    """Time of one thread by part, and the processor time of the host's own parts."""

    def __init__(
        self,
        apart: Collection[Part],
        clock: Callable[[], float] = time.perf_counter,
        cpu_clock: Callable[[], float] = time.thread_time,
    ) -> None:
        """`apart`: the parts that are not the host's."""
        self._apart = frozenset(apart)
        self._clock = clock
        self._cpu_clock = cpu_clock
        self._part: Part | None = None
        self._since = self._cpu_since = self._host_s = 0.0
        self._times: Times = {}

    def take(self) -> tuple[Times, float]:
        """Return the time of each part and of the host since the last call."""
        found = self._times, self._host_s
        self._times, self._host_s = {}, 0.0
        return found

    def mark(self, part: Part | None) -> None:
        """Count the time since the last mark for its part; from now on the thread is at `part`, or outside a step."""
        now = self._clock()
        if self._part is not None:
            self._times[self._part] = self._times.get(self._part, 0.0) + now - self._since
        self._since = now
        was_host, is_host = self._is_host(self._part), self._is_host(part)
        if is_host is not was_host:  # the processor's clock costs ten times the other
            cpu_now = self._cpu_clock()
            self._host_s += cpu_now - self._cpu_since if was_host else 0.0
            self._cpu_since = cpu_now
        self._part = part

    def _is_host(self, part: Part | None) -> bool:
        return part is not None and part not in self._apart


class Timeline:
    """Steps on the device, each between two events: after its inputs are copied, and after its last kernel."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._start: Event | None = None
        self._steps: list[tuple[Event, Event]] = []

    def begin(self) -> None:
        self._start = self._mark()

    def end(self) -> None:
        if self._start is not None:
            self._steps.append((self._start, self._mark()))
        self._start = None

    def take(self) -> float | None:
        """The share of the time that the device was at a step, since the last call; waits. None below two steps."""
        steps, self._steps = self._steps, []
        if len(steps) < 2:
            return None
        steps[-1][1].synchronize()
        idle = sum(max(0.0, end.elapsed_time(start)) for (_, end), (start, _) in pairwise(steps))
        whole = steps[0][1].elapsed_time(steps[-1][1])
        return 1 - idle / whole if whole > 0 else None

    def _mark(self) -> Event:
        event = self._device.event(False)
        event.record()
        return event


class StepTimer:
    """Watches one engine: set `mark` as the mark of the engine and of its runner."""

    def __init__(self, watch: Stopwatch, timeline: Timeline) -> None:
        self.watch = watch
        self.timeline = timeline
        self._latest: Part | None = None

    def mark(self, part: Part | None) -> None:
        """The stepping thread is at `part` from now on; None: outside a step."""
        self.watch.mark(part)
        if self._latest is Part.FILL:
            self.timeline.begin()
        if self._latest is Part.LAUNCH and part is Part.REPORT:
            self.timeline.end()
        self._latest = part
