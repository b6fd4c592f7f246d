"""Roles of the Gluon kernels that stumble at random give the same bits; where one order is lost, they do not.

Beside compute-sanitizer (test_races.py): racecheck knows no copy and no named barrier, this leaves none out.
"""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from support import races
from support.races.shaken_kernels import MUTANTS, copy_kernels

PROGRAM = Path(races.__file__).with_name("shaken_calls.py")
KINDS = [f"{phase} {dim}" for phase in ("prefill", "extend", "decode") for dim in (64, 128, 256)]
KINDS += ["prefill 80", "prefill 192", "window 64"]
Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    def run(names: list[str], repeats: int, *, shaken: bool, mutant: str | None = None) -> object:
        kernels = copy_kernels(tmp_path / ("shaken" if shaken else "plain"), shaken=shaken, mutant=mutant)
        environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(kernels), *sys.path])}
        command = [
            sys.executable,
            str(PROGRAM),
            "--repeats",
            str(repeats),
            *names,
        ]
        return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)

    return run


def given(stdout: str) -> dict[str, list[str]]:
    """Results of each run of each call."""
    found: dict[str, list[str]] = {}
    for line in stdout.splitlines():
        if line.startswith("gave "):
            _, digest, name = line.split(" ", 2)
            found.setdefault(name, []).append(digest)
    return found


@pytest.mark.gpu
@pytest.mark.sanitizer
@pytest.mark.usefixtures("_hopper")
@pytest.mark.parametrize("kind", KINDS)
def test_stumbling_roles_give_the_same_bits(kind: str, run: Run) -> None:
    from support.races.race_calls import CALLS  # imports kernels for the GPU

    names = [name for name in CALLS if name.startswith(kind)]
    plain, shaken = run(names, 1, shaken=False), run(names, 10, shaken=True)
    assert plain.returncode == 0, plain.stderr[-2000:]
    assert shaken.returncode == 0, shaken.stdout[-500:] + shaken.stderr[-2000:]
    expected = given(plain.stdout)
    assert list(expected) == names
    assert given(shaken.stdout) == {name: digests * 10 for name, digests in expected.items()}


@pytest.mark.gpu
@pytest.mark.sanitizer
@pytest.mark.usefixtures("_hopper")
@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_lost_order_shows(mutant: str, run: Run) -> None:
    """Other bits, a launch that never ends, or one that dies."""
    names = ["prefill 128" if mutant.endswith("by name") else "prefill 64"]
    plain, shaken = run(names, 1, shaken=False), run(names, 5, shaken=True, mutant=mutant)
    assert plain.returncode == 0, plain.stderr[-2000:]
    assert "launched" in shaken.stdout, shaken.stderr[-2000:]
    assert shaken.returncode or given(shaken.stdout)[names[0]] != given(plain.stdout)[names[0]] * 5


@pytest.mark.parametrize("mutant", MUTANTS)
def test_every_mutant_still_finds_what_it_changes(mutant: str, tmp_path: Path) -> None:
    name, edits = MUTANTS[mutant]
    sources = [
        (copy_kernels(tmp_path / str(i), mutant=each) / "kernels" / "hopper" / f"{name}.py").read_text()
        for i, each in enumerate((None, mutant))
    ]
    assert sources[0] != sources[1], edits
    assert "shake()" in sources[1]
