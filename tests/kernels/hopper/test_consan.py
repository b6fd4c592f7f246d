"""The ring of posted tiles under Triton's concurrency sanitizer, which knows what mbarriers order."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from support import races
from support.races.shaken_kernels import MUTANTS, copy_kernels

pytestmark = [pytest.mark.gpu, pytest.mark.sanitizer, pytest.mark.usefixtures("_hopper")]

PROGRAM = Path(races.__file__).with_name("consan_ring.py")
OF_THE_RING = [name for name in MUTANTS if name.startswith("tile ")]


def sanitized(kernels: Path) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(kernels), *sys.path])}
    command = [sys.executable, str(PROGRAM)]
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
