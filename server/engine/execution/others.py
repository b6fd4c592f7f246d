"""The ranks that compute the steps of a worker too: what it needs of them, and the case that there are none."""

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

from torch import Tensor

from server.engine.execution.commands import Command
from server.engine.execution.graph_keys import GraphKey, GraphSizes
from server.engine.execution.step_buffer import StepBuffer, StepLayout
from server.engine.operators.dispatch import Dispatcher
from server.engine.proof.rank_check import NamedCall


class Others(Protocol):
    """The ranks that a worker leads. Contexts surround what this rank does of what they do too.

    A `dispatcher` is this rank's, whose decisions hold on the others from then on.
    """

    def send(self, command: Command) -> None:
        """Have them do what this rank does too, after all that was sent before."""

    def least(self, num_bytes: int) -> int:
        """Return the least memory of all ranks, where this one has `num_bytes`."""

    def declare(self, sizes: GraphSizes, max_context: int, layouts: Mapping[GraphKey, StepLayout]) -> None:
        """Have them make room for graphs, which are `layouts` here."""

    def padding(self, key: GraphKey, dispatcher: Dispatcher) -> AbstractContextManager[object]:
        """Surround a run of a graph's padding."""

    def capturing(self, key: GraphKey, dispatcher: Dispatcher) -> AbstractContextManager[object]:
        """Surround the capture of a graph."""

    def launching(self) -> AbstractContextManager[object]:
        """Surround the launch of a step, which is announced inside once it is decided."""

    def announce(
        self,
        buffer: StepBuffer,
        dispatcher: Dispatcher,
        *,
        is_observed: bool = False,
        checked: NamedCall | None = None,
    ) -> None:
        """Have them begin a step that is decided, and of which nothing is computed yet.

        `is_observed`: each layer's heads of all ranks are joined. `checked`: which call one of them computes again.
        """

    def announce_head(
        self, buffer: StepBuffer, dispatcher: Dispatcher, *, is_first: bool, place: int, is_observed: bool = False
    ) -> None:
        """Have them begin a step of the draft head, likewise. `is_first`, `place`: see `Worker.follow`."""

    def recording(self) -> AbstractContextManager[object]:
        """Surround the record of a step, which is announced inside by `announce_record`."""

    def announce_record(self, buffer: StepBuffer, dispatcher: Dispatcher) -> None:
        """Have them record the launches of a step."""

    def choose_timed(self, key: GraphKey) -> None:
        """Note which graph `repeating` is about from now on; a recorded step takes its place."""

    def repeating(self) -> AbstractContextManager[object]:
        """Surround a replay of the graph that was captured, or of the step that was recorded, for its times."""

    def computing_logits(self, hidden_rows: Tensor, dispatcher: Dispatcher) -> AbstractContextManager[Tensor]:
        """Surround the logits of some rows, which it gives: the others do not know which were chosen."""

    def share_choice(self, tokens: Tensor) -> None:
        """Give them tokens that are not simply the likeliest ones."""


class NoOthers:
    """The others of a rank that leads none: one that is alone, and each rank but the first."""

    def send(self, command: Command) -> None: ...

    def least(self, num_bytes: int) -> int:
        return num_bytes

    def declare(self, sizes: GraphSizes, max_context: int, layouts: Mapping[GraphKey, StepLayout]) -> None: ...

    def padding(self, key: GraphKey, dispatcher: Dispatcher) -> AbstractContextManager[object]:  # noqa: ARG002
        return nullcontext()

    def capturing(self, key: GraphKey, dispatcher: Dispatcher) -> AbstractContextManager[object]:  # noqa: ARG002
        return nullcontext()

    def launching(self) -> AbstractContextManager[object]:
        return nullcontext()

    def announce(
        self,
        buffer: StepBuffer,
        dispatcher: Dispatcher,
        *,
        is_observed: bool = False,
        checked: NamedCall | None = None,
    ) -> None: ...

    def announce_head(
        self, buffer: StepBuffer, dispatcher: Dispatcher, *, is_first: bool, place: int, is_observed: bool = False
    ) -> None: ...

    def recording(self) -> AbstractContextManager[object]:
        return nullcontext()

    def announce_record(self, buffer: StepBuffer, dispatcher: Dispatcher) -> None: ...

    def choose_timed(self, key: GraphKey) -> None: ...

    def repeating(self) -> AbstractContextManager[object]:
        return nullcontext()

    def computing_logits(self, hidden_rows: Tensor, dispatcher: Dispatcher) -> AbstractContextManager[Tensor]:  # noqa: ARG002
        return nullcontext(hidden_rows)

    def share_choice(self, tokens: Tensor) -> None: ...


NO_OTHERS = NoOthers()
