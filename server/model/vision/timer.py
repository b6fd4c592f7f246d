"""The time that a tower takes, read when the device has done with it."""

import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from server.protocol.messages import TowerTime


class TowerTimer:
    """Times what a tower computes; nothing waits for the device."""

    def __init__(self, device: torch.device) -> None:
        self._is_cuda = device.type == "cuda"
        self._done: list[TowerTime] = []
        self._open: deque[tuple[int, int, torch.cuda.Event, torch.cuda.Event]] = deque()

    @contextmanager
    def timing(self, num_images: int, num_tokens: int) -> Iterator[None]:
        """Time what is launched inside, for so many images and tokens."""
        if not self._is_cuda:
            started_at = time.perf_counter()
            yield
            self._done.append(TowerTime(num_images, num_tokens, time.perf_counter() - started_at))
            return
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        start.record()
        yield
        stop.record()
        self._open.append((num_images, num_tokens, start, stop))

    def take(self) -> list[TowerTime]:
        """Return and forget what is done."""
        while self._open and self._open[0][3].query():  # type: ignore[no-untyped-call]
            num_images, num_tokens, start, stop = self._open.popleft()
            self._done.append(TowerTime(num_images, num_tokens, start.elapsed_time(stop) / 1e3))
        found, self._done = self._done, []
        return found
