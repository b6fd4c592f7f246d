"""The time that a tower takes, read when the device has done with it."""

import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from server.protocol.messages import TowerTime


class TimedImages:
    """Time of images that are computed together."""

    def __init__(
        self, num_images: int, num_tokens: int, events: tuple[torch.cuda.Event, torch.cuda.Event] | None
    ) -> None:
        """`events`: around what is launched; None where the host's clock measures it."""
        self.num_images = num_images
        self.num_tokens = num_tokens
        self._events = events
        self._seconds: float | None = None

    @property
    def seconds(self) -> float | None:
        """Return the time; None where the device is not done. Nothing waits."""
        if self._seconds is None and self._events is not None and self._events[1].query():  # type: ignore[no-untyped-call]
            self._seconds = self._events[0].elapsed_time(self._events[1]) / 1e3
        return self._seconds

    @contextmanager
    def timing(self) -> Iterator[None]:
        """Time what is launched inside."""
        if self._events is None:
            started_at = time.perf_counter()
            yield
            self._seconds = time.perf_counter() - started_at
            return
        self._events[0].record()
        yield
        self._events[1].record()


class TowerTimer:
    """Times what a tower computes."""

    def __init__(self, device: torch.device) -> None:
        self._is_cuda = device.type == "cuda"
        self._open: deque[TimedImages] = deque()

    @contextmanager
    def timing(self, num_images: int, num_tokens: int) -> Iterator[TimedImages]:
        """Time what is launched inside, for so many images and tokens."""
        events = None
        if self._is_cuda:
            events = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        found = TimedImages(num_images, num_tokens, events)
        with found.timing():
            yield found
        self._open.append(found)

    @property
    def is_open(self) -> bool:
        """Return whether there are images that `take` has not returned: the device may still compute them."""
        return bool(self._open)

    def take(self) -> list[TowerTime]:
        """Return and forget what is done."""
        done = []
        while self._open and (seconds := self._open[0].seconds) is not None:
            found = self._open.popleft()
            done.append(TowerTime(found.num_images, found.num_tokens, seconds))
        return done
