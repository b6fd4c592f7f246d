"""Compiling what a run will launch, in processes side by side, into Triton's cache on disk.

Nothing depends on it: what a process misses, or fails at, is compiled (and fails) when it is measured.
"""

from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from functools import partial
from multiprocessing import get_context

import torch

from kernels.catalog import path_named
from kernels.device import read_fingerprint
from kernels.shape import Phase
from qualification.bench.attention.cases import BenchCase
from qualification.bench.attention.inputs import make_inputs
from qualification.bench.attention.peers import Unavailable
from qualification.bench.attention.run import contenders_of
from qualification.measure.qualify import KERNEL_ERRORS

_MAX_BYTES = 2**31  # of a case: longer ones launch the same kernels, and the processes share the GPU's memory


def compile_ahead(
    cases: Sequence[BenchCase], names: Sequence[str], device: torch.device, *, num_processes: int, seed: int
) -> str:
    """Call the paths of these names once on each case; what to say of it. The processes are gone when it returns."""
    work = partial(_call_each, names=tuple(names), device=device, seed=seed)
    try:
        with ProcessPoolExecutor(num_processes, get_context("spawn")) as pool:
            num_calls = sum(pool.map(work, groups_of(cases)))
    except (BrokenProcessPool, OSError) as error:  # OSError: a container may have no processes left
        return f"not all kernels were compiled ahead: {error}"
    return f"compiled ahead in {num_processes} processes, {num_calls} calls"


def groups_of(cases: Sequence[BenchCase]) -> list[list[BenchCase]]:
    """Cases that share kernels, each group for one process, the largest first; without those of too many bytes."""
    groups: dict[tuple[object, ...], list[BenchCase]] = {}
    for case in cases:
        shape = case.shape
        flags = (shape.window is None, shape.softcap is None, shape.sinks)
        queries = max(case.queries) if shape.phase is Phase.DECODE else 0
        if case.num_bytes <= _MAX_BYTES:
            groups.setdefault((shape.phase, shape.head_dim, *flags, queries), []).append(case)
    return sorted(groups.values(), key=len, reverse=True)


def _call_each(cases: Sequence[BenchCase], *, names: Sequence[str], device: torch.device, seed: int) -> int:
    """The number of calls that could be made."""
    contenders = contenders_of([path_named(name) for name in names], [], read_fingerprint(device))
    num_calls = 0
    for case in cases:
        for contender in contenders:
            if case.shape.phase in contender.phases:
                with suppress(Unavailable, *KERNEL_ERRORS):
                    contender.prepare(make_inputs(case, device, seed=seed)).call()
                    num_calls += 1
    return num_calls
