"""Engines of four processes that replay graphs and run ahead give the tokens of one; of two, e2e has a server."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from support.ranks.ranks_engine import drive

pytestmark = pytest.mark.timeout(900)


def run(program: str, world: int, folder: Path, *arguments: str) -> dict[str, Any]:
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",  # a machine's name may lead nowhere
    }
    out = folder / "found.json"
    command = [sys.executable, "-m", f"support.ranks.{program}", str(world), str(out), *arguments]
    done = subprocess.run(command, env=environment, stderr=subprocess.PIPE, text=True, timeout=800, check=False)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(out.read_text())
    return found


@pytest.mark.first
def test_ranks_with_graphs_that_run_ahead_answer_as_one_does(tmp_path: Path) -> None:
    alone, found = json.loads(json.dumps(drive(1))), run("ranks_engine", 4, tmp_path)
    layers = found.pop("layers")
    assert layers["first"] is None
    assert 0.01 < layers["largest"] <= 1
    assert found.pop("numbers") == pytest.approx(alone.pop("numbers"), abs=1e-3)
    assert found == alone
    assert found["replays"] > 10
    assert found["batched"]["r2"] == found["alone"]["r2"]
    assert found["embedded"] == found["batched"]
    assert found["check"] == "match"
    assert found["drafted"] == found["mixed"]
    assert found["drafted replays"] > 3


def test_a_rank_that_computes_another_layer_is_seen(tmp_path: Path) -> None:
    found = run("ranks_engine", 2, tmp_path, "support.ranks.shifted_rank")
    assert found["first"].startswith("layer 0, queries of rank 1, in ")


def test_two_ranks_of_a_hybrid_answer_as_the_plain_loop(tmp_path: Path) -> None:
    found = run("hybrid_ranks", 2, tmp_path)
    kinds = ("", "batched ", "fork ")
    assert found["answers"] == {
        f"{kind}{index}": answer for kind in kinds for index, answer in enumerate(found["plain loop"])
    }
    assert found["hits"] > 0
    assert found["replays"] > 10
