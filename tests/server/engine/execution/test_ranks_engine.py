"""Engines of four processes that replay graphs and run ahead give the tokens of one; of two, e2e has a server."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.timeout(900)


def run(world: int, folder: Path) -> dict[str, Any]:
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",  # a machine's name may lead nowhere
    }
    out = folder / f"world-{world}.json"
    command = [sys.executable, "-m", "support.ranks.ranks_engine", str(world), str(out)]
    done = subprocess.run(command, env=environment, stderr=subprocess.PIPE, text=True, timeout=800, check=False)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(out.read_text())
    return found


def test_ranks_with_graphs_that_run_ahead_answer_as_one_does(tmp_path: Path) -> None:
    alone, found = run(1, tmp_path), run(4, tmp_path)
    assert found.pop("numbers") == pytest.approx(alone["numbers"], abs=1e-3)
    assert found == {name: value for name, value in alone.items() if name != "numbers"}
    assert found["replays"] > 10
    assert found["batched"]["r2"] == found["alone"]["r2"]
    assert found["check"] == "match"
    assert found["drafted"] == found["mixed"]
    assert found["drafted replays"] > 3
