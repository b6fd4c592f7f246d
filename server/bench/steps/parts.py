"""Where the time of a step goes: the stepping thread's by parts, and when the device was at work.

The engine has no hooks for this, since they would cost every step of every server. While a bench runs, the functions
that the parts begin and end with are replaced by ones that look at the clock, and put back.
"""

import time
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager
from functools import wraps
from itertools import pairwise
from typing import Any

import torch

from server.bench.steps.row import Part
from server.engine.attention.timer import Device, Event
from server.engine.execution import runner
from server.engine.execution.graph_inputs import GraphInputs
from server.engine.execution.graphs import StepGraphs
from server.engine.execution.inputs import InputBuilder
from server.engine.execution.runner import ModelRunner
from server.engine.scheduling.engine import Engine
from server.engine.scheduling.scheduler import Scheduler
from server.model.decoder import Decoder

Times = dict[Part, float]  # seconds
_Call = Callable[..., Any]

# A part's time is that of its functions without the parts inside of them: what is left of a step is telling.
_SEAMS: tuple[tuple[object, str, Part], ...] = (
    (Engine, "step", Part.TELL),
    (Engine, "submit", Part.TELL),
    (Scheduler, "plan", Part.PLAN),
    (ModelRunner, "launch", Part.LAUNCH),
    (InputBuilder, "build", Part.FILL),
    (GraphInputs, "fill", Part.FILL),
    (StepGraphs, "replay", Part.FORWARD),
    (Decoder, "forward", Part.FORWARD),
    (Decoder, "logits", Part.SAMPLE),
    (runner, "sample", Part.SAMPLE),
    (runner, "greedy", Part.SAMPLE),  # in its place where every row is plainly greedy
    (torch.cuda.Event, "synchronize", Part.WAIT),
)
_FILLS = (InputBuilder, GraphInputs)


class Stopwatch:
    """Of one thread: the time of each part without those inside of it, and the processor time of the host's parts."""

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
        self._stack: list[Part] = []
        self._since = self._cpu_since = self._host_s = 0.0
        self._is_host = False
        self._times: Times = {}

    def take(self) -> tuple[Times, float]:
        """What was counted since the last call: by part, and of the host."""
        found = self._times, self._host_s
        self._times, self._host_s = {}, 0.0
        return found

    def timed(self, part: Part, call: _Call) -> _Call:
        """`call`, its time counted for `part`."""

        @wraps(call)
        def around(*args: Any, **kwargs: Any) -> Any:
            self._switch()
            self._stack.append(part)
            self._note_host()
            try:
                return call(*args, **kwargs)
            finally:
                self._switch()
                self._stack.pop()
                self._note_host()

        return around

    def _switch(self) -> None:
        """Count the time since the last switch for the part that it was."""
        now = self._clock()
        if self._stack:
            part = self._stack[-1]
            self._times[part] = self._times.get(part, 0.0) + now - self._since
        self._since = now

    def _note_host(self) -> None:
        """Look at the processor's clock where the host's parts begin or end: it costs ten times the other's."""
        is_host = bool(self._stack) and self._stack[-1] not in self._apart
        if is_host is not self._is_host:
            now = self._cpu_clock()
            self._host_s += now - self._cpu_since if self._is_host else 0.0
            self._cpu_since, self._is_host = now, is_host


class Timeline:
    """Steps on the device, each between two events: from when its inputs are there to its end."""

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


@contextmanager
def watched(watch: Stopwatch, timeline: Timeline) -> Iterator[None]:
    """Within, the steps of every engine of this process are timed."""
    with ExitStack() as stack:
        for owner, name, part in _SEAMS:
            call = watch.timed(part, getattr(owner, name))
            if owner in _FILLS:
                call = _followed(call, timeline.begin)
            if owner is ModelRunner:
                call = _followed(call, timeline.end)
            stack.callback(setattr, owner, name, getattr(owner, name))
            setattr(owner, name, call)
        yield


def _followed(call: _Call, after: Callable[[], None]) -> _Call:
    @wraps(call)
    def both(*args: Any, **kwargs: Any) -> Any:
        found = call(*args, **kwargs)
        after()
        return found

    return both
