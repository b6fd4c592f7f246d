"""Latest progress of the ranks of an engine that starts, and the time since."""

import time
from collections.abc import Callable

from server.protocol.messages import StartBeat


class StartWatch:
    """Progress of one start, from its first second on."""

    def __init__(self, num_ranks: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._num_ranks = num_ranks
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
        """Text of each rank and its stage: those first that never reported one, then the one longest at its stage."""
        now = self._clock()
        ranks = sorted(self._latest.values(), key=lambda it: it[1])
        silent = [f"rank {rank} has reported nothing" for rank in range(self._num_ranks) if rank not in self._latest]
        return ", ".join([*silent, *(f"rank {it.rank} is at {it.stage} for {now - at:.0f} s" for it, at in ranks)])
