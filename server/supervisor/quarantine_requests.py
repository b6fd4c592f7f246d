"""The API process's side of operators' orders: what is out of service, across the lives of engines."""

from collections.abc import Callable, Iterable

from server.protocol.messages import Overridden, Override
from server.supervisor.requests import Replies

_TIMEOUT_S = 30.0  # an order waits for the step under way


class Orders:
    """Of one engine after the other. They end with this process: a restarted server decides by its evidence again."""

    def __init__(self, send: Callable[[Override], None]) -> None:
        self._send = send
        self.overridden: list[tuple[str, str]] = []  # (path, shape) pairs, as the engine last confirmed them
        self._replies: Replies[Overridden] = Replies()

    async def give(
        self,
        *,
        take_out: Iterable[tuple[str, str]] = (),
        lift: Iterable[tuple[str, str]] = (),
        timeout_s: float = _TIMEOUT_S,
    ) -> Overridden | None:
        """Have (path, shape) pairs taken out of service, or lifted. None when no answer comes in time."""
        out, back = list(take_out), list(lift)
        return await self._replies.ask(lambda number: self._send(Override(number, out, back)), timeout_s)

    def put(self, answer: Overridden) -> None:
        """What the engine made of an order."""
        self.overridden = answer.overridden
        self._replies.put(answer, answer.order)

    def give_up(self) -> None:
        """The engine is gone: who waits for its answer gets none."""
        self._replies.put(None)
