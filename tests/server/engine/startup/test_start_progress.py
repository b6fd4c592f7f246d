"""Reports of a process on its start: whenever it has got further, and none where it waits."""

import queue

import pytest

from server.engine.startup.start_progress import StartProgress


def test_progress_is_told_once_for_each_change() -> None:
    told: queue.SimpleQueue[tuple[str, int]] = queue.SimpleQueue()
    progress = StartProgress(lambda stage, count: told.put((stage, count)), every_s=0.02)
    first = told.get(timeout=10)
    assert first[0] == "starting"
    with pytest.raises(queue.Empty):
        told.get(timeout=0.2)
    for _ in range(2):  # the same stage twice is progress, too
        progress.note("loading")
        stage, count = told.get(timeout=10)
        assert (stage, count > first[1]) == ("loading", True)
        first = stage, count
    progress.end()
    progress.note("serving")
    with pytest.raises(queue.Empty):
        told.get(timeout=0.2)
