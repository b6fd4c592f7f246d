"""A lock on the temporary folder of the engine's socket, by which a killed server's folder is known and removed."""

import contextlib
import fcntl
import os
import re
import shutil
import stat
from collections.abc import Callable
from pathlib import Path

from server.supervisor.socket_folder import SOCKET_NAME, make_socket_folder

_NAME = re.compile(r"hallmark-[a-z0-9_]{8}")  # as mkdtemp makes them; hallmark-model-... is another's
_CONTENT = {SOCKET_NAME}


class LockedFolder:
    """A temporary folder that this process locks: the kernel releases the lock when the process dies, however it does.

    path  of the folder
    """

    def __init__(self, make: Callable[[], Path] = make_socket_folder) -> None:
        """`make` makes the folder. Removes those of dead servers of this user beside it. Raises OSError."""
        while True:
            self.path = make()
            self._lock = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY)
            with contextlib.suppress(
                OSError
            ):  # a file system without locks: the folder is never taken for a dead server's
                fcntl.flock(self._lock, fcntl.LOCK_EX)
            if self.path.exists():
                break
            os.close(self._lock)  # a server that started at the same time found it before it was locked
        _remove_dead(self.path.parent)

    def remove(self) -> None:
        """Remove the folder and what is in it."""
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)


def _remove_dead(parent: Path) -> None:
    """Remove the folders that no process has locked. What cannot be removed stays."""
    with contextlib.suppress(OSError), os.scandir(parent) as entries:
        for entry in entries:
            if _NAME.fullmatch(entry.name):
                with contextlib.suppress(OSError):
                    _remove_unlocked(Path(entry.path))


def _remove_unlocked(folder: Path) -> None:
    """Remove a folder of this user that holds a socket at most. Raises OSError, BlockingIOError where it is locked."""
    lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        about = os.fstat(lock)
        is_private = about.st_uid == os.geteuid() and stat.S_IMODE(about.st_mode) == 0o700
        if is_private and set(os.listdir(lock)) <= _CONTENT:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder)
    finally:
        os.close(lock)
