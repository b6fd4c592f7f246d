"""The seconds of each kernel of a probe's pass on a GPU, measured once and again when other kernels run."""

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

ProbeT = TypeVar("ProbeT")  # a batch, or the grid of an image
GraphT = TypeVar("GraphT")


@dataclass(frozen=True, slots=True)
class _Measured(Generic[ProbeT]):
    probe: ProbeT
    names: Counter[str]
    seconds: Mapping[str, float]


class StepTimes(Generic[ProbeT, GraphT]):
    """Times the passes of an attestation's probes. Only the stepping thread may call it."""

    def __init__(
        self,
        graph_of: Callable[[ProbeT], GraphT | None],
        node_names: Callable[[GraphT], Counter[str]],
        node_seconds: Callable[[GraphT], Mapping[str, float]],
    ) -> None:
        """`graph_of`: what computes the probe that ran last, as a CUDA graph; None where it cannot be captured.

        `node_names`, `node_seconds`: a Recorder's.
        """
        self._graph_of = graph_of
        self._node_names = node_names
        self._node_seconds = node_seconds
        self._measured: list[_Measured[ProbeT]] = []

    def __call__(self, probe: ProbeT) -> Mapping[str, float] | None:
        """Return the seconds of the pass's nodes by whole kernel name; None where no CUDA graph can hold it.

        The probe must be equal each time, and have run last. A pass of the same kernels as before is not run again.
        Raises DriverError.
        """
        graph = self._graph_of(probe)
        if graph is None:
            return None
        names = self._node_names(graph)
        before = next((it for it in self._measured if it.probe == probe), None)
        if before is not None and before.names == names:
            return before.seconds
        found = _Measured(probe, names, self._node_seconds(graph))
        self._measured = [it for it in self._measured if it is not before] + [found]
        return found.seconds
