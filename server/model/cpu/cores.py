"""How many of a CPU's cores a step of the decoder is shared among."""

import torch

from kernels.linear.packed import MAX_MULTIPLY_ADDS, MIN_ROWS
from server.model.layers import Weights


class Cores:
    """All cores, or one where a step's products are so small that handing parts of them around takes longer.

    A step of 8 rows of the demo model has 700 operations of 1 to 200 us. On two cores, which the API process also uses,
    it took 21 ms of CPU with two threads and 14 ms with one (AMD Milan, torch 2.13, passive waiting).
    """

    def __init__(self, weights: Weights) -> None:
        self._is_cpu = weights.embedding.device.type == "cpu"
        self._num_cores = torch.get_num_threads()
        linears = [linear for layer in weights.layers[:1] for linear in layer.linears.values()]
        largest = max((linear.weight.numel() for linear in linears), default=1)
        self._max_rows = MAX_MULTIPLY_ADDS // largest

    def take(self, num_rows: int) -> None:
        """For what is computed from now on: a step of that many tokens."""
        if self._is_cpu:
            torch.set_num_threads(1 if max(num_rows, MIN_ROWS) <= self._max_rows else self._num_cores)
