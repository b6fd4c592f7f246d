"""Progress of a process in its start, by which one that hangs is distinguished from one that takes long."""

import threading
from collections.abc import Callable
from pathlib import Path

from kernels.calls.launch import num_compiles

EVERY_S = 1.0
_UNIT_BYTES = 64 * 2**20  # read or written: far more than a process moves that waits for others, by files or sockets


class StartProgress:
    """Reports, until `end`, what this process does and a number that grows with it, whenever either has changed.

    The number counts what is noted, kernels that are compiled, and each 64 MiB of files that are read or written: of a
    large checkpoint, or of one kernel after another, a minute may pass in one call.
    """

    def __init__(self, report: Callable[[str, int], None], *, every_s: float = EVERY_S) -> None:
        """`report` is called on a thread of its own."""
        self._report = report
        self._every_s = every_s
        self._stage = "starting"
        self._num_noted = 0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="start-progress", daemon=True)
        self._thread.start()

    def note(self, stage: str) -> None:
        """Something was done, and this is next."""
        self._stage = stage
        self._num_noted += 1

    def end(self) -> None:
        """End the reports: none follows this call's return."""
        self._ended.set()
        self._thread.join()

    def _run(self) -> None:
        reported = None
        while not self._ended.wait(self._every_s):
            now = self._stage, self._num_noted + num_compiles() + _num_moved()
            if now != reported:
                reported = now
                self._report(*now)


def _num_moved() -> int:
    """Return the units that this process has read and written; 0 where the system does not say."""
    try:
        counts = dict(line.split(b": ") for line in Path("/proc/self/io").read_bytes().splitlines())
        return (int(counts[b"rchar"]) + int(counts[b"wchar"])) // _UNIT_BYTES
    except (OSError, ValueError, KeyError):
        return 0
