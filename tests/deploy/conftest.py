"""Programs that these tests drive."""

import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

Promtool = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="session")
def promtool() -> Promtool:
    """Runs promtool with arguments; the caller looks at the result. Skips where it is not installed."""
    program = shutil.which("promtool")
    if program is None:
        pytest.skip("promtool is not installed (Debian package prometheus)")

    def run(*arguments: str | Path, stdin: str | None = None) -> subprocess.CompletedProcess[str]:
        command = [program, *map(str, arguments)]
        return subprocess.run(command, input=stdin, capture_output=True, text=True, timeout=60, check=False)

    return run
