"""Recording work into CUDA graphs, with the kernels that the driver says are in them."""

import logging
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

from kernels.driver.driver_record import DriverError, Recorder

logger = logging.getLogger(__name__)


class Replayable(Protocol):
    """Recorded work: torch.cuda.CUDAGraph, or a closure in the tests."""

    def replay(self) -> None:
        """Start the work again on the same memory."""


@dataclass(frozen=True, slots=True)
class RecordedGraph:
    """A CUDA graph, and the kernels that the driver says are in it, by how often.

    graph  with its nodes kept, so that a copy of it can be timed
    """

    graph: torch.cuda.CUDAGraph
    kernels: Counter[str] | None  # None: the driver does not say

    def replay(self) -> None:
        self.graph.replay()


Capture = Callable[[Callable[[], None]], Replayable]


class CudaCapture:
    """Records work into CUDA graphs that share one pool of memory: only one of them may run at a time."""

    def __init__(self, device: torch.device, *, names_kernels: bool = True) -> None:
        """`names_kernels`: whether the driver is asked what is in each graph."""
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._recorder = Recorder(device) if names_kernels else None

    def __call__(self, work: Callable[[], None]) -> RecordedGraph:
        graph = torch.cuda.CUDAGraph(keep_graph=True)
        # Only this thread launches anything; the others must not spoil the capture, whatever they ask CUDA for, as
        # NCCL's watchdog asks whether earlier exchanges are done.
        mode = "thread_local"
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode=mode):
            work()
            kernels = self._kernels()
        graph.instantiate()
        return RecordedGraph(graph, kernels)

    def _kernels(self) -> Counter[str] | None:
        """Return the kernels of the graph so far. A driver that cannot say ends the attestation, not the graph."""
        if self._recorder is None:
            return None
        try:
            return self._recorder.kernels()
        except DriverError as error:
            logger.warning("the driver does not say which kernels the graphs hold: %s", error)
            return None
