"""A temporary folder under a lock: what a killed process leaves is removed, what a living one has is not."""

import fcntl
import os
import subprocess
import sys
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from kernels.system.locked_folder import LockedFolder

# Another server of the same user: it makes its folder, and lives until its standard input ends or it is killed.
SERVER = """
import sys, tempfile
from pathlib import Path
from kernels.system.locked_folder import LockedFolder
folder = LockedFolder(lambda: Path(tempfile.mkdtemp(prefix="hallmark-", dir=sys.argv[1])), "hallmark-", "engine.sock")
(folder.path / "engine.sock").touch()
print(folder.path, flush=True)
sys.stdin.read()
folder.remove()
"""


def make_in(parent: Path) -> LockedFolder:
    return LockedFolder(lambda: Path(tempfile.mkdtemp(prefix="hallmark-", dir=parent)), "hallmark-", "engine.sock")


def other_server(parent: Path) -> tuple[subprocess.Popen[str], Path]:
    command = [sys.executable, "-c", SERVER, str(parent)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    return process, Path(process.stdout.readline().strip())


def test_the_next_start_removes_what_a_killed_server_left(tmp_path: Path) -> None:
    killed, left = other_server(tmp_path)
    alive, used = other_server(tmp_path)
    killed.kill()
    killed.communicate()
    assert (left / "engine.sock").exists()
    folder = make_in(tmp_path)
    assert set(tmp_path.iterdir()) == {used, folder.path}
    folder.remove()
    alive.communicate()  # which ends it
    assert list(tmp_path.iterdir()) == []


def test_what_no_server_left_stays(tmp_path: Path) -> None:
    for name in ("hallmark-notes", "hallmark-model-ab12cd34", "hallmark-ab12cd34", "elsewhere"):
        (tmp_path / name).mkdir(mode=0o700)
    (tmp_path / "hallmark-ab12cd34" / "letter.txt").touch()
    (tmp_path / "hallmark-linked00").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "hallmark-filefile").touch()
    (tmp_path / "hallmark-readable").mkdir(mode=0o755)
    before = set(tmp_path.iterdir())
    make_in(tmp_path).remove()
    assert set(tmp_path.iterdir()) == before


def test_a_folder_removed_before_it_is_locked_is_made_again(tmp_path: Path) -> None:
    """Another server's start has found it: it holds the lock, and then removes the folder."""
    made: list[Path] = []

    def make() -> Path:
        made.append(Path(tempfile.mkdtemp(prefix="hallmark-", dir=tmp_path)))
        if len(made) == 1:
            lock = os.open(made[0], os.O_RDONLY)
            fcntl.flock(lock, fcntl.LOCK_EX)
            threading.Timer(0.1, lambda: (made[0].rmdir(), os.close(lock))).start()
        return made[-1]

    folder = LockedFolder(make, "hallmark-", "engine.sock")
    assert folder.path == made[1]
    assert list(tmp_path.iterdir()) == [made[1]]
    folder.remove()


def test_removing_it_again_closes_no_file_of_others(tmp_path: Path) -> None:
    folder = make_in(tmp_path)
    folder.remove()
    others = [os.open(tmp_path, os.O_RDONLY) for _ in range(8)]  # the first has the descriptor that is free now
    folder.remove()
    for other in others:
        os.close(other)  # raises for one that is closed already


def test_threads_that_remove_it_at_once_all_go_on(tmp_path: Path) -> None:
    """Two ranks that die together are each seen by a thread of its own."""
    folder, ready = make_in(tmp_path), threading.Barrier(8)

    def remove() -> None:
        ready.wait()
        folder.remove()
        assert not folder.path.exists()

    with ThreadPoolExecutor(8) as threads:
        for each in [threads.submit(remove) for _ in range(8)]:
            each.result()
