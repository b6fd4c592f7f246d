"""Engines of two and four processes that replay graphs and run ahead give the tokens of one."""

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
        "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *filter(None, sys.path)]),
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",  # a machine's name may lead nowhere
    }
    out = folder / f"world-{world}.json"
    command = [sys.executable, "-m", "ranks_engine", str(world), str(out)]
    done = subprocess.run(command, env=environment, stderr=subprocess.PIPE, text=True, timeout=800, check=False)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(out.read_text())
    return found


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return run(1, tmp_path_factory.mktemp("alone"))


@pytest.mark.parametrize("world", [2, 4])
def test_ranks_with_graphs_that_run_ahead_answer_as_one_does(world: int, alone: dict[str, Any], tmp_path: Path) -> None:
    found = run(world, tmp_path)
    assert found.pop("numbers") == pytest.approx(alone["numbers"], abs=1e-3)
    assert found == {name: value for name, value in alone.items() if name != "numbers"}
    assert found["replays"] > 10
    assert found["batched"]["r2"] == found["alone"]["r2"]
    assert found["check"] == "match"
