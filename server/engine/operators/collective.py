"""Sums over the ranks by the plan's decisions. A launch that fails ends the step on all of them."""

from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Unpack

from torch import Tensor

from kernels.collective.paths import EXCHANGE, CollectivePath
from kernels.collective.peers import AddNorm, Peers, RunCollective
from kernels.collective.shape import CollectiveShape, Follows
from kernels.vocabulary.operators import Operator
from qualification.decision.decision import Decision
from server.engine.operators.rows_table import RowsTable
from server.engine.operators.table import TableOptions


class CollectiveTable(RowsTable[CollectiveShape, RunCollective]):
    """The decisions for a model's sums over the ranks."""

    def __init__(
        self,
        num_sums: Mapping[Follows, int],
        decisions: Mapping[CollectiveShape, Decision[CollectiveShape]],
        paths: Iterable[CollectivePath],
        *,
        num_of_head: Mapping[Follows, int] = MappingProxyType({}),
        **options: Unpack[TableOptions[CollectiveShape]],
    ) -> None:
        """`num_sums`: of a step, by what follows. Sums of a shape whose decision has no path raise NoPathError.

        `num_of_head`: likewise, of a pass of the draft head.
        """
        options["may_replace"] = False  # the other ranks wait
        super().__init__(Operator.COLLECTIVE, decisions, paths, **options)
        self._kinds = {
            follows: self.add(
                (shape for shape in decisions if shape.follows is follows),
                num_launches=count,
                num_of_head=num_of_head.get(follows, 0),
            )
            for follows, count in num_sums.items()
        }

    def run(self, peers: Peers, part: Tensor, follows: AddNorm | None, out: Tensor) -> None:
        """Sum by the choice for the number of rows.

        Raises NoPathError where none is left, and DeviceLost with the path that failed to launch: other ranks wait.
        """
        calls = self._kinds[Follows.NOTHING if follows is None else Follows.ADD_NORM]
        self.launch(calls, part.shape[0], peers, part, follows, out)

    def is_exchanged(self, num_rows: int) -> bool:
        """Return whether all sums of so many rows go by the path whose rows may be sent ahead."""
        choices = [calls.choices[calls.place(num_rows)] for calls in self._kinds.values() if calls.shapes]
        return bool(choices) and all(it is not None and it.decision.path == EXCHANGE for it in choices)
