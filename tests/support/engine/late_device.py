"""A device as slow and as fast as a GPU may be: it begins nothing before somebody waits, and then does any more of it.

What the host writes too early to memory that a copy still has to read, or reads too late from memory that another copy
writes over, so shows on a CPU.
"""

import random
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from kernels.sampling.sampling import SampleResult
from server.engine.execution.sampling import SampledTokens


class LateDevice(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Device that puts off copies that nothing waits for, and replays, until something else is computed.

    The order is kept. `num_started` copies and replays came so far; `most_due` of them were put off at once.
    """

    def __init__(self, rng: random.Random) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._rng = rng
        self._due: deque[Callable[[], object]] = deque()
        self.num_started = 0
        self.most_due = 0
        self._is_working = False

    def start(self, work: Callable[[], object]) -> None:
        """Put it off behind all that was started before."""
        self._due.append(work)
        self.num_started += 1
        self.most_due = max(self.most_due, len(self._due))

    def wait(self, num_left: int = 0) -> None:
        """Do all but the `num_left` started last, or some of those too."""
        num_left = self._rng.choice([num_left, self._rng.randint(0, num_left)])
        self._is_working = True
        while len(self._due) > num_left:
            self._due.popleft()()
        self._is_working = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not self._is_working:
            if func is torch.ops.aten.copy_.default and args[2:] == (True,):
                self.start(partial(func, *args))
                return args[0]
            self.wait()
        return func(*args, **(kwargs or {}))


class LateTokens(SampledTokens):
    """Sampled tokens on such a device. `is_failing`: the next choice outside of a graph lacks memory."""

    def __init__(self, num_rows: int, device: LateDevice) -> None:
        super().__init__(num_rows, torch.device("cpu"))
        self._device = device
        self._is_graph = False
        self.is_failing = False

    def replay(self, work: Callable[[], None]) -> None:
        """Start what a graph holds."""

        def in_graph() -> None:
            self._is_graph = True
            work()
            self._is_graph = False

        self._device.start(in_graph)

    def store(self, chosen: SampleResult) -> None:
        if self.is_failing and not self._is_graph:
            self.is_failing = False
            raise torch.OutOfMemoryError("no memory to sample")
        super().store(chosen)

    def copy_to_host(self, num_rows: int, drafted_at: Sequence[int] = ()) -> Callable[[], list[int]]:
        read, device = super().copy_to_host(num_rows, drafted_at), self._device
        end = device.num_started

        def read_late() -> list[int]:
            device.wait(num_left=device.num_started - end)
            return read()

        return read_late
