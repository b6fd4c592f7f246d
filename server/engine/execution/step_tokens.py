"""The tokens that steps choose: they stay on the device for the next step, and go to the host for all others."""

from collections.abc import Callable

import torch

from kernels.sampling.sampling import SampleResult


class StepTokens:
    """What the latest step chose, by result row. Two steps may be on their way to the host at once.

    latest  [num_rows] int64 on the device: valid ids, also where the logits gave no ground to choose
    """

    def __init__(self, num_rows: int, device: torch.device) -> None:
        is_cuda = device.type == "cuda"
        self.latest = torch.zeros(num_rows, dtype=torch.int64, device=device)
        self._told = torch.zeros_like(self.latest)  # the same, -1 where the logits held no finite number
        self._hosts = [torch.zeros(num_rows, dtype=torch.int64, pin_memory=is_cuda) for _ in range(2)]
        self._views = [host.numpy() for host in self._hosts]
        self._arrivals = [torch.cuda.Event() for _ in range(2)] if is_cuda else None  # type: ignore[no-untyped-call]
        self._turn = 0

    def keep(self, chosen: SampleResult) -> None:
        """Write the first rows; a CUDA graph can hold it."""
        num_rows = chosen.token_ids.shape[0]
        self.latest[:num_rows].copy_(chosen.token_ids)
        self._told[:num_rows].copy_(chosen.token_ids.masked_fill(~chosen.is_finite, -1))

    def ship(self, num_rows: int) -> Callable[[], list[int]]:
        """Start the copy of the first rows to the host. What is returned waits for it, and so for the whole step.

        Read it before the second `ship` after this one, which uses its memory again.
        """
        turn = self._turn = 1 - self._turn
        if num_rows:
            self._hosts[turn].copy_(self._told, non_blocking=True)  # all: to cut out some rows takes longer
        told = self._views[turn]
        arrival = None if self._arrivals is None else self._arrivals[turn]
        if arrival is not None:
            arrival.record()

        def read() -> list[int]:
            if arrival is not None:
                arrival.synchronize()
            token_ids: list[int] = told[:num_rows].tolist()
            return token_ids

        return read
