"""Two results side by side in a CUDA graph. Needs a GPU."""

from collections import Counter

import pytest
import torch

from kernels.driver.cuda_driver import CudaDriver
from server.engine.execution.capture import CudaCapture
from server.model.beside import SideBySide

pytestmark = pytest.mark.gpu


def test_a_graph_computes_two_results_side_by_side() -> None:
    """Chain both several times, so that memory of each stream is used again."""
    device = torch.device("cuda")
    both, x, sums = SideBySide(device), torch.zeros(1 << 20, device=device), torch.zeros(1 << 20, device=device)

    def work() -> None:
        read = x
        for _ in range(5):
            one, other = both(lambda read=read: (read + 1) * 3, lambda read=read: ((read - 1) * 5 + 2) * 7)  # type: ignore[misc]
            read = one - other
        sums.copy_(read)

    graph = CudaCapture(device)(work)
    for seed in range(20):
        x.copy_(torch.arange(1 << 20, device=device) % 7 + seed)
        graph.replay()
        found, expected = sums.clone(), x
        for _ in range(5):
            expected = (expected + 1) * 3 - ((expected - 1) * 5 + 2) * 7
        assert torch.equal(found, expected)
    pairs = CudaDriver().edges(graph.graph.raw_cuda_graph()).pairs
    forks, joins = (Counter(Counter(nodes).values()) for nodes in zip(*pairs, strict=True))
    assert (forks[2], joins[2]) == (4, 5)  # the first pair follows no node
