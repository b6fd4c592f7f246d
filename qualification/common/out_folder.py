"""The folder into which a command writes its results."""

import tempfile
from pathlib import Path


def ready_to_write(folder: Path) -> None:
    """Make the folder and try to write to it, before minutes are spent on measuring. Raises OSError; leaves no file."""
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=folder) as file:
        file.write(b"\0")
