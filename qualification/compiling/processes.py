"""Compile kernels before they are launched, in processes side by side, into Triton's cache on disk.

Workers make calls that compile what will be launched. Whoever launches does not depend on them: a call that no worker
made, or that failed, is compiled (and fails) where it is launched.

The parent starts one program, which imports torch once and forks itself for each worker. A worker has two pipes: it
reads a call a line from one and writes an answer a line to the other. The calls are the parent's, or the program finds
them first, by an order, and writes them a line to its standard output.
"""

import math
import os
import signal
import subprocess
import sys
import traceback
from collections import Counter, deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from enum import Enum
from itertools import chain, zip_longest
from queue import Empty, SimpleQueue
from tempfile import TemporaryFile
from threading import Thread
from typing import IO, BinaryIO, NoReturn, TypeVar

import msgspec

Pipe = tuple[int, int]  # file descriptors of a worker: read calls from, write answers to
Say = Callable[[str], None]
Tell = Callable[[int, int], None]  # how many calls have been answered, and of how many; 0 of 0 before they are found
Item = TypeVar("Item")

_PATIENCE_S = 600.0  # a call compiles several kernels: on a busy machine with an empty cache one took over a minute
_TOLD_S = 5.0
_END_S = 10.0  # from SIGTERM to SIGKILL
_MOST_WORKERS = 32
_GPU_BYTES = 2 * 2**30  # of one worker: its CUDA context, some 0.5 GB, and the memory of its calls
_MIN_CALLS = 4  # for fewer a worker's own start (torch, a CUDA context: some seconds) takes longer than it saves


def processes_for(num_cores: int, gpu_bytes: int) -> int:
    """Return how many workers to start: one a core, but only as many as leave the run itself room on the GPU."""
    return max(1, min(num_cores, gpu_bytes // _GPU_BYTES, _MOST_WORKERS))


def alternated(items: Iterable[Item], kind: Callable[[Item], Hashable]) -> list[Item]:
    """Return one item of each kind, then the next of each: neighbours compile different kernels.

    Items of one kind share most kernels, which two workers at a time would each compile.
    """
    groups: dict[Hashable, list[Item]] = {}
    for item in items:
        groups.setdefault(kind(item), []).append(item)
    rounds = zip_longest(*([(item,) for item in group] for group in groups.values()))
    return [entry[0] for entry in chain.from_iterable(rounds) if entry is not None]


class Found(msgspec.Struct, frozen=True):
    """The calls that a program has found by its order: those for its workers, and those that are made already."""

    calls: list[str]
    known: list[str]


@dataclass(frozen=True, slots=True)
class Made:
    """The end of a wait. `found`: None where the program has found nothing; made: the calls that succeeded."""

    found: Found | None
    num_made: int

    @property
    def is_whole(self) -> bool:
        """Return whether all that was found is compiled."""
        return self.found is not None and self.num_made == len(self.found.calls)


class _Answer(Enum):
    MADE = b"done\n"
    FAILED = b"failed\n"
    ENDED = b""  # of a worker: it gives no more


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
    todo, answers = deque(calls), SimpleQueue[_Answer]()

    def wait(say: Say) -> None:
        _wait(answers, len(workers), len(calls), patience_s, say)

    with _forked(program, min(num_processes, len(calls), _MOST_WORKERS)) as (workers, _):
        _feed_all(workers, todo, answers)
        try:
            yield wait
        finally:
            todo.clear()


@contextmanager
def compiling_found(
    order: bytes, program: Sequence[str], *, num_processes: int, patience_s: float = _PATIENCE_S
) -> Iterator[Callable[[Tell], Made]]:
    """Do what `compiling_ahead` does, for calls that the program finds: it reads the order, and calls `serve_found`.

    The function that waits is given one that is told how far it is, every few seconds while calls are found.
    """
    todo, answers = deque[bytes](), SimpleQueue[_Answer]()
    found = SimpleQueue[Found | None]()

    def find(output: IO[bytes] | None) -> None:
        line = b""
        if output is not None:
            with output:
                line = output.readline()
        first = msgspec.json.decode(line, type=Found) if line else None
        todo.extend([] if first is None else [it.encode() for it in first.calls])
        found.put(first)
        _feed_all(workers, todo, answers)

    def wait(tell: Tell) -> Made:
        first = None
        for _ in range(math.ceil(patience_s / _TOLD_S)):
            with suppress(Empty):
                first = found.get(timeout=min(patience_s, _TOLD_S))
                break
            tell(0, 0)
        if first is None:
            return Made(None, 0)
        count, of_kind = len(first.calls), Counter[_Answer]()
        tell(0, count)

        def say(_: str) -> None:
            tell(of_kind.total(), count)

        _wait(answers, len(workers), count, patience_s, say, of_kind)
        return Made(first, of_kind[_Answer.MADE])

    with _forked(program, min(num_processes, _MOST_WORKERS), order) as (workers, output):
        Thread(target=find, args=(output,), daemon=True).start()
        try:
            yield wait
        finally:
            todo.clear()


def _wait(
    answers: "SimpleQueue[_Answer]",
    num_workers: int,
    count: int,
    patience_s: float,
    say: Say,
    of_kind: "Counter[_Answer] | None" = None,
) -> None:
    """Wait until every worker has ended, or none has answered for `patience_s`; `say` the progress and what is left."""
    of_kind, num_running = Counter() if of_kind is None else of_kind, num_workers
    with suppress(Empty):
        while num_running:
            answer = answers.get(timeout=patience_s)
            if answer is _Answer.ENDED:
                num_running -= 1
                continue
            of_kind[answer] += 1
            say(f"compiling ahead in {num_workers} processes, {of_kind.total()} of {count} calls")
    if of_kind.total() < count:
        why = f"no answer for {patience_s:g} s" if num_running else "the workers have ended"
        say(f"{count - of_kind.total()} of {count} calls were not compiled ahead: {why}")


@contextmanager
def _forked(
    program: Sequence[str], num_workers: int, order: bytes | None = None
) -> Iterator[tuple[list[_Worker], IO[bytes] | None]]:
    """Start the program, which forks the workers; end them all when the context is left.

    Gives the workers, and of a program with an order what it writes. A program that cannot be started is like workers
    that have ended.
    """
    theirs: list[Pipe] = []
    workers: list[_Worker] = []
    process = None
    with suppress(OSError), ExitStack() as files:  # a container may have no files or no processes left
        for _ in range(num_workers):
            (calls, ask), (answers, answer) = os.pipe(), os.pipe()
            theirs.append((calls, answer))
            workers.append(_Worker(os.fdopen(ask, "wb"), os.fdopen(answers, "rb")))
        given = None if order is None else files.enter_context(TemporaryFile())
        if given is not None and order is not None:
            given.write(order)
            given.seek(0)
        # In a group of its own: an interrupt from the terminal reaches the run alone, which ends them.
        command = [*program, *(f"{reads}:{writes}" for reads, writes in theirs)]
        process = subprocess.Popen(
            command,
            pass_fds=[*chain.from_iterable(theirs)],
            stdin=given or subprocess.DEVNULL,
            stdout=None if given is None else subprocess.PIPE,
            process_group=0,
        )
    for pipe in theirs:
        _close(pipe)
    try:
        yield workers, None if process is None else process.stdout
    finally:
        if process is not None:
            _end(process)


def _feed_all(workers: Sequence[_Worker], todo: deque[bytes], answers: "SimpleQueue[_Answer]") -> None:
    for worker in workers:
        Thread(target=_feed, args=(worker, todo, answers), daemon=True).start()


def _end(process: "subprocess.Popen[bytes]") -> None:
    """End the program's process group. The program waits for its workers, so that none is left on the GPU."""
    for order in (signal.SIGTERM, signal.SIGKILL):
        with suppress(ProcessLookupError):  # all of them have ended
            os.killpg(process.pid, order)
        with suppress(subprocess.TimeoutExpired):
            process.wait(timeout=_END_S)
            return


def _feed(worker: _Worker, todo: deque[bytes], answers: "SimpleQueue[_Answer]") -> None:
    """Give a worker one call after another, until there is none or it has died; then end it."""
    try:
        while todo:
            worker.calls.write(todo.popleft() + b"\n")
            worker.calls.flush()
            line = worker.answers.readline()
            if not line:
                break
            answers.put(_Answer(line))
    except (IndexError, OSError):
        pass  # another worker took the last call; or this one is dead, and its call will be compiled later
    with suppress(OSError):  # a dead worker's unread line
        worker.calls.close()
    worker.answers.close()
    answers.put(_Answer.ENDED)


def serve_found(arguments: Sequence[str], found: Found, make: Callable[[bytes], bool]) -> NoReturn:
    """Do what `serve_calls` does, for calls that this program has found. Nothing else may go to its standard output."""
    sys.stdout.buffer.write(msgspec.json.encode(found) + b"\n")
    sys.stdout.buffer.flush()
    serve_calls(arguments, make)


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
            answers.write((_Answer.MADE if make(line) else _Answer.FAILED).value)
            answers.flush()


def _close(pipe: Pipe) -> None:
    for descriptor in pipe:
        os.close(descriptor)
