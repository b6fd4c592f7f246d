"""The kernels of a call by the driver's own record: the call is captured into a CUDA graph, whose kernel nodes have
names, and the graph runs in its place. A whole step is recorded so too, and timed node by node.

For a server, which must not use the profiler: once CUPTI has been used, a replay of a decode graph takes 83 us longer
for good (H200, driver 580.159, 350 nodes), and cuptiFinalize then breaks replays.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch

from kernels.driver.cuda_driver import CudaDriver, DriverError
from kernels.driver.graph_times import node_seconds
from kernels.driver.kernel_names import is_helper, short_name
from kernels.driver.seen import Seen

__all__ = ["DriverError", "Recorder"]


class Recorder:
    """Names the kernels of marked calls on one device, and names and times those of whole graphs."""

    def __init__(self, device: torch.device) -> None:
        """Load the CUDA driver. Raises DriverError where there is none."""
        self._driver = CudaDriver()
        self._side = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._calls: list[Counter[str]] = []

    @contextmanager
    def mark(self) -> Iterator[None]:
        """Capture the launches of this context, name their kernels, run them. They must not wait for the device."""
        current = torch.cuda.current_stream()
        graph = torch.cuda.CUDAGraph()
        self._side.wait_stream(current)
        with torch.cuda.stream(self._side):
            graph.capture_begin(capture_error_mode="thread_local")
            try:
                yield
                self._calls.append(self.kernels())
            finally:
                graph.capture_end()
        current.wait_stream(self._side)
        graph.replay()
        current.synchronize()  # before the graph and its memory are gone

    def calls_seen(self, calls: Sequence[Callable[[], object]]) -> Seen:
        """Record each of `calls` as a marked call, after it has run once: no capture may compile anything."""
        for call in calls:
            call()
            with self.mark():
                call()
        return self.take()

    def take(self) -> Seen:
        """The calls marked since the last one."""
        calls, self._calls = self._calls, []
        return Seen(tuple(calls), Counter())

    def kernels(self) -> Counter[str]:
        """Count the kernels in the current stream's capture so far, data movers left out.

        Raises DriverError.
        """
        captured = self._driver.captured_graph(torch.cuda.current_stream().cuda_stream)
        names = (short_name(name) for name in self._names(captured))
        return Counter(name for name in names if not is_helper(name))

    def capture(self, work: Callable[[], None]) -> torch.cuda.CUDAGraph:
        """Capture what `work` launches, without running it. It must have run before and not wait for the device."""
        current = torch.cuda.current_stream()
        graph = torch.cuda.CUDAGraph(keep_graph=True)
        self._side.wait_stream(current)
        with torch.cuda.stream(self._side):
            graph.capture_begin(capture_error_mode="thread_local")
            try:
                work()
            finally:
                graph.capture_end()
        current.wait_stream(self._side)
        return graph

    def node_names(self, graph: torch.cuda.CUDAGraph) -> Counter[str]:
        """Count the nodes of a kept graph that do something on the device, by the names of their kernels.

        Raises DriverError.
        """
        return Counter(self._names(graph.raw_cuda_graph()))

    def node_seconds(
        self, graph: torch.cuda.CUDAGraph, *, launching: Callable[[], AbstractContextManager[object]] = nullcontext
    ) -> dict[str, float]:
        """Run copies of a kept graph, whose inputs are in place, and return its nodes' seconds by name.

        `launching`: the context of each run. Raises DriverError.
        """
        current = torch.cuda.current_stream()
        current.synchronize()
        return node_seconds(self._driver, graph.raw_cuda_graph(), current.cuda_stream, launching=launching)

    def _names(self, graph: int) -> Iterator[str]:
        names = (self._driver.node_name(node) for node in self._driver.nodes(graph))
        return (name for name in names if name is not None)
