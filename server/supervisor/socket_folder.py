"""The private folder of the socket between the API process and the engine."""

import logging
import os
import tempfile
from pathlib import Path

from server.errors import SettingsError

logger = logging.getLogger(__name__)

SOCKET_NAME = "engine.sock"
SHORT_FOLDER = "/tmp"
MAX_SOCKET_PATH_BYTES = 103  # macOS; Linux takes 107
PREFIX = "hallmark-"
_RANDOM_CHARS = 8  # that mkdtemp adds to the prefix


def make_socket_folder(wanted: str | None = None, short: str = SHORT_FOLDER) -> Path:
    """Create a folder of mode 0700 that no other user can enter and whose path a Unix socket can have.

    It is in `wanted` (None: the folder for temporary files, TMPDIR), or in `short` where that is too long. Raises
    SettingsError where neither can be used, and OSError where a folder that could be used takes none at the moment.
    """
    try:
        parent = tempfile.gettempdir() if wanted is None else wanted
    except FileNotFoundError as error:
        raise SettingsError(f"{error.strerror}: set TMPDIR to a folder that can be written to") from error
    num_bytes = _socket_path_bytes(parent)
    if num_bytes <= MAX_SOCKET_PATH_BYTES:
        return Path(tempfile.mkdtemp(prefix=PREFIX, dir=parent))
    problem = (
        f"the path of the engine's socket would have {num_bytes} bytes in TMPDIR {parent}, "
        f"the limit is {MAX_SOCKET_PATH_BYTES}"
    )
    try:
        folder = Path(tempfile.mkdtemp(prefix=PREFIX, dir=short))
    except OSError as error:
        why = f"{short} cannot be used instead ({error.strerror})"
        raise SettingsError(f"{problem}, and {why}: set TMPDIR to a shorter folder") from error
    logger.warning("%s; the socket is in %s instead", problem, folder)
    return folder


def _socket_path_bytes(parent: str) -> int:
    return len(os.fsencode(os.path.join(parent, PREFIX + "x" * _RANDOM_CHARS, SOCKET_NAME)))
