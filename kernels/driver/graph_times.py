"""The time of each kernel in a CUDA graph, without the profiler: events between the nodes of a copy of the graph.

The copy runs the same kernels on the same memory in the same order, one after the other, with an event behind each: no
kernel sees anything but what it sees in the graph. But no kernel starts while another one ends there, as it may in the
graph, and each time includes a start: 236 nodes take 1661 us together, a replay 871 (Qwen3-0.6B, H200). What a copy as
it is takes less is therefore taken from all nodes alike.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from graphlib import TopologicalSorter
from itertools import pairwise
from statistics import median

from kernels.driver.cuda_driver import CudaDriver

_NUM_RUNS = 5  # that are measured; one before them warms up
_LEAST_SHARE = 0.1  # of a node's time that is left to it: none disappears


def node_seconds(
    driver: CudaDriver,
    graph: int,
    stream: int,
    *,
    num_runs: int = _NUM_RUNS,
    launching: Callable[[], AbstractContextManager[object]] = nullcontext,
) -> dict[str, float]:
    """Run copies of `graph` on `stream` some times; return the seconds of its nodes by their names, medians added up.

    The graph's inputs must be in place. Waits for the device. Each run is `launching`: kernels that exchange with other
    devices need those to run too. Raises DriverError.
    """
    with ExitStack() as cleanup:
        copy = driver.clone(graph)
        cleanup.callback(driver.destroy_graph, copy)
        order, roots, leaves = _in_order(driver, copy)
        events = []
        for _ in range(len(order) + 1):
            events.append(driver.create_event())
            cleanup.callback(driver.destroy_event, events[-1])

        def seconds_between(events: Sequence[int]) -> list[float]:
            """Run the copy as it is now; return the median seconds between every two of these events."""
            executable = driver.instantiate(copy)
            cleanup.callback(driver.destroy_executable, executable)
            runs = []
            for _ in range(num_runs + 1):
                with launching():
                    driver.launch(executable, stream)
                runs.append([driver.seconds_between(*pair) for pair in pairwise(events)])
            return [median(seconds) for seconds in zip(*runs[1:], strict=True)]

        first = driver.add_event_node(copy, (), events[0])
        for root in roots:
            driver.add_edge(copy, first, root)
        last = driver.add_event_node(copy, leaves, events[-1])
        (whole,) = seconds_between((events[0], events[-1]))
        driver.remove_edges(copy, driver.edges(copy))
        _chain(driver, copy, (first, *order, last), events[1:-1])
        times = seconds_between(events)
        too_much = max(0.0, (sum(times) - whole) / len(times))
        found: dict[str, float] = {}
        for node, seconds in zip(order, times, strict=True):
            name = driver.node_name(node)
            if name is not None:
                found[name] = found.get(name, 0.0) + max(seconds - too_much, _LEAST_SHARE * seconds)
        return found


def _in_order(driver: CudaDriver, graph: int) -> tuple[list[int], list[int], list[int]]:
    """Return the nodes, none before one that it waits for; those that wait for none; those that none waits for."""
    before: dict[int, list[int]] = {node: [] for node in driver.nodes(graph)}
    for node, waiting in driver.edges(graph).pairs:
        before[waiting].append(node)
    inner = {node for nodes in before.values() for node in nodes}
    roots = [node for node, nodes in before.items() if not nodes]
    leaves = [node for node in before if node not in inner]
    return list(TopologicalSorter(before).static_order()), roots, leaves


def _chain(driver: CudaDriver, graph: int, nodes: Sequence[int], events: Sequence[int]) -> None:
    """Let the nodes run one after the other, with an event behind each but the first and the latest two."""
    first, *inner, before_last, last = nodes
    behind = first
    for node, event in zip(inner, events, strict=True):
        driver.add_edge(graph, behind, node)
        behind = driver.add_event_node(graph, (node,), event)
    driver.add_edge(graph, behind, before_last)
    driver.add_edge(graph, before_last, last)
