"""The seconds of each kernel of a probe's step on a GPU, measured once and again when other kernels run."""

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

from server.engine.scheduling.sequence import Batch

GraphT = TypeVar("GraphT")


@dataclass(frozen=True, slots=True)
class _Measured:
    batch: Batch
    names: Counter[str]
    seconds: Mapping[str, float]


class StepTimes(Generic[GraphT]):
    """Times the steps of an attestation's batches. Only the stepping thread may call it."""

    def __init__(
        self,
        graph_of: Callable[[Batch], GraphT | None],
        node_names: Callable[[GraphT], Counter[str]],
        node_seconds: Callable[[GraphT], Mapping[str, float]],
    ) -> None:
        """`graph_of`: what computes the batch that ran last, as a CUDA graph; None where it cannot be captured.

        `node_names`, `node_seconds`: a Recorder's.
        """
        self._graph_of = graph_of
        self._node_names = node_names
        self._node_seconds = node_seconds
        self._measured: list[_Measured] = []

    def __call__(self, batch: Batch) -> Mapping[str, float] | None:
        """Return the seconds of the step's nodes by whole kernel name; None where no CUDA graph can hold it.

        The batch must be the same object each time, and have run last. A step of the same kernels as before is not
        run again. Raises DriverError.
        """
        graph = self._graph_of(batch)
        if graph is None:
            return None
        names = self._node_names(graph)
        before = next((it for it in self._measured if it.batch is batch), None)
        if before is not None and before.names == names:
            return before.seconds
        found = _Measured(batch, names, self._node_seconds(graph))
        self._measured = [it for it in self._measured if it is not before] + [found]
        return found.seconds
