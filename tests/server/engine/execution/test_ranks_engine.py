"""Engines of four processes that replay graphs and run ahead give the tokens of one; of two, e2e has a server."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.timeout(900)


def run(world: int | str, folder: Path, program: str = "ranks_engine") -> dict[str, Any]:
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",  # a machine's name may lead nowhere
    }
    out = folder / f"world-{world}.json"
    command = [sys.executable, "-m", f"support.ranks.{program}", str(world), str(out)]
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
    assert found["embedded"] == found["batched"]
    assert found["check"] == "match"
    assert found["drafted"] == found["mixed"]
    assert found["drafted replays"] > 3


@pytest.mark.parametrize(("follower", "is_right"), [("ranks_follower", True), ("shifted_rank", False)])
def test_layers_of_two_ranks_are_checked_together(follower: str, is_right: bool, tmp_path: Path) -> None:
    found = run(f"support.ranks.{follower}", tmp_path, "layers_of_ranks")
    if is_right:
        assert found["first"] is None
        assert 0.01 < found["largest"] <= 1
    else:
        assert found["first"].startswith("layer 0, queries, in ")


def test_two_ranks_of_a_hybrid_answer_as_the_plain_loop(tmp_path: Path) -> None:
    found = run(2, tmp_path, "hybrid_ranks")
    kinds = ("", "batched ", "fork ")
    assert found["answers"] == {
        f"{kind}{index}": answer for kind in kinds for index, answer in enumerate(found["plain loop"])
    }
    assert found["hits"] > 0
    assert found["replays"] > 10
