"""Two results of a step, neither of which needs the other: one after the other, or side by side in a CUDA graph."""

from collections.abc import Callable

import torch
from torch import Tensor

# Gives the results of both.
Both = Callable[[Callable[[], Tensor], Callable[[], Tensor]], tuple[Tensor, Tensor]]


def in_turn(first: Callable[[], Tensor], second: Callable[[], Tensor]) -> tuple[Tensor, Tensor]:
    """Return both results, computed one after the other."""
    return first(), second()


class SideBySide:
    """Computes the second result on a stream of its own where a graph records both; elsewhere after the first.

    Neither may write what the other reads, and the caller holds what both read. No tensor need be recorded on a second
    stream: PyTorch reuses memory on the stream that it was given to, and what the side stream launches follows all that
    was launched before both. What is launched behind both must follow the end of both.
    """

    def __init__(self, device: torch.device) -> None:
        """`device`: the current one, a GPU, wherever this is called."""
        self._side = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def __call__(self, first: Callable[[], Tensor], second: Callable[[], Tensor]) -> tuple[Tensor, Tensor]:
        """Return both results."""
        if not torch.cuda.is_current_stream_capturing():  # the host launches an eager step too slowly to gain
            return in_turn(first, second)
        current = torch.cuda.current_stream()
        begun = current.record_event()
        found = first()  # recorded before the side: in the other order the driver gives each layer a stream of its own
        with torch.cuda.stream(self._side):
            self._side.wait_event(begun)
            try:
                beside = second()
            finally:  # a capture that an error ends must be joined too
                current.wait_stream(self._side)
        return found, beside
