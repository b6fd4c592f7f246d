"""Replica around the application: ready only with its engine, and requests held while that restarts."""

import asyncio
import time
from collections.abc import Callable

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from server.errors import StartError
from server.http.operations.health import why_not_alive, why_not_ready
from server.http.services import Services
from server.supervisor.client import EngineState

REPLICA_HEADER = b"x-hallmark-replica"  # on every answer of a replica: what comes without it is Ray's own
_POLL_S = 0.02  # between two looks at the engine's state; a restart takes seconds
_COMING = (EngineState.STARTING, EngineState.RESTARTING)


class Replica:
    """ASGI middleware around the whole application, guard included.

    Start-up completes when the engine is ready, or refuses for good: Ray sends requests from then on. A POST that
    comes while the engine restarts waits. Answered with 503 at once it would make this replica's queue the shortest,
    and Ray would send it nearly everything that comes.
    """

    def __init__(self, app: ASGIApp, services: Services, *, name: str, hold_s: float) -> None:
        """`name` goes into the header x-hallmark-replica. `hold_s`: how long a request waits at most."""
        self._app = app
        self._services = services
        self._name = name.encode()
        self._hold_s = hold_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, self._ready_only(send))
            return
        if scope["type"] == "http" and scope["method"] == "POST":
            await self._engine_comes(self._hold_s)

        async def send_named(message: Message) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message.get("headers", ()), (REPLICA_HEADER, self._name)]}
            await send(message)

        await self._app(scope, receive, send_named)

    def _ready_only(self, send: Send) -> Send:
        async def send_when_ready(message: Message) -> None:
            if message["type"] == "lifespan.startup.complete":
                await self._engine_comes(None)
            await send(message)

        return send_when_ready

    async def _engine_comes(self, limit_s: float | None) -> None:
        """Return when the engine is ready, when nothing is to be waited for, or after the limit."""
        due = None if limit_s is None else time.monotonic() + limit_s
        while self._is_coming() and (due is None or time.monotonic() < due):
            await asyncio.sleep(_POLL_S)

    def _is_coming(self) -> bool:
        engine = self._services.engine
        can_still_come = engine.state is EngineState.REFUSED and engine.refused is not None
        return engine.state in _COMING or (can_still_come and not engine.refused.is_final)


class Health:
    """Health for Ray, by /livez and /readyz: whether this replica is to be replaced."""

    def __init__(
        self, services: Services, *, replace_after_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`replace_after_s`: how long the engine may be unready. `clock` is monotonic, in seconds."""
        self._services = services
        self._replace_after_s = replace_after_s
        self._clock = clock
        self._ready_at = clock()  # when it was last seen ready

    def check(self) -> None:
        """Raises StartError, which says why, where the replica makes no progress, or has not been ready for too long.

        An engine that died is restarted by its supervisor, which is sooner than a new replica.
        """
        now, refused = self._clock(), self._services.engine.refused
        if refused is not None and refused.is_final:
            raise StartError(refused.message)
        if reasons := why_not_alive(self._services):
            raise StartError("; ".join(reasons))
        reasons = why_not_ready(self._services)
        if not reasons:
            self._ready_at = now
        elif now - self._ready_at > self._replace_after_s:
            silence = f"not ready for {now - self._ready_at:.0f} s, the limit is {self._replace_after_s:g} s"
            raise StartError(f"{silence}: {'; '.join(reasons)}")
