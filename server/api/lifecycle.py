"""The end of the server: what still runs may finish until a deadline, what comes new is refused."""

import contextlib
from collections.abc import Iterator

from server.api.context import RequestContext
from server.errors import RETRY_AFTER_S, ShuttingDown


class Lifecycle:
    """Serving, then draining. Touched on the event loop only, but for `begin_drain`, which a signal calls."""

    def __init__(self) -> None:
        self.is_draining = False
        self._inflight: set[RequestContext] = set()

    @property
    def num_inflight(self) -> int:
        return len(self._inflight)

    @contextlib.contextmanager
    def inflight(self, context: RequestContext) -> Iterator[None]:
        self._inflight.add(context)
        try:
            yield
        finally:
            self._inflight.discard(context)

    def begin_drain(self) -> None:
        self.is_draining = True

    def check_open(self) -> None:
        """Raises ShuttingDown while draining."""
        if self.is_draining:
            raise shutting_down()

    def abort_all(self) -> None:
        """The deadline has come: every request that still runs is answered with an error."""
        for context in self._inflight:
            context.abort(shutting_down())


def shutting_down() -> ShuttingDown:
    return ShuttingDown("The server is shutting down; send the request to another one.", retry_after_s=RETRY_AFTER_S)
