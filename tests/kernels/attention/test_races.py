"""Every shipped Gluon kernel under compute-sanitizer: no bad address, no misused barrier, no unset memory, no race."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.sanitizer

HERE = Path(__file__).parent
TOOL = shutil.which("compute-sanitizer") or shutil.which("compute-sanitizer", path="/usr/local/cuda/bin")
# The ring of posted tiles of prefill and extend is written by all lanes of a warp, with one value, and handed on by one
# of them. The lanes are together there, so ptxas drops the `bar.warp.sync` between, and racecheck (2025.3) reports the
# others as a race: it says nothing of these two kernels.
CHECKS = {
    "memcheck": ("prefill", "extend", "decode", "skinny"),
    "synccheck": ("prefill", "extend", "decode", "skinny"),
    "initcheck": ("prefill", "extend", "decode", "skinny"),
    "racecheck": ("decode", "skinny"),
}


@pytest.fixture(autouse=True, scope="module")
def _hopper() -> None:
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs an sm_90 GPU")
    if TOOL is None:
        pytest.skip("needs compute-sanitizer of the CUDA toolkit")


@pytest.mark.parametrize(("check", "kind"), [(check, kind) for check, kinds in CHECKS.items() for kind in kinds])
def test_compute_sanitizer_finds_nothing(check: str, kind: str) -> None:
    from race_calls import CALLS  # imports kernels for the GPU

    names = [name for name in CALLS if name.startswith(kind)]
    # Each tensor is an allocation of its own: else what is past one is another's.
    environment = os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1", "PYTHONPATH": str(HERE.parents[2])}
    command = [str(TOOL), "--tool", check, "--kernel-name", "kns=hallmark", "--error-exitcode", "1"]
    program = [sys.executable, str(HERE / "race_calls.py"), *names]
    done = subprocess.run([*command, *program], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert [line.removeprefix("finite ") for line in done.stdout.splitlines() if line.startswith("finite")] == names
