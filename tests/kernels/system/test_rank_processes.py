"""Processes of ranks: their folders are removed, and rank 0 ends when it can hear no more of another."""

import queue
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

import psutil
import pytest

from kernels.system.child_process import python_command
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


def run(*command: str, cwd: Path) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False, timeout=60)


def test_a_module_imports_nothing_of_its_current_folder(tmp_path: Path) -> None:
    for name in ("kernels", "random"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit(9)")
    module = "kernels.system.whole_file"  # imports tempfile, which imports random
    assert run(*python_command(module), cwd=tmp_path).returncode == 0
    assert run(sys.executable, "-m", module, cwd=tmp_path).returncode == 9


def test_a_module_is_found_where_this_process_would_find_it(tmp_path: Path) -> None:
    lines = ["import os, sys", "print(__name__, sys.argv[1:], os.environ['MOOD'])", "sys.exit(3)"]
    (tmp_path / "found_here_alone.py").write_text("\n".join(lines))
    sys.path.insert(0, str(tmp_path))
    try:
        command = python_command("found_here_alone", "a b", "--flag", environment=["MOOD=calm"])
    finally:
        sys.path.remove(str(tmp_path))
    found = run(*command, cwd=Path("/"))
    assert (found.stdout, found.returncode) == ("__main__ ['a b', '--flag'] calm\n", 3)


def test_a_module_is_looked_for_in_the_folders_before_ours(tmp_path: Path) -> None:
    folder = tmp_path / "kernels" / "system"
    folder.mkdir(parents=True)
    (folder / "whole_file.py").write_text("raise SystemExit(7)")
    (tmp_path / "kernels" / "__init__.py").touch()
    assert run(*python_command("kernels.system.whole_file", before=[str(tmp_path)]), cwd=Path("/")).returncode == 7
    assert run(*python_command("kernels.system.whole_file"), cwd=Path("/")).returncode == 0


def test_a_child_process_gets_no_foreign_standard_library() -> None:
    command = python_command("kernels.system.whole_file", under=["ncu", "--csv"])
    assert command[0] == "env"
    assert sysconfig.get_path("stdlib") not in command[1].removeprefix("PYTHONPATH=").split(":")
    assert command[2:] == ("ncu", "--csv", sys.executable, "-P", "-m", "kernels.system.whole_file")
