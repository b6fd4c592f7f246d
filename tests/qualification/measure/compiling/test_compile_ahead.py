"""Compiling ahead: the calls of workers, their ends, and what the run then says. These workers compile nothing."""

import os
import resource
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
import torch

from kernels.system.child_process import python_command
from kernels.vocabulary.buckets import Bucket
from kernels.vocabulary.path import KernelPath
from qualification.measure.compiling.compile_ahead import calls_of, compiling_ahead, processes_for
from qualification.measure.compiling.compile_worker import make_call
from support.qualification_fakes import DECODE, SHAPE, path

# Notes each call beside its process id; "deadly" ends the worker, "endless" never returns.
WORKER = """
import os, sys, time
from qualification.measure.compiling.compile_ahead import serve_calls

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


def compiled(name: str) -> KernelPath:
    known = path(name)
    return replace(known, limits=replace(known.limits, needs_triton=True))


def test_neighbouring_calls_differ_in_more_than_length() -> None:
    """Buckets of one kind share kernels: two workers at once would compile the same. SDPA compiles nothing."""
    longer = [replace(SHAPE, query_bucket=it, context_bucket=it) for it in (Bucket.LE_512, Bucket.LE_2K)]
    paths = (compiled("triton.a"), compiled("triton.b"), path("sdpa.math"))
    calls = calls_of([(shape, it) for it in paths for shape in (SHAPE, *longer)])
    assert [tuple(msgspec.json.decode(call)) for call in calls] == [
        (str(shape), name) for shape in (SHAPE, *longer) for name in ("triton.a", "triton.b")
    ]


def test_worker_of_a_qualification_makes_its_calls() -> None:
    """Fork with the torch that the program has imported before."""
    pairs = [(SHAPE, "sdpa.cpu"), (DECODE, "sdpa.cpu")] * 2
    calls = [msgspec.json.encode((str(shape), name)) for shape, name in pairs]
    program = python_command("qualification.measure.compiling.compile_worker", "0", "cpu")
    assert said_of(calls, program)[-1] == "compiling ahead in 2 processes, 4 of 4 calls"


def test_failed_call_is_answered_as_failed() -> None:
    def make(shape: object, name: str) -> bool:
        return make_call(msgspec.json.encode((str(shape), name)), torch.device("cpu"), 0)

    assert make(SHAPE, "sdpa.cpu")
    assert make(DECODE, "sdpa.math")
    assert not make(replace(SHAPE, head_dim=63, num_heads=3), "sdpa.cpu")
