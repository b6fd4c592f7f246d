"""The calls that a bench compiles ahead: `python -m bench.attention.ahead SEED DEVICE PIPE...`.

A call is a case with the names of paths: a worker calls each path on it once.
"""

import sys
from collections.abc import Hashable, Sequence
from contextlib import suppress
from functools import partial

import msgspec
import torch

from bench.attention.cases import BenchCase
from bench.attention.inputs import make_inputs
from bench.attention.peers import Unavailable
from bench.attention.run import contenders_of
from kernels.catalog import path_named
from kernels.system.child_process import python_command
from kernels.system.device import read_fingerprint
from kernels.vocabulary.shape import Phase
from qualification.compiling.processes import alternated, compiling_ahead, serve_calls
from qualification.measure.compiling.compile_worker import share_gpu
from qualification.measure.trials.failures import KERNEL_ERRORS

_MAX_BYTES = 2**31  # of a case: longer ones launch the same kernels, and the processes share the GPU's memory


def compile_ahead(
    cases: Sequence[BenchCase], names: Sequence[str], device: torch.device, *, num_processes: int, seed: int
) -> str:
    """Call the paths of these names once on each case, in `num_processes` processes; return one line about the result.

    The processes have ended when it returns.
    """
    said = ["nothing is compiled ahead"]
    program = python_command("bench.attention.ahead", str(seed), str(device))
    with compiling_ahead(calls_of(cases, names), program, num_processes=num_processes) as wait:
        wait(said.append)
    return said[-1]


def calls_of(cases: Sequence[BenchCase], names: Sequence[str]) -> list[bytes]:
    """Return the cases that are not too large, as calls of this program, in the order for workers."""

    def kind(case: BenchCase) -> Hashable:
        shape = case.shape
        queries = max(case.queries) if shape.phase is Phase.DECODE else 0
        return (shape.phase, shape.head_dim, shape.window is None, shape.softcap is None, shape.sinks, queries)

    small = [case for case in cases if case.num_bytes <= _MAX_BYTES]
    return [msgspec.json.encode((case, names)) for case in alternated(small, kind)]


def make_call(line: bytes, device: torch.device, seed: int) -> bool:
    """Return whether any path could be called on the case."""
    case, names = msgspec.json.decode(line, type=tuple[BenchCase, list[str]])
    num_calls = 0
    for contender in contenders_of([path_named(name) for name in names], [], read_fingerprint(device)):
        if case.shape.phase in contender.phases:
            with suppress(Unavailable, *KERNEL_ERRORS):
                contender.prepare(make_inputs(case, device, seed=seed)).call()
                num_calls += 1
    return num_calls > 0


if __name__ == "__main__":
    serve_calls(sys.argv[3:], partial(make_call, device=torch.device(sys.argv[2]), seed=int(sys.argv[1])), share_gpu)
