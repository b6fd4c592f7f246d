"""Drivers of engines in benches of whole steps."""

import pytest

from server.engine.scheduling.engine import Engine, EngineOptions
from server.engine.scheduling.pages import PagePool
from server.engine.scheduling.runner_api import BatchError, Pending
from server.engine.scheduling.scheduler import Scheduler, SchedulerLimits
from server.engine.scheduling.sequence import Batch
from server.full_model.drive import Driver, RequestFailed


class NoMemory:
    """A runner whose device is too small for any prompt."""

    def launch(self, batch: Batch) -> Pending:
        raise BatchError("internal_error", f"out of memory in a step of {batch.num_tokens} tokens", range(1), [])


def test_failed_step_is_no_sample_and_leaves_engine_idle() -> None:
    engine = Engine(Scheduler(SchedulerLimits(64, 4, 64), PagePool(16, 4)), NoMemory(), EngineOptions(100, (), 0))
    driver = Driver(engine)
    with pytest.raises(RequestFailed, match="out of memory in a step of 8 tokens"):
        driver.serve(2, 4, 1)
    driver.clear()
    assert not engine.has_work
