"""Every shipped Gluon kernel under compute-sanitizer: no bad address, no misused barrier, no unset memory, no race."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from support import races

pytestmark = [pytest.mark.sanitizer, pytest.mark.usefixtures("_hopper")]

ROOT = Path(__file__).resolve().parents[3]
PROGRAM = Path(races.__file__).with_name("race_calls.py")
TOOL = shutil.which("compute-sanitizer") or shutil.which("compute-sanitizer", path="/usr/local/cuda/bin")
CHECKS = {
    "memcheck": ("prefill", "window", "extend", "decode", "skinny", "wide"),
    "synccheck": ("prefill", "window", "extend", "decode", "skinny", "wide"),
    "initcheck": ("prefill", "window", "extend", "decode", "skinny", "wide"),
    "racecheck": ("decode", "skinny", "wide"),
}

# What racecheck reports of prefill and extend, by file: accesses to the ring of posted tiles, and Triton's own hand-out
# of roles to warps, which it writes and reads between barriers of the whole program (barrier.sync 1). To 2 to 5 of a
# kernel's reads of the ring ptxas (12.8) gives the line of what uses them, `skip_keys`, and to no other access (prefill
# 64 long and 192, extend 64 and 128 without parts). They stand where the others do, between the wait for the slot and
# the arrival that hands it back: test_hopper_compile.py reads that from machine code.
ROLES = ("if VARIANT.tiling.consumers == 2:", "else:", "gl.warp_specialize([")
REPORTED = {
    "hopper/schedule.py": ("ring.index(index).store(", "return gl.max(ring.index(index).load("),
    "hopper/consumer.py": ("fill = skip_keys(keys, fill, num_below",),
    "prefill/kernel.py": ("def hallmark_gluon_prefill(", *ROLES),
    "extend/kernel.py": ("def hallmark_gluon_extend(", *ROLES),
}


@pytest.fixture(autouse=True, scope="module")
def _sanitizer() -> None:
    """Skip where compute-sanitizer is not installed."""
    if TOOL is None:
        pytest.skip("needs compute-sanitizer of the CUDA toolkit")


def source_of(name: str) -> Path:
    """The file with this folder and name."""
    [found] = (ROOT / "kernels").rglob(name)
    return found


def reported_lines() -> set[tuple[str, str]]:
    """(file, line number) of all of them."""
    return {
        (name, str(number))
        for name, starts in REPORTED.items()
        for number, line in enumerate(source_of(name).read_text().splitlines(), 1)
        if line.lstrip().startswith(starts)
    }


def environment() -> dict[str, str]:
    """Make each tensor an allocation of its own: else what is past one is another's."""
    return os.environ | {
        "PYTORCH_NO_CUDA_MEMORY_CACHING": "1",
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests")]),
    }


@pytest.mark.parametrize(("check", "kind"), [(check, kind) for check, kinds in CHECKS.items() for kind in kinds])
def test_compute_sanitizer_finds_nothing(check: str, kind: str) -> None:
    from support.races.race_calls import CALLS  # imports kernels for the GPU

    names = [name for name in CALLS if name.startswith(kind)]
    command = [str(TOOL), "--tool", check, "--kernel-name", "kns=hallmark", "--error-exitcode", "1"]
    program = [sys.executable, str(PROGRAM), *names]
    done = subprocess.run([*command, *program], env=environment(), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert [line.removeprefix("finite ") for line in done.stdout.splitlines() if line.startswith("finite")] == names


@pytest.mark.parametrize("kind", ["prefill", "extend"])
def test_racecheck_reports_nothing_but_what_it_cannot_follow(kind: str) -> None:
    """The ring of posted tiles is written by all lanes of a warp, with one value, and handed on by one of them.

    In PTX a `bar.warp.sync` stands between: test_hopper_compile.py reads it before every arrival. The lanes are
    together there, so ptxas makes a NOP of it, and racecheck (2025.3), which sees machine code, reports a race.
    What judges the ring is test_consan.py.
    """
    from support.races.race_calls import CALLS  # imports kernels for the GPU

    names = [name for name in CALLS if name.startswith(kind)]
    command = [str(TOOL), "--tool", "racecheck", "--kernel-name", "kns=hallmark", "--print-limit", "10000"]
    program = [sys.executable, str(PROGRAM), *names]
    done = subprocess.run([*command, *program], env=environment(), capture_output=True, text=True, check=False)
    assert [line.removeprefix("finite ") for line in done.stdout.splitlines() if line.startswith("finite")] == names
    accesses = [line for line in done.stdout.splitlines() if "ccess at" in line]
    found = [re.search(r" in (?:\S*/)?(\w+/\w+\.py):(\d+)", line) for line in accesses]
    assert {each.groups() if each else line for each, line in zip(found, accesses, strict=True)} <= reported_lines()
