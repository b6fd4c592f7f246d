"""A shadow check of what another rank than the first has computed: rank 0 names the call, that rank judges it."""

import queue

import msgspec

from kernels.calls.rows import SequenceRows
from server.engine.proof.recurrence_sample import SampledRow


class NamedCall(msgspec.Struct, frozen=True):
    """A call of one step on one rank.

    lane      a phase of attention, or another operator
    index     which call of it: of attention the layer's place among those that attend
    sequence  of attention; row: of a recurrence
    images    of the sequence, whose tokens see each other both ways
    """

    rank: int
    lane: str
    index: int
    sequence: SequenceRows | None = None
    row: SampledRow | None = None
    images: tuple[tuple[int, int], ...] = ()


class JudgedCall(msgspec.Struct, frozen=True):
    """A call that was computed again in fp64; the rest as in `ShadowReport`.

    lane    as it was drawn; served: as a quarantine names it
    digest  of what it read
    is_of_step  whether what the step has told the path is wrong, and not the path
    """

    rank: int
    path: str
    lane: str
    served: str
    layer: int | None = None
    weight: str | None = None
    factor: float | None = None
    num_rows: int = 0
    head: int | None = None
    position: int | None = None
    detail: str | None = None
    digest: str = ""
    is_of_step: bool = False
    seconds: float = 0.0

    @property
    def is_mismatch(self) -> bool:
        return self.factor is not None and self.factor > 1


class RankAnswers:
    """Answers of the other ranks, put in by the threads that listen to them, taken by the one that steps."""

    def __init__(self, num_ranks: int) -> None:
        """`num_ranks`: the first included."""
        self.num_ranks = num_ranks
        self._answers = queue.SimpleQueue[JudgedCall]()

    def put(self, judged: JudgedCall) -> None:
        self._answers.put(judged)

    @property
    def has_one(self) -> bool:
        return not self._answers.empty()

    def take(self) -> JudgedCall | None:
        return self._answers.get() if self.has_one else None
