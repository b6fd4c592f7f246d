"""The end of the server: what still runs may finish until a deadline, what comes new is refused."""

from server.edge.context import RequestContext
from server.errors import RETRY_AFTER_S, ShuttingDown


class Lifecycle:
    """Serving, then draining. The admin port's requests are here too, from a loop of their own."""

    def __init__(self) -> None:
        self.is_draining = False
        self.arriving: set[RequestContext] = set()  # whose body is read: a shutdown does not wait for them
        self.inflight: set[RequestContext] = set()

    @property
    def num_inflight(self) -> int:
        return len(self.inflight)

    def begin_drain(self) -> None:
        self.is_draining = True

    def check_open(self) -> None:
        """Raises ShuttingDown while draining."""
        if self.is_draining:
            raise shutting_down()

    def abort_arriving(self) -> None:
        """Refuse the requests whose body is still being read; all that run have ended."""
        _abort(self.arriving)

    def abort_all(self) -> None:
        """The deadline has come: every request that still runs is answered with an error."""
        _abort(self.inflight)


def _abort(contexts: set[RequestContext]) -> None:
    for context in list(contexts):
        context.task.get_loop().call_soon_threadsafe(context.abort, shutting_down())


def shutting_down() -> ShuttingDown:
    return ShuttingDown("The server is shutting down; send the request to another one.", retry_after_s=RETRY_AFTER_S)
