"""Latest progress of the ranks of an engine that starts, and the time since."""

import time
from collections.abc import Callable

from server.protocol.messages import StartBeat


class StartWatch:
    """Progress of one start, from its first second on."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._latest: dict[int, tuple[StartBeat, float]] = {}
        self._moved_at = clock()

    def beat(self, beat: StartBeat) -> None:
        """Take a rank's progress. The same again is none."""
        known = self._latest.get(beat.rank)
        if known is None or known[0] != beat:
            self._moved_at = self._clock()
            self._latest[beat.rank] = beat, self._moved_at

    @property
    def silent_s(self) -> float:
        """Seconds in which no rank has done anything."""
        return self._clock() - self._moved_at

    def __str__(self) -> str:
        """Text of each rank and its stage, the rank first that has been at it longest."""
        now = self._clock()
        ranks = sorted(self._latest.values(), key=lambda it: it[1])
        said = [f"rank {it.rank} is at {it.stage} for {now - at:.0f} s" for it, at in ranks]
        return ", ".join(said) or "no rank has said where it is"
