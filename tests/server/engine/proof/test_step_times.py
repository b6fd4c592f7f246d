"""Timing of the kernels of an attestation's step."""

from collections import Counter

from server.engine.proof.step_times import StepTimes
from server.engine.scheduling.sequence import Batch
from server.engine.startup.warmup import synthetic_batch

FIRST, SECOND = (synthetic_batch([(length, length)], 16) for length in (5, 9))


class Record:
    """Graphs are the names of their kernels."""

    def __init__(self) -> None:
        self.timed: list[str] = []

    def node_names(self, graph: str) -> Counter[str]:
        return Counter(graph.split())

    def node_seconds(self, graph: str) -> dict[str, float]:
        self.timed.append(graph)
        return dict.fromkeys(graph.split(), 1.0)


def test_a_step_is_timed_once_and_again_when_other_kernels_run() -> None:
    kernels = {id(FIRST): "norm gemm", id(SECOND): "norm gemm"}
    record = Record()
    times = StepTimes(lambda batch: kernels[id(batch)], record.node_names, record.node_seconds)

    def of(batch: Batch) -> set[str]:
        return set(times(batch) or {})

    for _ in range(2):
        assert of(FIRST) == of(SECOND) == {"norm", "gemm"}
    assert record.timed == ["norm gemm"] * 2
    kernels[id(FIRST)] = "norm other"
    for _ in range(2):
        assert of(FIRST) == {"norm", "other"}
        assert of(SECOND) == {"norm", "gemm"}
    assert record.timed[2:] == ["norm other"]


def test_a_step_that_no_graph_can_hold_has_no_times() -> None:
    record = Record()
    assert StepTimes(lambda _: None, record.node_names, record.node_seconds)(FIRST) is None
    assert record.timed == []
