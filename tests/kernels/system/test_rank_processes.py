"""Processes of ranks: their folders are removed, and rank 0 ends when it can hear no more of another."""

import queue
import sys
import tempfile
from pathlib import Path

import psutil
import pytest

from kernels.system.rank_processes import PREFIX, RankProcesses

SLEEPS = [sys.executable, "-S", "-c", "import time; time.sleep(60)"]


@pytest.fixture(autouse=True)
def _own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks meet in a folder of the test."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


def test_the_next_group_removes_what_a_killed_one_left(tmp_path: Path) -> None:
    left = tmp_path / f"{PREFIX}ab12cd34"
    left.mkdir(mode=0o700)
    (left / "meeting").touch()
    ranks = RankProcesses(2, lambda *_: SLEEPS, leave=print)
    used = Path(ranks.meeting).parent
    try:
        used.joinpath("meeting").touch()
        assert list(tmp_path.iterdir()) == [used]
    finally:
        ranks.close()
    assert list(tmp_path.iterdir()) == []


def test_rank_0_ends_where_a_report_cannot_be_handled(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def listen(*_: object) -> None:
        raise ValueError

    gone: queue.Queue[tuple[int, list[Path]]] = queue.Queue()
    ranks = RankProcesses(
        2, lambda *_: SLEEPS, leave=lambda rank: gone.put((rank, list(tmp_path.iterdir()))), listen=listen
    )
    try:
        assert gone.get(timeout=30) == (1, []), "the folder is removed before this process ends"
    finally:
        ranks.close()
    assert "what rank 1 reported could not be handled" in caplog.text


def test_the_end_of_a_rank_is_that_of_rank_0() -> None:
    gone: queue.Queue[int] = queue.Queue()
    ends = [sys.executable, "-S", "-c", ""]
    ranks = RankProcesses(3, lambda rank, *_: ends if rank == 2 else SLEEPS, leave=gone.put)
    try:
        assert gone.get(timeout=30) == 2
    finally:
        ranks.close()
    assert gone.empty(), "whom we end is no loss"


def test_ranks_before_one_that_cannot_be_started_are_ended(tmp_path: Path) -> None:
    before = set(psutil.Process().children())

    def command(rank: int, _: int, __: str) -> list[str]:
        if rank < 3:
            return SLEEPS
        assert len({*psutil.Process().children()} - before) == 2
        return ["no-such-program"]

    with pytest.raises(FileNotFoundError, match="no-such-program"):
        RankProcesses(4, command, leave=print)
    assert {*psutil.Process().children()} <= before
    assert list(tmp_path.iterdir()) == []
