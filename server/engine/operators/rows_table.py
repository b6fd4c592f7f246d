"""Table of an operator whose shapes follow from the sizes of a step, by the number of rows that a call has.

That number, and of a recurrence the step's phase, choose the path, on the host, by one lookup a call: a CUDA graph,
which holds one number and one phase, holds the choice too.
"""

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar, Unpack

from kernels.vocabulary.operators import Operator, RowsShape
from kernels.vocabulary.path import AnyPath
from kernels.vocabulary.shape import Phase
from qualification.decision.decision import Decision
from server.engine.operators.counts import ServedShape, dispatch_counts, fallback_uses, use_of
from server.engine.operators.decisions import NoPathError
from server.engine.operators.launch_errors import LAUNCH_ERRORS
from server.engine.operators.table import OperatorChoice, OperatorTable, RunT, TableOptions
from server.protocol.messages import DispatchCount, PathUse

RowsShapeT = TypeVar("RowsShapeT", bound=RowsShape)
# (rows of a call) -> rows of each launch that it is made of
Pieces = Callable[[int], tuple[int, ...]]
_MOST_KNOWN = 4096  # sizes of steps whose decisions are kept


@dataclass(frozen=True, slots=True)
class StepSizes:
    """The sizes of a step that choose paths beside attention's.

    num_tokens     rows of a forward pass, with the padding of a CUDA graph
    num_sampled    rows whose logits are computed
    num_sequences  sequences of the batch
    phase          of the step to recurrent layers, which compute all of its rows in one call
    is_of_head     whether it is a pass of the draft head, which makes calls of its own
    """

    num_tokens: int
    num_sampled: int = 0
    num_sequences: int = 0
    phase: Phase = Phase.EXTEND
    is_of_head: bool = False


def phase_of_step(phases: Collection[Phase]) -> Phase:
    """Return the phase to recurrent layers of a step with parts of these phases, in the order of the step.

    Prompts, chunks of them, and what is beside, are EXTEND.
    """
    return Phase.EXTEND if Phase.PREFILL in phases or Phase.EXTEND in phases else next(iter(phases), Phase.EXTEND)


@dataclass(slots=True)
class Calls(Generic[RowsShapeT]):
    """Calls of a step whose shapes are the same but for the rows.

    shapes        one for each bucket of rows that is planned, the fewest rows first
    num_launches  calls of a step of the model
    is_sampled    the rows are those whose logits are computed, and not the tokens
    phase         of the steps that make these calls; None: all do
    choices       what serves each shape now; None: no path is left. By place: to hash a shape takes 0.7 us a call
    num_of_head   calls of a pass of the draft head
    pieces        of a call that is several launches; None: each is one
    """

    shapes: tuple[RowsShapeT, ...]
    num_launches: int
    is_sampled: bool
    phase: Phase | None
    choices: list[OperatorChoice[RowsShapeT, Any] | None]
    num_of_head: int = 0
    pieces: Pieces | None = None
    _edges: tuple[float, ...] = field(init=False)
    _first: tuple[int, ...] = field(init=False)

    def __post_init__(self) -> None:
        self._edges = tuple(float("inf") if it.rows.hi is None else it.rows.hi for it in self.shapes)
        self._first = tuple(it.rows.lo for it in self.shapes)

    def place(self, num_rows: int) -> int:
        """Return the place of the shape of so many rows; of more than a step may have, as warm-up computes, the last.

        Raises NoPathError for a number that no bucket of the plan holds.
        """
        found = min(bisect_left(self._edges, num_rows), len(self.shapes) - 1)
        if found < 0 or num_rows <= self._first[found]:
            kind = self.shapes[0].kind if self.shapes else "no shape"
            raise NoPathError(None, f"no path was planned for {num_rows} rows of {kind}")
        return found

    def shape(self, num_rows: int) -> RowsShapeT:
        """Return the shape of so many rows. Raises NoPathError as `place`."""
        return self.shapes[self.place(num_rows)]

    def rows(self, sizes: StepSizes) -> tuple[int, ...]:
        """Return the rows of each launch of a call in such a step; none where it makes none."""
        if self.phase is not None and self.phase is not sizes.phase:
            return ()
        num_rows = sizes.num_sampled if self.is_sampled else sizes.num_tokens
        if num_rows == 0:
            return ()
        return (num_rows,) if self.pieces is None else self.pieces(num_rows)


class RowsTable(OperatorTable[RowsShapeT, RunT]):
    """The decisions of an operator that computes the rows of a call each by itself."""

    def __init__(
        self,
        operator: Operator,
        decisions: Mapping[RowsShapeT, Decision[RowsShapeT]],
        paths: Iterable[AnyPath],
        *,
        reports_all: bool = False,
        **options: Unpack[TableOptions[RowsShapeT]],
    ) -> None:
        """`reports_all`: whether a request's record names each use, and not only what is no proven first choice."""
        super().__init__(operator, decisions, paths, **options)
        self._reports_all = reports_all
        self._calls: list[Calls[RowsShapeT]] = []
        # By rows of a step, those sampled, its phase, whether it is the draft head's, and its calls in pieces.
        self._known: dict[tuple[object, ...], list[ServedShape]] = {}
        # Of a checked step, behind each call, with what it read and wrote.
        self.tap: Callable[[OperatorChoice[RowsShapeT, RunT], Any], None] | None = None

    def add(
        self,
        shapes: Iterable[RowsShapeT],
        *,
        num_launches: int = 1,
        num_of_head: int = 0,
        is_sampled: bool = False,
        phase: Phase | None = None,
        pieces: Pieces | None = None,
    ) -> Calls[RowsShapeT]:
        """Note calls of each step, or of those of one phase, by their shapes that are planned.

        Calls that are alike share an entry. `num_of_head`: of each pass of the draft head.
        """
        planned = tuple(sorted(shapes, key=lambda shape: shape.rows.lo))
        alike = planned, is_sampled, pieces
        found = next((it for it in self._calls if (it.shapes, it.is_sampled, it.pieces) == alike), None)
        if found is None:
            choices = [self._choices.get(shape) for shape in planned]
            found = Calls(planned, 0, is_sampled, phase, choices, pieces=pieces)
            self._calls.append(found)
        found.num_launches += num_launches
        found.num_of_head += num_of_head
        self._known.clear()
        return found

    @property
    def num_launches(self) -> int:
        """Calls of a step with a token to sample, whatever its phase."""
        phases = {it.phase for it in self._calls}
        return max((sum(it.num_launches for it in self._calls if it.phase is phase) for phase in phases), default=0)

    @property
    def borders(self) -> tuple[int, ...]:
        """Return the first number of rows of each bucket."""
        return tuple({shape.rows.lo + 1: None for it in self._calls for shape in it.shapes})

    @property
    def is_capturable(self) -> bool:
        """Return whether a CUDA graph can hold every choice."""
        return all(choice is not None and choice.is_capturable for it in self._calls for choice in it.choices)

    def launch(self, calls: Calls[RowsShapeT], num_rows: int, *given: Any) -> OperatorChoice[RowsShapeT, RunT]:
        """Run what is decided for so many rows, with these arguments; the next path where one fails to launch.

        Returns the choice that ran. Raises NoPathError where none is left, and DeviceLost where other ranks wait.
        """
        place = calls.place(num_rows)
        while True:
            choice = calls.choices[place]
            if choice is None:
                raise self.no_path(calls.shapes[place])
            run: Any = choice.run
            try:
                run(*self._given(run, given))
            except LAUNCH_ERRORS as error:
                self.replace(choice, error)
            else:
                return choice

    def _given(self, _run: RunT, given: tuple[Any, ...]) -> tuple[Any, ...]:
        """Return the arguments of a launch as this path takes them."""
        return given

    def served(self, sizes: StepSizes) -> tuple[Decision[RowsShapeT], ...]:
        """Return each decision that serves such a step."""
        return tuple(it.decision for it in self._served(sizes))

    def check(self, sizes: StepSizes) -> None:
        """Raises NoPathError where a call of such a step has no path any more."""
        for decision in self.served(sizes):
            if decision.path is None:
                raise self.no_path(decision.shape)

    def counts(self, sizes: StepSizes) -> list[DispatchCount]:
        """Return the decisions that serve such a step by bucket, path and status, with their launches."""
        return dispatch_counts(self._served(sizes), sizes.num_tokens, sizes.num_sequences)

    def uses(self, sizes: StepSizes) -> list[PathUse]:
        """Return what a request says of such a step: what is no proven first choice, of some operators each use."""
        if self._reports_all:
            return [use_of(it) for it in self.served(sizes) if it.path is not None]
        return fallback_uses(self._served(sizes))

    def pairs(self, sizes: StepSizes) -> list[tuple[str, str]]:
        """Return the (path, shape) pairs of a step: whom to blame when the device is lost in it."""
        return [(it.path, str(it.shape)) for it in self.served(sizes) if it.path is not None]

    def _served(self, sizes: StepSizes) -> list[ServedShape]:
        in_pieces = tuple(it.rows(sizes) for it in self._calls if it.pieces is not None)
        key = sizes.num_tokens, sizes.num_sampled, sizes.phase, sizes.is_of_head, in_pieces
        found = self._known.get(key)
        if found is None:
            counted = [(it, it.num_of_head if sizes.is_of_head else it.num_launches) for it in self._calls]
            found = [
                ServedShape(self.decided[calls.shape(num_rows)], count * times)
                for calls, count in counted
                if count
                for num_rows, times in Counter(calls.rows(sizes)).items()
            ]
            if len(self._known) >= _MOST_KNOWN:
                self._known.clear()
            self._known[key] = found
        return found

    def _decided(self, decision: Decision[RowsShapeT]) -> None:
        super()._decided(decision)
        for calls in self._calls:
            if decision.shape in calls.shapes:
                calls.choices[calls.shapes.index(decision.shape)] = self._choices[decision.shape]
        self._known.clear()
