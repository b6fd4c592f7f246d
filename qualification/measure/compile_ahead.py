"""Compiling what a run will launch before it measures: in processes side by side, into Triton's cache on disk.

Each worker makes the calls that the run will make, on the same GPU, so that what is compiled is what will be launched.
Nothing depends on it: what a worker misses, or fails at, is compiled (and fails) when it is measured. Workers are gone
before the first call is timed.
"""

import os
import signal
import subprocess
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from itertools import chain, zip_longest
from queue import Empty, SimpleQueue
from threading import Thread
from typing import BinaryIO

import msgspec

from kernels.child_process import python_command
from kernels.path import KernelPath
from kernels.shape import AttentionShape
from qualification.measure.forked import argument_of

Pair = tuple[AttentionShape, KernelPath]
Say = Callable[[str], None]

_END_S = 10.0  # of a worker that has been told to end
_MOST_WORKERS = 32
_GPU_BYTES = 2 * 2**30  # a worker's: its CUDA context, some 0.5 GB, and what its calls need
_MIN_PAIRS = 4  # for fewer a worker's own start (torch, a CUDA context: some seconds) takes longer than it saves


def processes_for(num_cores: int, gpu_bytes: int) -> int:
    """One a core, but no more than leave the run itself room on a GPU of so much memory."""
    return max(1, min(num_cores, gpu_bytes // _GPU_BYTES, _MOST_WORKERS))


@dataclass(frozen=True, slots=True)
class _Worker:
    """Our ends of its pipes."""

    questions: BinaryIO
    answers: BinaryIO


@contextmanager
def compiling_ahead(
    pairs: Sequence[Pair],
    *,
    num_processes: int,
    seed: int = 0,
    command: Sequence[str] | None = None,
    patience_s: float = 60.0,
) -> Iterator[Callable[[Say], None]]:
    """Workers compile inside of the context, which gives a function that waits for them; leaving it ends them.

    command     forks a worker for each pipe it is given (see `qualification/measure/compile_worker.py`); for tests
    patience_s  without an answer from any worker, after which the run goes on without them
    """
    compiled = [pair for pair in pairs if pair[1].limits.needs_triton] if num_processes > 1 else []
    todo = deque(in_turn(compiled) if len(compiled) >= _MIN_PAIRS else ())
    count = len(todo)
    num_workers = min(num_processes, count, _MOST_WORKERS)
    finished: SimpleQueue[bool] = SimpleQueue()  # True: a pair; False: a worker
    wait = partial(_wait, finished, num_workers, count, patience_s)
    if not num_workers:
        yield wait
        return
    program = command or python_command("qualification.measure.compile_worker", str(seed))
    with _forked(program, num_workers) as workers:
        for worker in workers:
            Thread(target=_feed, args=(worker, todo, finished), daemon=True).start()
        try:
            yield wait
        finally:
            todo.clear()


def _wait(finished: "SimpleQueue[bool]", num_workers: int, count: int, patience_s: float, say: Say) -> None:
    """Until every worker has ended, or none has answered for `patience_s`; `say` how far they are, and what is left."""
    num_pairs, num_running = 0, num_workers
    with suppress(Empty):
        while num_running:
            if finished.get(timeout=patience_s):
                num_pairs += 1
                say(f"compiling ahead in {num_workers} processes, {num_pairs} of {count} calls")
            else:
                num_running -= 1
    if num_pairs < count:
        why = f"no answer for {patience_s:g} s" if num_running else "their workers died"
        say(f"{count - num_pairs} of {count} calls were not compiled ahead: {why}")


@contextmanager
def _forked(program: Sequence[str], num_workers: int) -> Iterator[list[_Worker]]:
    """One process that imports torch, and the workers that it forks; all are gone when the context is left.

    Where it cannot be started its workers have died.
    """
    theirs, workers = [], []
    for _ in range(num_workers):
        (questions, ask), (answers, answer) = os.pipe(), os.pipe()
        theirs.append((questions, answer))
        workers.append(_Worker(os.fdopen(ask, "wb"), os.fdopen(answers, "rb")))
    descriptors = [descriptor for pipe in theirs for descriptor in pipe]
    # In a group of its own: an interrupt from the terminal reaches the run alone, which ends them.
    command = [*program, *map(argument_of, theirs)]
    process = None
    with suppress(OSError):  # a container may have no processes left
        process = subprocess.Popen(command, pass_fds=descriptors, stdin=subprocess.DEVNULL, process_group=0)
    for descriptor in descriptors:
        os.close(descriptor)
    try:
        yield workers
    finally:
        if process is not None:
            _end(process)


def _end(process: "subprocess.Popen[bytes]") -> None:
    """The process reaps its workers, so that none is left on the GPU."""
    for order in (signal.SIGTERM, signal.SIGKILL):
        with suppress(ProcessLookupError):  # all of them have ended
            os.killpg(process.pid, order)
        with suppress(subprocess.TimeoutExpired):
            process.wait(timeout=_END_S)
            return


def in_turn(pairs: Sequence[Pair]) -> list[Pair]:
    """One of each path and kind of attention, then the next of each: neighbours compile different kernels.

    Shapes that differ by length alone share most of theirs.
    """
    groups: dict[tuple[object, ...], list[Pair]] = {}
    for shape, path in pairs:
        flags = (shape.window is None, shape.softcap is None, shape.sinks, shape.mask, shape.dtype, shape.kv_dtype)
        kind = (path.name, shape.num_heads, shape.num_kv_heads, shape.head_dim, *flags)
        groups.setdefault(kind, []).append((shape, path))
    return [pair for pair in chain.from_iterable(zip_longest(*groups.values())) if pair is not None]


def _feed(worker: _Worker, todo: deque[Pair], finished: SimpleQueue[bool]) -> None:
    """Give a worker one pair after another, until there is none or it has died; then end it."""
    try:
        while todo:
            shape, path = todo.popleft()
            worker.questions.write(msgspec.json.encode((str(shape), path.name)) + b"\n")
            worker.questions.flush()
            if not worker.answers.readline():
                break
            finished.put(True)
    except (IndexError, OSError):
        pass  # another worker took the last pair; or this one is dead, and what it had will be compiled later
    with suppress(OSError):  # what a dead worker never read
        worker.questions.close()
    worker.answers.close()
    finished.put(False)
