"""Progress of a download by the hub client: lines for a log, out of its bars for a terminal."""

import time
from collections.abc import Callable, Mapping
from threading import Lock
from typing import Any

from qualification.common.progress import TimeLeft, duration

_REPORT_EVERY_S = 5.0


def sized(num_bytes: int) -> str:
    """Format a number of bytes as 16.4 GB or 3.1 MB."""
    return f"{num_bytes / 1e9:.1f} GB" if num_bytes >= 1e8 else f"{num_bytes / 1e6:.1f} MB"


class FetchProgress:
    """A line about the bytes that have come, every few seconds. Safe to call from several threads."""

    def __init__(self, total: int, say: Callable[[str], None], clock: Callable[[], float] = time.monotonic) -> None:
        self._total = total
        self._say = say
        self._clock = clock
        self._time_left = TimeLeft(clock)
        self._started = self._said_at = clock()
        self._done = 0
        self._lock = Lock()

    def __call__(self, done: int) -> None:
        with self._lock:
            self._done = max(done, self._done)
            now = self._clock()
            is_whole = self._done >= self._total > 0
            if now - self._said_at < _REPORT_EVERY_S and not is_whole:
                return
            self._said_at = now
            spent = f"in {duration(now - self._started)}" if is_whole else self._time_left(self._done, self._total)
            self._say(f"fetching: {sized(self._done)} of {sized(self._total)}, {spent}")
            self._total = 0 if is_whole else self._total  # said once


def bars_of(progress: Callable[[int], None]) -> type[Any]:
    """Return what the client takes for a class of progress bars: it counts bytes, and shows nothing itself."""

    class Bar:
        format_dict: Mapping[str, object] = {}

        def __init__(self, *_: object, unit: str = "it", total: int | None = None, **__: object) -> None:
            self.n = 0
            self.total = total
            self._counts = unit == "B"

        def __enter__(self) -> "Bar":
            return self

        def __exit__(self, *_: object) -> None:
            return None

        def update(self, n: float | None = 1) -> None:
            self.n += int(n or 0)
            if self._counts:
                progress(self.n)

        def close(self) -> None: ...
        def refresh(self) -> None: ...
        def set_description(self, *_: object, **__: object) -> None: ...
        def set_description_str(self, *_: object, **__: object) -> None: ...
        def set_postfix_str(self, *_: object, **__: object) -> None: ...

    return Bar
