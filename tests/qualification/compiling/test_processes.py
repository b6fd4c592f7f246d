"""Compiling ahead: the calls of workers, their ends, and what the run then says. These workers compile nothing."""

import os
import resource
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from qualification.compiling.processes import Found, Made, compiling_ahead, compiling_found, processes_for

# Notes each call beside its process id; "deadly" ends the worker, "endless" never returns.
WORKER = """
import os, sys, time
from qualification.compiling.processes import serve_calls

def make(line):
    with open(sys.argv[1], "a") as file:
        file.write(f"{os.getpid()} {line.decode()}")
    if line == b"deadly\\n":
        os._exit(9)
    if line == b"endless\\n":
        time.sleep(1000)
    return True

serve_calls(sys.argv[2:], make)
"""
CALLS = [b"a", b"b", b"c", b"d", b"e", b"f"]


@pytest.fixture
def notes(tmp_path: Path) -> Path:
    return tmp_path / "notes"


def worker(notes: Path) -> list[str]:
    return [sys.executable, "-c", WORKER, str(notes)]


def said_of(calls: Sequence[bytes], program: Sequence[str], num_processes: int = 2, **more: float) -> list[str]:
    said: list[str] = []
    with compiling_ahead(calls, program, num_processes=num_processes, **more) as wait:
        wait(said.append)
    return said


def test_every_call_is_made_once(notes: Path) -> None:
    said = said_of(CALLS, worker(notes))
    assert sorted(line.split()[1] for line in notes.read_text().splitlines()) == ["a", "b", "c", "d", "e", "f"]
    assert said[-1] == "compiling ahead in 2 processes, 6 of 6 calls"


def test_worker_that_dies_loses_one_call(notes: Path) -> None:
    said = said_of([b"a", b"deadly", *CALLS[2:]], worker(notes))
    assert len(notes.read_text().splitlines()) == 6
    assert [line.split(":")[0] for line in said[-2:]] == [
        "compiling ahead in 2 processes, 5 of 6 calls",
        "1 of 6 calls were not compiled ahead",
    ]


@pytest.mark.parametrize("program", [[sys.executable, "-c", "exit(1)"], ["/none/such"]], ids=["dies", "missing"])
def test_program_that_fails_leaves_every_call_to_the_run(program: list[str]) -> None:
    assert said_of(CALLS, program) == ["6 of 6 calls were not compiled ahead: the workers have ended"]


def test_no_files_left_leave_every_call_to_the_run(notes: Path) -> None:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (4, limits[1]))
    try:
        said = said_of(CALLS, worker(notes))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert said == ["6 of 6 calls were not compiled ahead: the workers have ended"]


def test_leaving_early_ends_the_workers(notes: Path) -> None:
    with compiling_ahead([b"endless"] * 4, worker(notes), num_processes=3):
        while not notes.exists():
            time.sleep(0.01)
    for line in notes.read_text().splitlines():
        with pytest.raises(ProcessLookupError):
            os.kill(int(line.split()[0]), 0)


def test_workers_without_an_answer_are_not_waited_for(notes: Path) -> None:
    said: list[str] = []
    calls = [b"a", b"endless", b"b", b"endless"]
    with compiling_ahead(calls, worker(notes), num_processes=4, patience_s=0.5) as wait:
        while not notes.exists() or len(notes.read_text().splitlines()) < len(calls):
            time.sleep(0.01)
        begun = time.monotonic()
        wait(said.append)
        assert time.monotonic() - begun < 10
    assert said[-1] == "2 of 4 calls were not compiled ahead: no answer for 0.5 s"


@pytest.mark.parametrize(("count", "num_processes"), [(3, 8), (6, 1)])
def test_few_calls_or_one_process_start_no_worker(notes: Path, count: int, num_processes: int) -> None:
    assert said_of(CALLS[:count], worker(notes), num_processes) == []
    assert not notes.exists()


def test_at_most_32_workers_are_started(notes: Path) -> None:
    """A worker a core would fill the GPU with CUDA contexts, and exceed 1,024 open files with its pipes."""
    assert said_of(CALLS * 60, worker(notes), 384)[-1] == "compiling ahead in 32 processes, 360 of 360 calls"


@pytest.mark.parametrize(
    ("num_cores", "gpu_gb", "expected"), [(16, 141, 16), (384, 141, 32), (32, 24, 12), (8, 24, 8), (4, 1, 1)]
)
def test_small_gpu_has_fewer_workers_than_cores(num_cores: int, gpu_gb: int, expected: int) -> None:
    """More contexts would leave the run itself no memory, which ends it."""
    assert processes_for(num_cores, gpu_gb * 2**30) == expected


# Finds the calls that it is ordered to make, of which it knows "known" already; "bad" fails.
FINDER = """
import sys
from qualification.compiling.processes import Found, serve_found

found = sys.stdin.read().split()
if "nothing" in found:
    exit(1)
print("finding takes a moment", file=sys.stderr)
serve_found(sys.argv[1:], Found([it for it in found if it != "known"], ["known"]), lambda line: line != b"bad\\n")
"""


@pytest.mark.parametrize(
    ("order", "made"),
    [
        (b"a known b c", Made(Found(["a", "b", "c"], ["known"]), 3)),
        (b"a bad known", Made(Found(["a", "bad"], ["known"]), 1)),
        (b"known", Made(Found([], ["known"]), 0)),
        (b"nothing", Made(None, 0)),
    ],
)
def test_program_finds_its_calls_by_an_order(order: bytes, made: Made) -> None:
    told: list[tuple[int, int]] = []
    with compiling_found(order, [sys.executable, "-c", FINDER], num_processes=2) as wait:
        assert wait(lambda done, total: told.append((done, total))) == made
    assert made.is_whole == (order not in (b"a bad known", b"nothing"))
    if made.found is not None:
        count = len(made.found.calls)
        assert told[-1] == (count, count)
