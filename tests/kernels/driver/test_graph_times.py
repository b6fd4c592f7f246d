"""The times of a graph's nodes, by a driver of a few lines whose nodes take what they are given."""

from collections.abc import Sequence
from graphlib import TopologicalSorter
from itertools import count

import pytest

from kernels.driver.cuda_driver import DriverError, Edges
from kernels.driver.graph_times import node_seconds

GRAPH, COPY, STREAM = 1, 2, 7
NODES = {13: "c", 11: "a", 12: "b", 14: None, 15: "a"}  # as the driver lists them: not in order
EDGES = ((11, 12), (12, 13), (13, 14), (14, 15))


class Driver:
    """One graph. Node 12 takes 2 s, 4 s, 6 s, ... from run to run, the others one second; every node half a second more
    where an event is behind each.
    """

    def __init__(self, edges: tuple[tuple[int, int], ...] = EDGES) -> None:
        self._edges = edges
        self._numbers = count(100)
        self._events: dict[int, int] = {}  # by the node that records them
        self._at: dict[int, float] = {}
        self.num_runs = 0
        self.ran: list[int] = []
        self.made: set[int] = set()
        self.breaks = False

    def nodes(self, graph: int) -> list[int]:
        assert graph == COPY
        return [*NODES, *self._events]

    def node_name(self, node: int) -> str | None:
        return NODES[node]

    def clone(self, graph: int) -> int:
        assert graph == GRAPH
        self.made.add(COPY)
        return COPY

    def edges(self, graph: int) -> Edges:
        assert graph == COPY
        return Edges(self._edges, ((), (), ()))  # type: ignore[arg-type]

    def remove_edges(self, graph: int, edges: Edges) -> None:
        assert (graph, edges.pairs) == (COPY, self._edges)
        self._edges = ()

    def add_edge(self, graph: int, node: int, waiting: int) -> None:
        assert graph == COPY
        self._edges += ((node, waiting),)

    def add_event_node(self, graph: int, after: Sequence[int], event: int) -> int:
        assert graph == COPY
        node = next(self._numbers)
        self._events[node] = event
        self._edges += tuple((other, node) for other in after)
        return node

    def instantiate(self, graph: int) -> int:
        assert graph == COPY
        executable = next(self._numbers)
        self.made.add(executable)
        self.num_runs = 0
        return executable

    def launch(self, executable: int, stream: int) -> None:
        assert executable in self.made
        assert stream == STREAM
        if self.breaks:
            raise DriverError("cuGraphLaunch answers 700")
        self.num_runs += 1
        now, self.ran = 0.0, []
        start = 0.5 if len(self._events) == len(NODES) + 1 else 0.0
        before: dict[int, list[int]] = {node: [] for node in self.nodes(COPY)}
        for node, waiting in self._edges:
            before[waiting].append(node)
        for node in TopologicalSorter(before).static_order():
            if node in self._events:
                self._at[self._events[node]] = now
            else:
                self.ran.append(node)
                now += start + (2.0 * self.num_runs if node == 12 else 1.0)

    def create_event(self) -> int:
        event = next(self._numbers)
        self.made.add(event)
        return event

    def seconds_between(self, begin: int, end: int) -> float:
        return self._at[end] - self._at[begin]

    def destroy_event(self, event: int) -> None:
        self.made.remove(event)

    def destroy_executable(self, executable: int) -> None:
        self.made.remove(executable)

    def destroy_graph(self, graph: int) -> None:
        self.made.remove(graph)


def test_nodes_run_in_order_and_medians_are_added_by_name() -> None:
    driver = Driver()
    found = node_seconds(driver, GRAPH, STREAM, num_runs=3)
    assert found == {"a": 2.0, "b": 6.0, "c": 1.0}  # of 4, 6 and 8 s, without the half second that each took more
    assert driver.ran == [11, 12, 13, 14, 15]
    assert driver.num_runs == 4


def test_a_node_never_runs_before_one_that_it_waits_for() -> None:
    driver = Driver(((15, 11), (14, 11), (12, 15)))
    node_seconds(driver, GRAPH, STREAM, num_runs=1)
    places = {node: place for place, node in enumerate(driver.ran)}
    assert set(places) == set(NODES)
    assert places[12] < places[15] < places[11]
    assert places[14] < places[11]


@pytest.mark.parametrize("breaks", [False, True])
def test_nothing_is_left_behind(breaks: bool) -> None:
    driver = Driver()
    driver.breaks = breaks
    if breaks:
        with pytest.raises(DriverError, match="700"):
            node_seconds(driver, GRAPH, STREAM)
    else:
        node_seconds(driver, GRAPH, STREAM)
    assert driver.made == set()
