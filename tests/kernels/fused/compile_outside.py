"""Programs that compile: outside of the interpreter that these tests run in, and outside of Triton's own cache."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent


def run_outside(program: str, cache: Path) -> Any:
    """The JSON that a program of this folder prints."""
    paths = os.pathsep.join([str(HERE.parents[2]), *sys.path])
    environment = {**os.environ, "TRITON_CACHE_DIR": str(cache), "PYTHONPATH": paths}
    environment.pop("TRITON_INTERPRET", None)
    command = [sys.executable, str(HERE / program)]
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    return json.loads(ran.stdout)
