"""The ring of posted tiles under Triton's concurrency sanitizer, which knows what mbarriers order."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from shaken_kernels import MUTANTS, copy_kernels

pytestmark = [pytest.mark.gpu, pytest.mark.sanitizer]

HERE = Path(__file__).parent
OF_THE_RING = [name for name in MUTANTS if name.startswith("tile ")]


@pytest.fixture(autouse=True, scope="module")
def _hopper() -> None:
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs an sm_90 GPU")


def sanitized(kernels: Path) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(kernels), *sys.path])}
    command = [sys.executable, str(HERE / "consan_ring.py")]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=240)


def test_the_ring_of_posted_tiles_has_no_race(tmp_path: Path) -> None:
    done = sanitized(copy_kernels(tmp_path, shaken=False))
    assert done.returncode == 0, done.stderr[-2000:]
    assert "all tiles read by all" in done.stdout


@pytest.mark.parametrize("mutant", OF_THE_RING)
def test_a_planted_race_of_the_ring_is_found(mutant: str, tmp_path: Path) -> None:
    done = sanitized(copy_kernels(tmp_path, shaken=False, mutant=mutant))
    assert "launched" in done.stdout, done.stderr[-2000:]
    assert done.returncode != 0
    assert "Buffer being accessed has outstanding" in done.stderr, done.stderr[-2000:]
