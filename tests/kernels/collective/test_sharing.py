"""Memory that ranks share, where the driver refuses on one of them: all ranks go on, without it and alike."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from support import ranks as programs

WORLD = 3
PROGRAM = Path(programs.__file__).with_name("sharing_rank.py")
WILLING, NO_EXPORT, NO_MAP = "", "cuIpcGetMemHandle:0", "cuIpcOpenMemHandle_v2:2"
NO_END = f"{NO_MAP}+cuIpcCloseMemHandle:0"
DRIVERS = (WILLING, NO_EXPORT, NO_MAP, NO_END)
Found = dict[str, list[dict[str, Any]]]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Found:
    """Return the findings of each rank, by driver."""
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",  # a machine's name may lead nowhere
    }
    folder = str(tmp_path_factory.mktemp("ranks"))
    command = [sys.executable, str(PROGRAM), folder, str(WORLD), *DRIVERS]
    subprocess.run(command, env=environment, timeout=120, check=True)
    found = [json.loads(Path(folder, str(rank)).read_text()) for rank in range(WORLD)]
    return {driver: [of_rank[index] for of_rank in found] for index, driver in enumerate(DRIVERS)}


def test_every_rank_maps_the_memory_of_the_others(ranks: Found) -> None:
    own = [1016, 2016, 3016]
    for rank, found in enumerate(ranks[WILLING]):
        expected = [own[it] if it == rank else 100_000 + own[it] for it in range(WORLD)]
        assert found == {"addresses": expected, "held": 1, "mapped": WORLD - 1}


@pytest.mark.parametrize("driver", [NO_EXPORT, NO_MAP], ids=["export", "map"])
def test_a_refusal_on_one_rank_is_that_of_all(driver: str, ranks: Found) -> None:
    call, rank = driver.split(":")
    error = f"{call} failed with CUDA's error 801 on rank {rank} of 3"
    assert ranks[driver] == [{"error": error, "held": 0, "mapped": 0}] * WORLD


def test_memory_that_stays_mapped_is_kept_by_its_rank(ranks: Found) -> None:
    error = "cuIpcOpenMemHandle_v2 failed with CUDA's error 801 on rank 2 of 3"
    assert [it["error"] for it in ranks[NO_END]] == [error] * WORLD
    assert [it["held"] for it in ranks[NO_END]] == [0, 1, 1]  # rank 0 had mapped those of ranks 1 and 2
    assert [it["mapped"] for it in ranks[NO_END]] == [2, 0, 0]
