"""What an idle engine does while a request is being read: the host's part of a step, of nobody's prompt."""

import time
from collections.abc import Callable

from server.engine.scheduling.pages import PagePool
from server.engine.scheduling.scheduler import Scheduler, SchedulerLimits
from server.engine.scheduling.sequence import Batch, Sequence
from server.protocol.messages import SamplingParams

_NUM_TOKENS = 48
_EVERY_S = 0.01  # at most: what came meanwhile must not wait for several
_SAMPLING = SamplingParams(max_tokens=2, temperature=0.0)


class Rehearsal:
    """Brings into the caches what a first step needs: after a pause each of its parts takes three times as long.

    It plans by a scheduler and pages of its own. Only between two steps, with nothing on its way to the device.
    """

    def __init__(
        self, prepare: Callable[[Batch], None], page_size: int, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`prepare` does all of a step but its launch."""
        num_pages = 1 + -(-_NUM_TOKENS // page_size)
        limits = SchedulerLimits(num_pages * page_size, 1, _NUM_TOKENS)
        self._scheduler = Scheduler(limits, PagePool(num_pages, page_size))
        self._prepare = prepare
        self._clock = clock
        self._at = 0.0

    def __call__(self) -> None:
        now = self._clock()
        if now - self._at < _EVERY_S:
            return
        self._at = now
        seq = Sequence("rehearsal", [0] * _NUM_TOKENS, _NUM_TOKENS, _SAMPLING, 0, now)
        self._scheduler.add(seq)
        batch = self._scheduler.plan(now)
        assert batch is not None  # the only sequence there is, and it fits
        self._prepare(batch)
        self._scheduler.finish(seq)
