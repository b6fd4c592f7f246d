"""A temporary folder under a lock, by which one that a killed process has left is known and removed."""

import contextlib
import fcntl
import os
import re
import shutil
import stat
import threading
from collections.abc import Callable
from pathlib import Path

_RANDOM = "[a-z0-9_]{8}"  # that mkdtemp adds to a prefix


class LockedFolder:
    """A temporary folder that this process locks: the kernel releases the lock when the process dies, however it does.

    path  of the folder
    """

    def __init__(self, make: Callable[[], Path], prefix: str, content: str) -> None:
        """Make the folder, and remove those of dead processes of this user beside it.

        make     makes it by mkdtemp, which adds eight characters to `prefix`
        content  name of the one file that it may hold
        Raises OSError.
        """
        while True:
            self.path = make()
            lock = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY)
            with contextlib.suppress(
                OSError
            ):  # a file system without locks: the folder is never taken for a dead process's
                fcntl.flock(lock, fcntl.LOCK_EX)
            if self.path.exists():
                break
            os.close(lock)  # a process that started at the same time found it before it was locked
        self._lock: int | None = lock
        self._removing = threading.Lock()
        _remove_dead(self.path.parent, re.compile(re.escape(prefix) + _RANDOM), content)

    def remove(self) -> None:
        """Remove the folder and what is in it. Any thread may call it, and again: its descriptor is closed once."""
        with self._removing:
            if self._lock is not None:
                shutil.rmtree(self.path, ignore_errors=True)
                os.close(self._lock)
                self._lock = None


def _remove_dead(parent: Path, name: "re.Pattern[str]", content: str) -> None:
    """Remove the folders that no process has locked. What cannot be removed stays."""
    with contextlib.suppress(OSError), os.scandir(parent) as entries:
        for entry in entries:
            if name.fullmatch(entry.name):
                with contextlib.suppress(OSError):
                    _remove_unlocked(Path(entry.path), content)


def _remove_unlocked(folder: Path, content: str) -> None:
    """Remove a folder of this user that holds `content` at most. Raises OSError, BlockingIOError where it is locked."""
    lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        about = os.fstat(lock)
        is_private = about.st_uid == os.geteuid() and stat.S_IMODE(about.st_mode) == 0o700
        if is_private and set(os.listdir(lock)) <= {content}:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder)
    finally:
        os.close(lock)
