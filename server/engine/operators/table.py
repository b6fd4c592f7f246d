"""Table of an operator: the decision for each shape as it stands now, and the path that is launched for it.

What is launched is `run` of the decided path, the call that was proven, and nothing else.
"""

import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypedDict, TypeVar, Unpack

from kernels.system.device_lost import DeviceLost
from kernels.vocabulary.operators import Operator, phase_of
from kernels.vocabulary.path import AnyPath, Reject
from kernels.vocabulary.shape import AttentionShape
from qualification.decision.decision import Decision, Pairs, ShapeT
from server.engine.operators.counts import use_of
from server.engine.operators.decisions import Decisions, NoPathError, Redecide, why_no_path
from server.engine.operators.launch_errors import not_launched
from server.protocol.messages import PathUse

logger = logging.getLogger(__name__)

RunT = TypeVar("RunT")


@dataclass(frozen=True, slots=True)
class OperatorChoice(Generic[ShapeT, RunT]):
    """A decision with what is needed to run it, resolved once.

    is_capturable  whether a CUDA graph can hold it
    """

    decision: Decision[ShapeT]
    run: RunT
    use: PathUse
    is_capturable: bool


class TableOptions(TypedDict, Generic[ShapeT], total=False):
    """Options of the tables of all operators, beside their decisions and paths.

    redecide     decides a shape again; without it nothing does
    quarantined  (path, shape) pairs without which the decisions were already made, as those `overridden`
    may_replace  whether the next path may serve where a launch fails in the middle of a step, as it does by default;
                 several ranks start again instead
    """

    redecide: Redecide[ShapeT]
    quarantined: Pairs
    overridden: Pairs
    may_replace: bool


def _first_decision(shape: ShapeT, _: Pairs, __: Pairs) -> Decision[ShapeT]:
    raise RuntimeError(f"nothing decides {shape} again here")


class OperatorTable(Generic[ShapeT, RunT]):
    """The decisions of one operator. A launch or a check that fails quarantines (path, shape) pairs, an operator's
    order takes them out.
    """

    def __init__(
        self,
        operator: Operator,
        decisions: Mapping[ShapeT, Decision[ShapeT]],
        paths: Iterable[AnyPath],
        *,
        why_not_launched: Callable[[Exception], Reject | None] = not_launched,
        **options: Unpack[TableOptions[ShapeT]],
    ) -> None:
        """`why_not_launched`: tells of an exception why a kernel was not launched; None: another kind of error."""
        self.operator = operator
        self._paths: dict[str, AnyPath] = {path.name: path for path in paths}
        self._may_replace = options.get("may_replace", True)
        self._why_not_launched = why_not_launched
        self._choices: dict[ShapeT, OperatorChoice[ShapeT, RunT] | None] = {}
        self.decided = Decisions(
            decisions,
            options.get("redecide", _first_decision),
            options.get("quarantined", frozenset()),
            options.get("overridden", frozenset()),
            on_change=self._decided,
        )
        for decision in decisions.values():
            self._choices[decision.shape] = self._resolve(decision)

    @property
    def plan(self) -> dict[ShapeT, Decision[ShapeT]]:
        """Return the decision for each shape now, shapes that no path serves any more included."""
        return self.decided.plan

    @property
    def choices(self) -> tuple[OperatorChoice[ShapeT, RunT], ...]:
        """Return the choice that serves each shape now."""
        return tuple(choice for choice in self._choices.values() if choice is not None)

    @property
    def paths_served(self) -> dict[str, str | None]:
        """Return by shape the path that is launched for it now; None where none is."""
        return {str(shape): None if it is None else it.use.path for shape, it in self._choices.items()}

    def no_path(self, shape: ShapeT) -> NoPathError:
        """Return the error of a shape that no path serves any more, or that was never planned."""
        phase = shape.phase if isinstance(shape, AttentionShape) else None
        decision = self.plan.get(shape)
        why = "" if decision is None else why_no_path(decision)
        return NoPathError(phase, f"no path is left for {shape}{why}")

    def replace(self, choice: OperatorChoice[ShapeT, RunT], error: Exception) -> OperatorChoice[ShapeT, RunT]:
        """Quarantine a choice that failed to launch, and return the next one.

        Raises NoPathError where none is left, DeviceLost where other ranks are in the middle of the step, and `error`
        where it is of another kind.
        """
        reason, shape, path = self._why_not_launched(error), choice.decision.shape, choice.use.path
        if reason is None:
            raise error
        logger.error("%s failed to launch for %s (%s): %s", path, shape, reason.value, error)
        if not self._may_replace:
            raise DeviceLost(f"{path} failed to launch: {error}", [(path, str(shape))]) from error
        self.decided.quarantine(shape)
        found = self._choices[shape]
        if found is None:
            raise self.no_path(shape) from error
        return found

    def quarantine(self, path: str, phase: str) -> None:
        """Serve no shape of `phase_of` such on this path any more."""
        for shape, decision in self.plan.items():
            if decision.path == path and phase_of(shape) == phase:
                self.decided.quarantine(shape)

    def decide(self, decisions: Mapping[ShapeT, Decision[ShapeT]]) -> None:
        """Serve by these decisions from now on: another rank has made them."""
        self.decided.take(decisions)

    def substitute(self, path: AnyPath) -> None:
        """Run `path` wherever the path of its name serves: this is how faults are planted in an engine that runs."""
        self._paths[path.name] = path
        for decision in self.plan.values():
            if decision.path == path.name:
                self._decided(decision)

    def _decided(self, decision: Decision[ShapeT]) -> None:
        """Take a decision in the place of another."""
        self._choices[decision.shape] = self._resolve(decision)

    def _resolve(self, decision: Decision[ShapeT]) -> OperatorChoice[ShapeT, RunT] | None:
        if decision.path is None:
            return None
        path = self._paths[decision.path]
        run: Any = path.run
        assert run is not None
        return OperatorChoice(decision, run, use_of(decision), path.is_capturable)
