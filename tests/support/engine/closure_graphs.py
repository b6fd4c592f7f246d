"""Graphs that are closures: a fake capture runs the step, and its replay runs it again on the same memory."""

from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar

from kernels.catalog import path_named
from kernels.vocabulary.operators import AnyShape
from kernels.vocabulary.path import Reject
from kernels.vocabulary.shape import AttentionShape
from qualification.decision.decision import Decision, Pairs, Status
from server.engine.execution.capture import Replayable

ShapeT = TypeVar("ShapeT", bound=AnyShape)
PATH = replace(path_named("sdpa.cpu"), name="graphable", is_capturable=True)
EAGER = replace(path_named("sdpa.cpu"), name="eager")


class Replay:
    """The fake graph: keeps the work."""

    def __init__(self, work: Callable[[], None]) -> None:
        self.work = work

    def replay(self) -> None:
        self.work()


def capture(work: Callable[[], None]) -> Replayable:
    """The fake capture. Unlike a real one it leaves results, which no test may take for a replay's."""
    work()
    return Replay(work)


def decide(shape: ShapeT, path: str) -> Decision[ShapeT]:
    return Decision(shape, path, Status.PROVEN, path, (), (), None)


def redecide(shape: AttentionShape, broken: Pairs, taken_out: Pairs) -> Decision[AttentionShape]:
    """Decide for the eager path, until nothing stands against the first one."""
    if not broken and not taken_out:
        return decide(shape, PATH.name)
    return replace(decide(shape, EAGER.name), fallback_reasons=(Reject.QUARANTINED,))
