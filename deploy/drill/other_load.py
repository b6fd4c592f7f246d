"""Load of other programs on this machine while a gate measures: the cores that they take, and a wait for less."""

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import psutil

_BUSY = slice(0, 3), slice(5, 8)  # of /proc/stat: user nice system, irq softirq steal; neither idle nor iowait
_TICKS_A_SECOND = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class Used:
    """Seconds of the machine's cores until a moment: of all programs, and of this one with all that it has started."""

    at: float  # monotonic
    everyone_s: float
    own_s: float

    def others_since(self, earlier: "Used") -> float:
        """Return the cores that other programs took in the mean; a host that takes them counts as one."""
        took_s = (self.everyone_s - earlier.everyone_s) - (self.own_s - earlier.own_s)
        return max(0.0, took_s / (self.at - earlier.at))


def used() -> Used:
    """Read what has been used until now."""
    fields = [int(text) for text in Path("/proc/stat").read_text().splitlines()[0].split()[1:]]
    busy = sum(sum(fields[part]) for part in _BUSY)
    here = psutil.Process()
    own_s = 0.0
    for process in (here, *here.children(recursive=True)):
        try:
            own_s += sum(process.cpu_times()[:4])  # user, system, and both of its ended children
        except psutil.NoSuchProcess:
            continue  # it is among its parent's ended children, now or soon
    return Used(time.monotonic(), busy / _TICKS_A_SECOND, own_s)


def wait_for_calm(
    at_most_cores: float,
    limit_s: float,
    *,
    window_s: float = 5.0,
    read: Callable[[], Used] = used,
    sleep: Callable[[float], None] = time.sleep,
) -> float:
    """Return what others took in the last window: once it is at most that, or when the limit has passed."""
    first = before = read()
    while True:
        sleep(window_s)
        now = read()
        others = now.others_since(before)
        if others <= at_most_cores or now.at - first.at >= limit_s:
            return others
        before = now
