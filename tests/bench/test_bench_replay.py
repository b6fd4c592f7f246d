"""A captured call on the GPU: `pytest -m gpu`."""

import pytest
import torch

from bench.attention.measure import graphed
from bench.attention.peers import Prepared

CUDA = torch.device("cuda")


def prepared(fill: float) -> Prepared:
    """A call that alone holds the 64 MiB it reads, as a peer holds its own layout of keys and values."""
    source = torch.full((2**24,), fill, device=CUDA)
    return Prepared(lambda: source * 2, lambda output: output)


@pytest.mark.gpu
def test_replay_keeps_its_inputs_through_another_capture() -> None:
    first = graphed(prepared(1.0), CUDA)
    second = graphed(prepared(5.0), CUDA)  # the capture gives freed segments back to the driver
    assert torch.equal(first(), torch.full((2**24,), 2.0, device=CUDA))
    assert torch.equal(second(), torch.full((2**24,), 10.0, device=CUDA))
