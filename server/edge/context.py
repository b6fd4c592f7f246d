"""The state of one HTTP request while it is served, shared by the guard, the handlers and the shutdown."""

import asyncio
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from dataclasses import dataclass, field
from typing import TypeVar

from starlette.types import Scope, Send

from server.edge.body_memory import Body
from server.edge.dialect import OPENAI, Dialect
from server.edge.rate_limits import Quota
from server.telemetry.outcomes import Outcome
from server.telemetry.request import RequestRecord

_SCOPE_KEY = "hallmark"
EnteredT = TypeVar("EnteredT")


class ClientGone(Exception):
    """The client has closed its connection and gets no answer."""


@dataclass(slots=True, eq=False)
class RequestContext:
    """State of one request, made by the guard."""

    request_id: str  # as the client named it, not unique
    arrived_at: float  # monotonic seconds
    task: "asyncio.Task[object]"
    unique_id: str
    body: Body
    dialect: Dialect = OPENAI  # of its client
    exits: AsyncExitStack = field(default_factory=AsyncExitStack)  # what is left or closed when it ends, the last first
    path: str = ""  # behind the root path
    tenant: bytes = b""  # digest of its key; empty where none is needed
    key_name: str | None = None  # of its key
    quota: Quota | None = None  # of its key
    record: RequestRecord | None = None  # of a request that generates
    name_kernels: Callable[[bytes], bytes] | None = None  # adds the kernels to an answer; None where unasked
    status: int | None = None  # of the response, once it has begun
    is_event_stream: bool = False
    is_answered: bool = False  # the last byte of the response is on its way
    aborted_by: Exception | None = None
    outcome: Outcome | None = None
    error_code: str | None = None
    error_param: str | None = None  # the field that is to blame
    _timer: asyncio.TimerHandle | None = None

    @property
    def num_tokens(self) -> int:
        """Tokens of prompts and answers so far."""
        return 0 if self.record is None else self.record.num_prompt_tokens + self.record.num_tokens

    async def enter(self, manager: AbstractAsyncContextManager[EnteredT]) -> EnteredT:
        """Enter `manager` now, and leave it when the request ends: a response is written behind its handler."""
        return await self.exits.enter_async_context(manager)

    async def aclose(self) -> None:
        """Clean up, however the request has ended."""
        self.body.drop()
        await self.exits.aclose()

    def ids(self) -> dict[str, str]:
        """Ids that find this request in the logs, in an error and in the traces."""
        trace = {} if self.record is None else {"trace_id": self.record.trace.trace_id}
        return {"request_id": self.request_id, **trace}

    def limit(self, left_s: float, error: Exception) -> None:
        """End the request with `error` in `left_s` seconds, in place of the limit before."""
        self.unlimit()
        self._timer = asyncio.get_running_loop().call_later(max(0.0, left_s), self.abort, error)

    def unlimit(self) -> None:
        """Call this when the request has run: what is left to do is not ended."""
        if self._timer is not None:
            self._timer.cancel()

    def abort(self, error: Exception) -> None:
        """End the request from outside its task; the guard answers with `error`, or with nothing for ClientGone."""
        if self.aborted_by is None and not self.is_answered:
            self.aborted_by = error
            self.task.cancel()


def attach_context(scope: Scope, context: RequestContext, send: Send) -> None:
    """`send`: of the guard, past what frameworks put around it."""
    scope[_SCOPE_KEY] = context, send


def context_of(scope: Scope) -> RequestContext:
    context: RequestContext = scope[_SCOPE_KEY][0]
    return context


def send_of(scope: Scope) -> Send:
    send: Send = scope[_SCOPE_KEY][1]
    return send
