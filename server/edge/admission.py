"""Admission of requests to the queue."""

import math

from server.errors import TooManyRequests


class Admission:
    """Counts, exactly, what waits for a first token; refuses what would exceed the limits."""

    def __init__(self, max_requests: int, max_tokens: int, max_image_bytes: int) -> None:
        self.max_requests = max_requests
        self.max_tokens = max_tokens
        self.max_image_bytes = max_image_bytes
        self.num_image_bytes = 0
        self.num_requests = 0
        self.num_tokens = 0
        self.wait_s = 0.0  # moving mean of the time until each prompt of a request has its first token

    def enter(self) -> "Place":
        """A place in the queue. Raises TooManyRequests when it is full."""
        if self.num_requests >= self.max_requests:
            message = f"{self.num_requests} requests wait for their first token, the limit is {self.max_requests}."
            raise TooManyRequests(message, retry_after_s=self.retry_after_s)
        self.num_requests += 1
        return Place(self)

    @property
    def retry_after_s(self) -> int:
        return min(60, max(1, math.ceil(self.wait_s)))


class Place:
    """One request's place in the queue; `leave` may be called more than once."""

    def __init__(self, admission: Admission) -> None:
        self._admission = admission
        self._num_tokens = 0
        self._num_image_bytes = 0
        self._has_left = False

    def add_tokens(self, num_tokens: int) -> None:
        """The prompt's size is known. Raises TooManyRequests when it does not fit; an empty queue takes any."""
        admission = self._admission
        total = admission.num_tokens + num_tokens
        if admission.num_tokens and total > admission.max_tokens:
            message = f"{total} prompt tokens would wait for a first token, the limit is {admission.max_tokens}."
            raise TooManyRequests(message, retry_after_s=admission.retry_after_s)
        admission.num_tokens = total
        self._num_tokens += num_tokens

    def add_image_bytes(self, num_bytes: int) -> None:
        """The prompt's images are read. Raises TooManyRequests when they do not fit; the first ones always do."""
        admission = self._admission
        total = admission.num_image_bytes + num_bytes
        if admission.num_image_bytes and total > admission.max_image_bytes:
            message = f"{total} bytes of images would wait for a first token, the limit is {admission.max_image_bytes}."
            raise TooManyRequests(message, retry_after_s=admission.retry_after_s)
        admission.num_image_bytes = total
        self._num_image_bytes += num_bytes

    def leave(self, waited_s: float | None = None) -> None:
        """Leave the queue: each prompt has its first token, after `waited_s`, or the request has ended without it."""
        if self._has_left:
            return
        self._has_left = True
        self._admission.num_requests -= 1
        self._admission.num_tokens -= self._num_tokens
        self._admission.num_image_bytes -= self._num_image_bytes
        if waited_s is not None:
            self._admission.wait_s += 0.2 * (waited_s - self._admission.wait_s)
