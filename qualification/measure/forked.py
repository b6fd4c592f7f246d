"""Processes forked from one that has imported what they need, each with a pipe of questions and one of answers."""

import os
import signal
import traceback
from collections.abc import Callable, Sequence
from typing import BinaryIO, NoReturn

Serve = Callable[[BinaryIO, BinaryIO], None]  # questions, answers
Pipe = tuple[int, int]  # file descriptors: read questions from, write answers to


def pipes_of(arguments: Sequence[str]) -> list[Pipe]:
    """As `argument_of` writes them."""
    return [(int(reads), int(writes)) for reads, writes in (text.split(":") for text in arguments)]


def argument_of(pipe: Pipe) -> str:
    return f"{pipe[0]}:{pipe[1]}"


def fork_each(pipes: Sequence[Pipe], serve: Serve) -> NoReturn:
    """Run `serve` in a child a pipe, and end when all have ended. No thread may run here, and no GPU be in use.

    SIGTERM to the process group ends the children; this process waits for them, and ends last.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    for pipe in pipes:
        if os.fork() == 0:
            code = 1
            try:
                signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
                for other in pipes:  # a sibling that dies must leave nobody who holds its pipe
                    if other != pipe:
                        _close(other)
                with os.fdopen(pipe[0], "rb") as questions, os.fdopen(pipe[1], "wb") as answers:
                    serve(questions, answers)
                code = 0
            except Exception:  # told once: what stops one mostly stops them all
                if pipe == pipes[0]:
                    traceback.print_exc()
            finally:
                os._exit(code)
    for pipe in pipes:
        _close(pipe)
    if signal.SIGTERM in signal.sigpending():  # it came before the last child, which has not got it
        os.killpg(0, signal.SIGTERM)
    for _ in pipes:
        os.wait()
    os._exit(0)  # an interpreter with torch takes a second to end


def _close(pipe: Pipe) -> None:
    for descriptor in pipe:
        os.close(descriptor)
