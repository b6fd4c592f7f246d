"""The time of each kernel in a CUDA graph, without the profiler: events between the nodes of a copy of the graph.

The copy runs the same kernels on the same memory in the same order, one after the other, with an event behind each: no
kernel sees anything but what it sees in the graph. Kernels that overlap in the graph (programmatic dependent launch) do
not in the copy, and each time includes the start of its kernel. So the sum is above the time of a replay, and is good
for shares only.
"""

from collections.abc import Sequence
from contextlib import ExitStack
from graphlib import TopologicalSorter
from itertools import pairwise
from statistics import median
from typing import Protocol

from qualification.attest.cuda_driver import Edges

_NUM_RUNS = 5  # that are measured; one before them warms up


class Driver(Protocol):
    """Part of a CudaDriver that this needs."""

    def nodes(self, graph: int) -> list[int]: ...
    def node_name(self, node: int) -> str | None: ...
    def clone(self, graph: int) -> int: ...
    def edges(self, graph: int) -> Edges: ...
    def remove_edges(self, graph: int, edges: Edges) -> None: ...
    def add_edge(self, graph: int, node: int, waiting: int) -> None: ...
    def add_event_node(self, graph: int, after: int | None, event: int) -> int: ...
    def instantiate(self, graph: int) -> int: ...
    def launch(self, executable: int, stream: int) -> None: ...
    def create_event(self) -> int: ...
    def seconds_between(self, begin: int, end: int) -> float: ...
    def destroy_event(self, event: int) -> None: ...
    def destroy_executable(self, executable: int) -> None: ...
    def destroy_graph(self, graph: int) -> None: ...


def node_seconds(driver: Driver, graph: int, stream: int, *, num_runs: int = _NUM_RUNS) -> dict[str, float]:
    """Run a copy of `graph` on `stream` some times; return the seconds of its nodes by their names, medians added up.

    The graph's inputs must be in place. Waits for the device. Raises DriverError.
    """
    with ExitStack() as cleanup:
        copy = driver.clone(graph)
        cleanup.callback(driver.destroy_graph, copy)
        order = _in_order(driver, copy)
        events = []
        for _ in range(len(order) + 1):
            events.append(driver.create_event())
            cleanup.callback(driver.destroy_event, events[-1])
        _chain(driver, copy, order, events)
        executable = driver.instantiate(copy)
        cleanup.callback(driver.destroy_executable, executable)
        runs = []
        for _ in range(num_runs + 1):
            driver.launch(executable, stream)
            runs.append([driver.seconds_between(*pair) for pair in pairwise(events)])
        found: dict[str, float] = {}
        for node, seconds in zip(order, zip(*runs[1:], strict=True), strict=True):
            name = driver.node_name(node)
            if name is not None:
                found[name] = found.get(name, 0.0) + median(seconds)
        return found


def _in_order(driver: Driver, graph: int) -> list[int]:
    """Return the nodes so that none is before one that it waits for, and remove the graph's own dependencies."""
    edges = driver.edges(graph)
    before: dict[int, list[int]] = {node: [] for node in driver.nodes(graph)}
    for node, waiting in edges.pairs:
        before[waiting].append(node)
    driver.remove_edges(graph, edges)
    return list(TopologicalSorter(before).static_order())


def _chain(driver: Driver, graph: int, order: Sequence[int], events: Sequence[int]) -> None:
    """Let the nodes run one after the other, with an event before the first and behind each."""
    behind = driver.add_event_node(graph, None, events[0])
    for node, event in zip(order, events[1:], strict=True):
        driver.add_edge(graph, behind, node)
        behind = driver.add_event_node(graph, node, event)
