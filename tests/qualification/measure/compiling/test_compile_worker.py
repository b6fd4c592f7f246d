"""The calls that a qualification compiles ahead, and the worker that makes them. These compile nothing."""

from dataclasses import replace

import msgspec
import torch

from kernels.system.child_process import python_command
from kernels.vocabulary.buckets import Bucket
from kernels.vocabulary.path import KernelPath
from qualification.compiling.processes import compiling_ahead
from qualification.measure.compiling.compile_worker import calls_of, make_call
from support.qualification_fakes import DECODE, SHAPE, path


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
    said: list[str] = []
    with compiling_ahead(calls, program, num_processes=2) as wait:
        wait(said.append)
    assert said[-1] == "compiling ahead in 2 processes, 4 of 4 calls"


def test_failed_call_is_answered_as_failed() -> None:
    def make(shape: object, name: str) -> bool:
        return make_call(msgspec.json.encode((str(shape), name)), torch.device("cpu"), 0)

    assert make(SHAPE, "sdpa.cpu")
    assert make(DECODE, "sdpa.math")
    assert not make(replace(SHAPE, head_dim=63, num_heads=3), "sdpa.cpu")
