"""Compiling ahead: who gets what, what a worker's end means, and what a worker does. These workers compile nothing."""

import io
import os
import sys
import time
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
import torch
from qualification_fakes import DECODE, SHAPE, path

from kernels.buckets import Bucket
from kernels.catalog import path_named
from kernels.path import KernelPath
from qualification.measure import compile_worker
from qualification.measure.compile_ahead import Pair, compiling_ahead, in_turn, processes_for

# Notes what it is asked for beside its process id; on a path named "deadly" it dies.
WORKER = """
import json, os, sys, time
from qualification.measure.forked import fork_each, pipes_of

def serve(questions, answers):
    for line in questions:
        shape, path = json.loads(line)
        with open(sys.argv[1], "a") as file:
            file.write(f"{os.getpid()} {path} {shape}\\n")
        if path == "deadly":
            os._exit(9)
        if path == "endless":
            time.sleep(1000)
        answers.write(b"done\\n")
        answers.flush()

fork_each(pipes_of(sys.argv[2:]), serve)
"""


def compiled(name: str) -> KernelPath:
    known = path(name)
    return replace(known, limits=replace(known.limits, needs_triton=True))


def pairs_of(*names: str) -> list[Pair]:
    return [(shape, compiled(name)) for name in names for shape in (SHAPE, DECODE)]


@pytest.fixture
def notes(tmp_path: Path) -> Path:
    return tmp_path / "notes"


def worker(notes: Path) -> list[str]:
    return [sys.executable, "-c", WORKER, str(notes)]


def test_every_kernel_that_triton_compiles_is_called_once_by_one_of_the_workers(notes: Path) -> None:
    said: list[str] = []
    pairs = [*pairs_of("triton.a", "triton.b", "triton.c"), (SHAPE, path("sdpa.math"))]
    with compiling_ahead(pairs, num_processes=2, command=worker(notes)) as wait:
        wait(said.append)
    lines = [line.split(" ", 1) for line in notes.read_text().splitlines()]
    assert sorted(what for _, what in lines) == sorted(f"{it.name} {shape}" for shape, it in pairs[:-1])
    assert said[-1] == "compiling ahead in 2 processes, 6 of 6 calls"


def test_a_worker_that_dies_takes_one_call_with_it(notes: Path) -> None:
    said: list[str] = []
    pairs = [*pairs_of("triton.a")[:1], *pairs_of("deadly")[:1], *pairs_of("triton.b", "triton.c")]
    with compiling_ahead(pairs, num_processes=2, command=worker(notes)) as wait:
        wait(said.append)
    assert len(notes.read_text().splitlines()) == 6
    assert said[-2:] == [
        "compiling ahead in 2 processes, 5 of 6 calls",
        "1 of 6 calls were not compiled ahead: their workers died",
    ]


def test_workers_that_all_die_leave_the_rest_to_the_run() -> None:
    said: list[str] = []
    program = [sys.executable, "-c", "exit(1)"]
    with compiling_ahead(pairs_of("triton.a", "triton.b"), num_processes=2, command=program) as wait:
        wait(said.append)
    assert said == ["4 of 4 calls were not compiled ahead: their workers died"]


def test_an_end_before_the_last_call_ends_the_workers(notes: Path) -> None:
    with compiling_ahead(pairs_of("endless", "endless2"), num_processes=3, command=worker(notes)):
        while not notes.exists():
            time.sleep(0.01)
    for line in notes.read_text().splitlines():
        with pytest.raises(ProcessLookupError):
            os.kill(int(line.split()[0]), 0)


def test_workers_that_do_not_answer_are_not_waited_for(notes: Path) -> None:
    said: list[str] = []
    pairs = [*pairs_of("triton.a"), *pairs_of("endless")]
    with compiling_ahead(pairs, num_processes=4, command=worker(notes), patience_s=1.0) as wait:
        wait(said.append)
    assert said[-1] == "2 of 4 calls were not compiled ahead: no answer for 1 s"


def test_forked_workers_compute_with_the_torch_that_their_parent_has_imported() -> None:
    """Those of a qualification, but for the device."""
    program = """
import sys
from functools import partial
import torch
from qualification.measure import compile_worker as it

pipes = it.pipes_of(sys.argv[1:])
it.fork_each(pipes, partial(it.serve, device=torch.device("cpu"), seed=0, num_workers=len(pipes)))
"""
    cpu = path_named("sdpa.cpu")
    asked = replace(cpu, limits=replace(cpu.limits, needs_triton=True))
    said: list[str] = []
    pairs = [(shape, asked) for shape in (SHAPE, DECODE)] * 2
    with compiling_ahead(pairs, num_processes=2, command=[sys.executable, "-c", program]) as wait:
        wait(said.append)
    assert said[-1] == "compiling ahead in 2 processes, 4 of 4 calls"


@pytest.mark.parametrize(("count", "num_processes"), [(1, 8), (6, 1)])
def test_few_calls_and_a_single_process_are_not_worth_a_worker(notes: Path, count: int, num_processes: int) -> None:
    pairs = pairs_of("triton.a", "triton.b", "triton.c")[:count]
    with compiling_ahead(pairs, num_processes=num_processes, command=worker(notes)) as wait:
        wait(lambda _: None)
    assert not notes.exists()


def test_a_gpu_is_not_filled_with_the_contexts_of_a_worker_a_core(notes: Path) -> None:
    """Nor with four pipe ends a worker the 1,024 files that a process may have open."""
    said: list[str] = []
    pairs = pairs_of(*(f"triton.{index}" for index in range(200)))
    with compiling_ahead(pairs, num_processes=384, command=worker(notes)) as wait:
        wait(said.append)
    assert said[-1] == "compiling ahead in 32 processes, 400 of 400 calls"


@pytest.mark.parametrize(
    ("num_cores", "gpu_gb", "expected"), [(16, 141, 16), (384, 141, 32), (32, 24, 12), (8, 24, 8), (4, 1, 1)]
)
def test_a_small_gpu_has_fewer_workers_than_the_host_has_cores(num_cores: int, gpu_gb: int, expected: int) -> None:
    """Their contexts would leave the run itself no memory, which ends it."""
    assert processes_for(num_cores, gpu_gb * 2**30) == expected


def test_a_program_that_cannot_be_started_leaves_all_to_the_run(tmp_path: Path) -> None:
    said: list[str] = []
    pairs = pairs_of("triton.a", "triton.b")
    with compiling_ahead(pairs, num_processes=2, command=[str(tmp_path / "none")]) as wait:
        wait(said.append)
    assert said == ["4 of 4 calls were not compiled ahead: their workers died"]


def test_neighbours_differ_in_more_than_length() -> None:
    """Buckets of one kind share kernels: two workers at once would compile the same."""
    longer = [replace(SHAPE, query_bucket=it, context_bucket=it) for it in (Bucket.LE_512, Bucket.LE_2K)]
    a, b = compiled("triton.a"), compiled("triton.b")
    ordered = in_turn([(shape, it) for it in (a, b) for shape in (SHAPE, *longer)])
    assert [(shape, it.name) for shape, it in ordered] == [
        (shape, name) for shape in (SHAPE, *longer) for name in ("triton.a", "triton.b")
    ]


def test_a_worker_makes_the_calls_and_says_which_failed() -> None:
    asked = [(str(SHAPE), "sdpa.cpu"), (str(replace(SHAPE, head_dim=63, num_heads=3)), "sdpa.cpu")]
    lines = b"".join(msgspec.json.encode(pair) + b"\n" for pair in [*asked, (str(DECODE), "sdpa.math")])
    answers = io.BytesIO()
    compile_worker.serve(io.BytesIO(lines), answers, torch.device("cpu"), seed=0, num_workers=2)
    assert answers.getvalue() == b"done\nfailed\ndone\n"
