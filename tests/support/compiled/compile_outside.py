"""Programs that compile: outside of the interpreter that tests may run in, and into a cache of their own.

The cache is kept between runs and shared by checkouts and parallel workers: Triton names an entry by the source, the
options and the version that it depends on, and moves it into place whole. One version of all kernels takes 250 MB. A
run of the tests first removes what is older than 30 days; between runs the folder may be deleted.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

PROGRAMS = Path(__file__).resolve().parent
REPOSITORY = PROGRAMS.parents[2]
KEPT_S = 30 * 86_400


def run_outside(program: str, *arguments: str, cache: Path | None = None) -> Any:
    """Return the JSON in the last line that a program of this folder prints. `cache`: instead of the kept one."""
    paths = os.pathsep.join([str(REPOSITORY), *sys.path])
    with tempfile.TemporaryDirectory() as empty:
        folder = cache or kept_cache() or empty
        environment = {**os.environ, "TRITON_CACHE_DIR": str(folder), "PYTHONPATH": paths}
        environment.pop("TRITON_INTERPRET", None)
        command = [sys.executable, str(PROGRAMS / program), *arguments]
        ran = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr[-4000:]
    return json.loads(ran.stdout.splitlines()[-1])


def kept_cache() -> Path | None:
    """$XDG_CACHE_HOME/hallmark-tests/triton, which is made; None where it cannot be written to."""
    caches = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    folder = Path(caches, "hallmark-tests", "triton")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return folder
    except OSError:
        return None


def remove_old_entries(folder: Path, now: float) -> None:
    """Remove the entries that were made more than 30 days before `now`, in seconds since 1970."""
    for entry in folder.iterdir():
        if entry.is_dir() and now - entry.stat().st_mtime > KEPT_S:
            shutil.rmtree(entry, ignore_errors=True)
