"""Compiling what a run will launch before it measures: in processes side by side, into Triton's cache on disk.

Each worker makes the calls that the run will make, on the same GPU, so that what is compiled is what will be launched.
Nothing depends on it: what a worker misses, or fails at, is compiled (and fails) when it is measured. Workers are gone
before the first call is timed.
"""

import os
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import chain, zip_longest
from queue import SimpleQueue
from threading import Thread

import msgspec

from kernels.path import KernelPath
from kernels.shape import AttentionShape

Pair = tuple[AttentionShape, KernelPath]
Say = Callable[[str], None]

_MIN_PAIRS = 4  # for fewer a worker's own start (torch, a CUDA context: some seconds) takes longer than it saves


def num_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@contextmanager
def compiling_ahead(
    pairs: Sequence[Pair], *, num_processes: int, seed: int = 0, command: Sequence[str] | None = None
) -> Iterator[Callable[[Say], None]]:
    """Workers compile inside of the context, which gives a function that waits for them; leaving it ends them.

    command  starts a worker (see `qualification/compile_worker.py`); for tests
    """
    todo = deque(in_turn([pair for pair in pairs if pair[1].limits.needs_triton]))
    count = len(todo) if len(todo) >= _MIN_PAIRS and num_processes > 1 else 0
    num_workers = min(num_processes, count)
    program = command or (sys.executable, "-m", "qualification.compile_worker", str(seed), str(num_workers))
    finished: SimpleQueue[bool] = SimpleQueue()  # True: a pair; False: a worker
    workers = [_started(program, is_silent=n > 0) for n in range(num_workers)]  # what stops one would stop them all
    threads = [Thread(target=_feed, args=(worker, todo, finished)) for worker in workers]
    for thread in threads:
        thread.start()

    def wait(say: Say) -> None:
        num_pairs, num_running = 0, num_workers
        while num_running:
            if finished.get():
                num_pairs += 1
                say(f"compiling ahead in {num_workers} processes, {num_pairs} of {count} calls")
            else:
                num_running -= 1
        if num_pairs < count:
            say(f"{count - num_pairs} of {count} calls were not compiled ahead: their workers died")

    try:
        yield wait
    finally:
        todo.clear()
        for worker, thread in zip(workers, threads, strict=True):
            worker.kill()
            thread.join()
            _close(worker)


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


def _started(program: Sequence[str], *, is_silent: bool) -> "subprocess.Popen[bytes]":
    """In a group of its own: an interrupt from the terminal reaches the run alone, which ends its workers."""
    errors = subprocess.DEVNULL if is_silent else None
    return subprocess.Popen(program, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, process_group=0)


def _close(worker: "subprocess.Popen[bytes]") -> None:
    worker.wait()
    for pipe in (worker.stdin, worker.stdout):
        assert pipe is not None
        with suppress(OSError):  # what was never read by the dead worker
            pipe.close()


def _feed(worker: "subprocess.Popen[bytes]", todo: deque[Pair], finished: SimpleQueue[bool]) -> None:
    """Give a worker one pair after another, until there is none or it has died."""
    assert worker.stdin is not None
    assert worker.stdout is not None
    try:
        while todo:
            shape, path = todo.popleft()
            worker.stdin.write(msgspec.json.encode((str(shape), path.name)) + b"\n")
            worker.stdin.flush()
            if not worker.stdout.readline():
                break
            finished.put(True)
    except (IndexError, OSError, ValueError):
        pass  # another worker took the last pair; or this one is dead, and what it had will be compiled later
    finished.put(False)
