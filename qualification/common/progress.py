"""Progress for people: one line that is rewritten on a terminal, a line every now and then elsewhere."""

import shutil
from collections.abc import Callable
from typing import TextIO

_PLAIN_INTERVAL_S = 10.0  # between lines that stay


class ProgressLine:
    """Called as `qualify` calls its `progress`; `clock` gives seconds."""

    def __init__(self, stream: TextIO, clock: Callable[[], float], *, is_terminal: bool) -> None:
        self._stream = stream
        self._clock = clock
        self._is_terminal = is_terminal
        self._started: float | None = None
        self._measuring_since = 0.0  # of the last call with nothing done: what is prepared before says nothing of speed
        self._last_shown: float | None = None

    def __call__(self, done: int, total: int, what: str) -> None:
        now = self._clock()
        if self._started is None:
            self._started = now
        if not done:
            self._measuring_since = now
        line = f"[{done}/{total}] {self._estimate(done, total, now)}  {what}"
        if self._is_terminal:
            width = shutil.get_terminal_size().columns - 1
            self._stream.write(f"\r{line[:width].ljust(width)}")
            self._stream.flush()
        elif done == total or self._last_shown is None or now - self._last_shown >= _PLAIN_INTERVAL_S:
            self._stream.write(f"{line}\n")
            self._stream.flush()
            self._last_shown = now

    def close(self) -> None:
        """End the line, so that the next output begins on a line of its own."""
        if self._is_terminal and self._started is not None:
            self._stream.write("\n")
            self._stream.flush()

    def _estimate(self, done: int, total: int, now: float) -> str:
        if done == total:
            return f"in {duration(now - (now if self._started is None else self._started))}"
        return time_left(done, total, now - self._measuring_since)


class TimeLeft:
    """The time that is left, said anew with each piece of work that is done; `clock` gives seconds."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._since = clock()

    def __call__(self, done: int, total: int) -> str:
        """Return it in words; what is prepared before anything is done counts for nothing."""
        if not done:
            self._since = self._clock()
        return time_left(done, total, self._clock() - self._since)


def time_left(done: int, total: int, seconds: float) -> str:
    """Return the time left in words, after `seconds` in which `done` of `total` were done."""
    return f"about {duration(seconds / done * (total - done))} left" if done else "estimating"


def duration(seconds: float) -> str:
    """Format seconds as 7 s or 2:05 min."""
    whole = round(seconds)
    return f"{whole} s" if whole < 60 else f"{whole // 60}:{whole % 60:02d} min"
