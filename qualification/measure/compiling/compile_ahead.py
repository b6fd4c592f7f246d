"""Compile the kernels of a run before it measures, in processes side by side, into Triton's cache on disk.

Workers make the calls that the run will make, on the same GPU, so that they compile what the run will launch. The run
does not depend on them: a call that no worker made, or that failed, is compiled (and fails) when it is measured. All
workers have ended before the first call is timed.

The parent starts one program, which imports torch once and forks itself for each worker. A worker has two pipes: it
reads a call a line from one and writes an answer a line to the other.
"""

import os
import signal
import subprocess
import traceback
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from itertools import chain, zip_longest
from queue import Empty, SimpleQueue
from threading import Thread
from typing import BinaryIO, NoReturn, TypeVar

import msgspec

from kernels.vocabulary.operators import AnyShape, Operator
from kernels.vocabulary.path import AnyPath
from kernels.vocabulary.shape import AttentionShape
from kernels.vocabulary.value_shape import values_of

Pair = tuple[AnyShape, AnyPath]
Pipe = tuple[int, int]  # file descriptors of a worker: read calls from, write answers to
Say = Callable[[str], None]
Item = TypeVar("Item")

_PATIENCE_S = 600.0  # a call compiles several kernels: on a busy machine with an empty cache one took over a minute
_END_S = 10.0  # from SIGTERM to SIGKILL
_MOST_WORKERS = 32
_GPU_BYTES = 2 * 2**30  # of one worker: its CUDA context, some 0.5 GB, and the memory of its calls
_MIN_CALLS = 4  # for fewer a worker's own start (torch, a CUDA context: some seconds) takes longer than it saves


def processes_for(num_cores: int, gpu_bytes: int) -> int:
    """Return how many workers to start: one a core, but only as many as leave the run itself room on the GPU."""
    return max(1, min(num_cores, gpu_bytes // _GPU_BYTES, _MOST_WORKERS))


def calls_of(pairs: Iterable[Pair]) -> list[bytes]:
    """Return the pairs that Triton compiles as calls of `compile_worker.py`, in the order for workers."""

    def kind(pair: Pair) -> Hashable:
        shape, path = pair
        if not isinstance(shape, AttentionShape):
            return (path.name, shape.kind)
        flags = (shape.window is None, shape.softcap is None, shape.sinks, shape.mask, shape.dtype, shape.kv_dtype)
        return (path.name, shape.num_heads, shape.num_kv_heads, shape.head_dim, values_of(shape), *flags)

    # Not of collectives, whose calls wait for other ranks.
    compiled = [pair for pair in pairs if pair[1].limits.needs_triton and pair[1].operator is not Operator.COLLECTIVE]
    return [msgspec.json.encode((str(shape), path.name)) for shape, path in alternated(compiled, kind)]


def alternated(items: Iterable[Item], kind: Callable[[Item], Hashable]) -> list[Item]:
    """Return one item of each kind, then the next of each: neighbours compile different kernels.

    Items of one kind share most kernels, which two workers at a time would each compile.
    """
    groups: dict[Hashable, list[Item]] = {}
    for item in items:
        groups.setdefault(kind(item), []).append(item)
    rounds = zip_longest(*([(item,) for item in group] for group in groups.values()))
    return [entry[0] for entry in chain.from_iterable(rounds) if entry is not None]


@dataclass(frozen=True, slots=True)
class _Worker:
    """The parent's ends of a worker's pipes."""

    calls: BinaryIO
    answers: BinaryIO


@contextmanager
def compiling_ahead(
    calls: Sequence[bytes], program: Sequence[str], *, num_processes: int, patience_s: float = _PATIENCE_S
) -> Iterator[Callable[[Say], None]]:
    """Workers compile inside of the context, which gives a function that waits for them; leaving it ends them.

    calls       lines, without their ends
    program     the command that calls `serve_calls` with the arguments that are added to it
    patience_s  without an answer from any worker, after which the run goes on without them
    """
    if num_processes <= 1 or len(calls) < _MIN_CALLS:
        yield lambda _: None
        return
    todo, finished = deque(calls), SimpleQueue[bool]()  # True: a call was made; False: a worker has ended
    with _forked(program, min(num_processes, len(calls), _MOST_WORKERS)) as workers:
        for worker in workers:
            Thread(target=_feed, args=(worker, todo, finished), daemon=True).start()
        try:
            yield partial(_wait, finished, len(workers), len(calls), patience_s)
        finally:
            todo.clear()


def _wait(finished: "SimpleQueue[bool]", num_workers: int, count: int, patience_s: float, say: Say) -> None:
    """Wait until every worker has ended, or none has answered for `patience_s`; `say` the progress and what is left."""
    num_made, num_running = 0, num_workers
    with suppress(Empty):
        while num_running:
            if finished.get(timeout=patience_s):
                num_made += 1
                say(f"compiling ahead in {num_workers} processes, {num_made} of {count} calls")
            else:
                num_running -= 1
    if num_made < count:
        why = f"no answer for {patience_s:g} s" if num_running else "the workers have ended"
        say(f"{count - num_made} of {count} calls were not compiled ahead: {why}")


@contextmanager
def _forked(program: Sequence[str], num_workers: int) -> Iterator[list[_Worker]]:
    """Start the program, which forks the workers; end them all when the context is left.

    A program that cannot be started is like workers that have ended.
    """
    theirs: list[Pipe] = []
    workers: list[_Worker] = []
    process = None
    with suppress(OSError):  # a container may have no files or no processes left
        for _ in range(num_workers):
            (calls, ask), (answers, answer) = os.pipe(), os.pipe()
            theirs.append((calls, answer))
            workers.append(_Worker(os.fdopen(ask, "wb"), os.fdopen(answers, "rb")))
        # In a group of its own: an interrupt from the terminal reaches the run alone, which ends them.
        command = [*program, *(f"{reads}:{writes}" for reads, writes in theirs)]
        descriptors = [*chain.from_iterable(theirs)]
        process = subprocess.Popen(command, pass_fds=descriptors, stdin=subprocess.DEVNULL, process_group=0)
    for pipe in theirs:
        _close(pipe)
    try:
        yield workers
    finally:
        if process is not None:
            _end(process)


def _end(process: "subprocess.Popen[bytes]") -> None:
    """End the program's process group. The program waits for its workers, so that none is left on the GPU."""
    for order in (signal.SIGTERM, signal.SIGKILL):
        with suppress(ProcessLookupError):  # all of them have ended
            os.killpg(process.pid, order)
        with suppress(subprocess.TimeoutExpired):
            process.wait(timeout=_END_S)
            return


def _feed(worker: _Worker, todo: deque[bytes], finished: "SimpleQueue[bool]") -> None:
    """Give a worker one call after another, until there is none or it has died; then end it."""
    try:
        while todo:
            worker.calls.write(todo.popleft() + b"\n")
            worker.calls.flush()
            if not worker.answers.readline():
                break
            finished.put(True)
    except (IndexError, OSError):
        pass  # another worker took the last call; or this one is dead, and its call will be compiled later
    with suppress(OSError):  # a dead worker's unread line
        worker.calls.close()
    worker.answers.close()
    finished.put(False)


def serve_calls(
    arguments: Sequence[str], make: Callable[[bytes], bool], begin: Callable[[int], None] = lambda _: None
) -> NoReturn:
    """Run in the program: fork a worker for each pipe in `arguments`, and end when all have ended.

    make   makes a call, and returns whether it succeeded
    begin  runs first in each worker, and gets the number of workers

    No thread may run yet, and no GPU be in use. SIGTERM to the process group ends the workers; this process waits for
    them, and ends last.
    """
    pipes: list[Pipe] = [(int(reads), int(writes)) for reads, writes in (text.split(":") for text in arguments)]
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    for pipe in pipes:
        if os.fork() == 0:
            code = 1
            try:
                signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
                for other in pipes:  # else the parent would not see the end of a worker that dies
                    if other != pipe:
                        _close(other)
                begin(len(pipes))
                _serve(pipe, make)
                code = 0
            except Exception:  # printed once: what ends one worker mostly ends them all
                if pipe == pipes[0]:
                    traceback.print_exc()
            finally:
                os._exit(code)
    for pipe in pipes:
        _close(pipe)
    if signal.SIGTERM in signal.sigpending():  # it came before the last worker, which has not got it
        os.killpg(0, signal.SIGTERM)
    for _ in pipes:
        os.wait()
    os._exit(0)  # an interpreter with torch takes a second to end


def _serve(pipe: Pipe, make: Callable[[bytes], bool]) -> None:
    """Make the calls of one worker, until there are no more."""
    with os.fdopen(pipe[0], "rb") as calls, os.fdopen(pipe[1], "wb") as answers:
        for line in calls:
            answers.write(b"done\n" if make(line) else b"failed\n")
            answers.flush()


def _close(pipe: Pipe) -> None:
    for descriptor in pipe:
        os.close(descriptor)
