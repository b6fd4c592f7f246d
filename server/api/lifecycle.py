"""The end of the server: what still runs may finish until a deadline, what comes new is refused."""

import contextlib
from collections.abc import Iterator

from server.api.context import RequestContext
from server.errors import RETRY_AFTER_S, ShuttingDown


class Lifecycle:
    """Serving, then draining. The admin port's requests are here too, from a loop of their own."""

    def __init__(self) -> None:
        self.is_draining = False
        self._arriving: set[RequestContext] = set()
        self._inflight: set[RequestContext] = set()

    @property
    def num_inflight(self) -> int:
        return len(self._inflight)

    @contextlib.contextmanager
    def arriving(self, context: RequestContext) -> Iterator[None]:
        """While a request's body is read. A shutdown does not wait for it: it would be refused."""
        self._arriving.add(context)
        try:
            yield
        finally:
            self._arriving.discard(context)

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

    def abort_arriving(self) -> None:
        """What runs has ended: who is still sending is told to go elsewhere."""
        _abort(self._arriving)

    def abort_all(self) -> None:
        """The deadline has come: every request that still runs is answered with an error."""
        _abort(self._inflight)


def _abort(contexts: set[RequestContext]) -> None:
    for context in list(contexts):
        context.task.get_loop().call_soon_threadsafe(context.abort, shutting_down())


def shutting_down() -> ShuttingDown:
    return ShuttingDown("The server is shutting down; send the request to another one.", retry_after_s=RETRY_AFTER_S)
