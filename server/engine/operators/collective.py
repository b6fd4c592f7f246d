"""Choice of the path that sums the rows of a step over the ranks: decided before ready, one lookup a call in service.

The number of rows alone chooses the path, on the host: a CUDA graph, which holds one number, holds the choice too.
"""

from bisect import bisect_left
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from torch import Tensor

from kernels.collective.paths import CollectivePath
from kernels.collective.peers import AddNorm, Peers, RunCollective
from kernels.collective.shape import CollectiveShape, Follows
from kernels.system.device_lost import DeviceLost
from kernels.vocabulary.row_buckets import TokenRows
from qualification.decision.decision import Decision, Pairs
from server.engine.operators.counts import ServedShape, dispatch_counts, fallback_uses, first_decision
from server.engine.operators.decisions import Decisions, NoPathError, Redecide
from server.engine.operators.launch_errors import LAUNCH_ERRORS, not_launched
from server.protocol.messages import DispatchCount, PathUse

_EDGES = tuple(bucket.hi for bucket in TokenRows if bucket.hi is not None)


@dataclass(frozen=True, slots=True)
class _Kind:
    """Sums of a step that are followed by the same; `shapes` are those of its buckets, the fewest rows first."""

    num_sums: int
    shapes: tuple[CollectiveShape, ...]

    def shape(self, num_rows: int) -> CollectiveShape:
        """Return the shape of a step's rows; of more rows than a step may have, as warm-up computes, the last shape."""
        return self.shapes[min(bisect_left(_EDGES, num_rows), len(self.shapes) - 1)]


class CollectiveTable:
    """The decisions for a model's sums over the ranks. A launch that fails ends the step on all of them."""

    def __init__(
        self,
        num_sums: Mapping[Follows, int],
        decisions: Mapping[CollectiveShape, Decision[CollectiveShape]],
        paths: Iterable[CollectivePath],
        *,
        redecide: Redecide[CollectiveShape] = first_decision,
        quarantined: Pairs = frozenset(),
        overridden: Pairs = frozenset(),
    ) -> None:
        """`num_sums`: of a step, by what follows. Sums of a shape whose decision has no path raise NoPathError."""
        self._by_name = {path.name: path for path in paths}
        self.decided = Decisions(decisions, redecide, quarantined, overridden, on_change=self._resolve)
        self._kinds = {
            follows: _Kind(count, tuple(_by_rows(shape for shape in decisions if shape.follows is follows)))
            for follows, count in num_sums.items()
        }
        self._runs: dict[CollectiveShape, RunCollective | None] = {}
        for decision in decisions.values():
            self._resolve(decision)

    def run(self, peers: Peers, part: Tensor, follows: AddNorm | None, out: Tensor) -> None:
        """Sum by the choice for the number of rows.

        Raises NoPathError where none is left, and DeviceLost with the path that failed to launch: other ranks wait.
        """
        kind = self._kinds[Follows.NOTHING if follows is None else Follows.ADD_NORM]
        shape = kind.shape(part.shape[0])
        run = self._runs[shape]
        if run is None:
            raise NoPathError(None, f"no path is left for {shape}")
        try:
            run(peers, part, follows, out)
        except LAUNCH_ERRORS as error:
            if not_launched(error) is None:
                raise
            path = self.decided[shape].path or ""
            raise DeviceLost(f"{path} failed to launch: {error}", [(path, str(shape))]) from error

    def check(self, num_tokens: int) -> None:
        """Raises NoPathError where a sum of so many rows has no path any more."""
        for kind in self._kinds.values():
            if self._runs[kind.shape(num_tokens)] is None:
                raise NoPathError(None, f"no path is left for {kind.shape(num_tokens)}")

    def served(self, num_tokens: int) -> tuple[Decision[CollectiveShape], ...]:
        """Return each decision that serves a step of so many tokens."""
        return tuple(it.decision for it in self._served(num_tokens))

    def counts(self, num_tokens: int, num_sequences: int) -> list[DispatchCount]:
        """Return the decisions that serve a step of so many tokens, with their launches."""
        return dispatch_counts(self._served(num_tokens), num_tokens, num_sequences)

    def uses(self, num_tokens: int) -> list[PathUse]:
        """Return what a request says of them: what is no proven first choice."""
        return fallback_uses(self._served(num_tokens))

    def pairs(self, num_tokens: int) -> list[tuple[str, str]]:
        """Return every (path, shape) of a step: whom to blame when the device is lost in it."""
        return [(it.path, str(it.shape)) for it in self.served(num_tokens) if it.path is not None]

    def _served(self, num_tokens: int) -> list[ServedShape]:
        kinds = self._kinds.values()
        return [ServedShape(self.decided[kind.shape(num_tokens)], kind.num_sums) for kind in kinds]

    def _resolve(self, decision: Decision[CollectiveShape]) -> None:
        path = None if decision.path is None else self._by_name[decision.path]
        self._runs[decision.shape] = None if path is None else path.run


def _by_rows(shapes: Iterable[CollectiveShape]) -> list[CollectiveShape]:
    return sorted(shapes, key=lambda shape: shape.rows.lo)
