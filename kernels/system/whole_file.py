"""Files that are written whole or not at all."""

import os
import tempfile
from pathlib import Path


def write_whole(file: Path, content: bytes, *, mode: int = 0o644) -> None:
    """Write a file over an older one, in a folder that is made if need be. Raises OSError, and leaves nothing behind.

    By a file of a name of its own: servers in containers, which may share the folder, have the same process id.
    """
    file.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=file.parent, prefix=f".{file.name}.")
    try:
        with os.fdopen(handle, "wb") as out:
            out.write(content)
            out.flush()
            os.fsync(out.fileno())
        Path(temporary).chmod(mode)
        Path(temporary).replace(file)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
