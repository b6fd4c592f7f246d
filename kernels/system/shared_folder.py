"""A folder that several servers write to, in containers of their own perhaps."""

import fcntl
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_PATIENCE_S = 2.0  # the holder reads a file and writes it again: some 10 ms, more over a network


@contextmanager
def only_writer(folder: Path, *, patience_s: float = _PATIENCE_S) -> Iterator[None]:
    """Hold a folder's lock: a file that is read, extended and written inside loses no other process's additions.

    Goes on all the same where another hangs inside, or the file system has no locks: no server may stand still for
    this. Raises OSError where the folder, which is made if there is none, cannot be written to.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".lock").open("ab") as lock:  # for writing, without which NFS locks nothing; the system unlocks it
        _wait(lock.fileno(), time.monotonic() + patience_s)
        yield


def _wait(lock: int, deadline: float) -> None:
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= deadline:
                return
            time.sleep(0.005)
        except OSError:  # no locks here
            return
        else:
            return
