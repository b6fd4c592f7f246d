"""Whole files that others name: evidence, golden files, quarantines, JSON of a model's folder."""

import errno
import os
import stat
from pathlib import Path

MAX_BYTES = 64 * 2**20  # the largest evidence has 0.2 MiB, the index of a checkpoint of 700 GB some 10 MiB


def read_regular(path: Path, *, max_bytes: int = MAX_BYTES) -> bytes:
    """Return what a regular file holds. Raises OSError, also for a pipe or a device, which might never end.

    A symbolic link to a regular file is one.
    """
    with open(path, "rb", opener=_open_at_once) as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise OSError(errno.EINVAL, "not a regular file", str(path))
        data = file.read(max_bytes + 1)
    if len(data) > max_bytes:
        raise OSError(errno.EFBIG, f"more than {max_bytes} bytes, which is the limit", str(path))
    return data


def _open_at_once(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK)  # else a pipe is waited for until someone writes to it
