"""Where a command writes what it has measured."""

import tempfile
from pathlib import Path


def ready_to_write(folder: Path) -> None:
    """Make it, and write to it: known before minutes are spent. Raises OSError where nobody may, and leaves no file."""
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=folder) as file:
        file.write(b"\0")
