"""Memory that ranks share, where the driver refuses on one of them: all ranks go on, without it and alike."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

WORLD = 3
PROGRAM = Path(__file__).with_name("sharing_rank.py")


def ranks(folder: Path, *refusals: str) -> list[dict[str, Any]]:
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",  # a machine's name may lead nowhere
    }
    started = [
        subprocess.Popen(
            [sys.executable, str(PROGRAM), str(folder), str(rank), str(WORLD), *refusals],
            env=environment,
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(WORLD)
    ]
    return [json.loads(rank.communicate(timeout=120)[0]) for rank in started]


def test_every_rank_maps_the_memory_of_the_others(tmp_path: Path) -> None:
    own = [1016, 2016, 3016]
    for rank, found in enumerate(ranks(tmp_path)):
        expected = [own[it] if it == rank else 100_000 + own[it] for it in range(WORLD)]
        assert found == {"addresses": expected, "held": 1, "mapped": WORLD - 1}


@pytest.mark.parametrize(
    ("call", "rank"), [("cuIpcGetMemHandle", 0), ("cuIpcOpenMemHandle_v2", 2)], ids=["export", "map"]
)
def test_a_refusal_on_one_rank_is_that_of_all(call: str, rank: int, tmp_path: Path) -> None:
    error = f"{call} failed with CUDA's error 801 on rank {rank} of 3"
    assert ranks(tmp_path, f"{call}:{rank}") == [{"error": error, "held": 0, "mapped": 0}] * WORLD


def test_memory_that_stays_mapped_is_kept_by_its_rank(tmp_path: Path) -> None:
    error = "cuIpcOpenMemHandle_v2 failed with CUDA's error 801 on rank 2 of 3"
    found = ranks(tmp_path, "cuIpcOpenMemHandle_v2:2", "cuIpcCloseMemHandle:0")
    assert [it["error"] for it in found] == [error] * WORLD
    assert [it["held"] for it in found] == [0, 1, 1]  # rank 0 had mapped those of ranks 1 and 2
    assert [it["mapped"] for it in found] == [2, 0, 0]
