"""Programs that compile: outside of the interpreter that tests may run in, and outside of Triton's own cache."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parent.parent


def run_outside(program: Path, cache: Path) -> Any:
    """The JSON in the last line that a program prints."""
    paths = os.pathsep.join([str(REPOSITORY), *sys.path])
    environment = {**os.environ, "TRITON_CACHE_DIR": str(cache), "PYTHONPATH": paths}
    environment.pop("TRITON_INTERPRET", None)
    command = [sys.executable, str(program)]
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr[-4000:]
    return json.loads(ran.stdout.splitlines()[-1])
