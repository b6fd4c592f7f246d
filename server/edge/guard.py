"""The outermost layer of the edge: every limit on what comes in, and the one place where errors become answers.

Plain ASGI: Starlette's BaseHTTPMiddleware hides disconnects. uvicorn limits neither bodies nor the time they take.
"""

import asyncio
import logging
import re
import time
from collections.abc import Mapping
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from secrets import token_hex

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from server.edge.body_memory import Bodies, Body
from server.edge.context import ClientGone, RequestContext, attach_context
from server.edge.dialect import OPENAI, DialectOf
from server.edge.direct_stream import writer_of
from server.edge.headers import check_content, check_fields
from server.edge.hosts import Hosts
from server.edge.keys import Access, KeyKind
from server.edge.lifecycle import Lifecycle
from server.edge.rate_limits import RateLimits
from server.edge.responder import Responder
from server.errors import (
    INTERNAL_MESSAGE,
    DeadlineExceeded,
    HallmarkError,
    InternalError,
    PayloadTooLarge,
    RateLimited,
    RequestTimeout,
    SlowClient,
    TooManyRequests,
)
from server.telemetry.metrics import Metrics
from server.telemetry.outcomes import Outcome, RejectedFor

logger = logging.getLogger(__name__)

_STEP = re.compile(r"(\w+)(\[\d+\])*", re.ASCII)  # of a field's path: its name, and which item
_REQUEST_ID = re.compile(rb"[A-Za-z0-9._:-]{1,128}")


@dataclass(frozen=True, slots=True)
class GuardLimits:
    max_body_bytes: int
    receive_timeout_s: float
    request_timeout_s: float
    send_timeout_s: float = 30.0  # for a reader whose buffers are full


class Guard:
    """ASGI middleware that answers what it refuses by itself, and every error of the application behind it."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        limits: GuardLimits,
        bodies: Bodies,
        access: Access,
        hosts: Hosts,
        metrics: Metrics,
        lifecycle: Lifecycle,
        routes: frozenset[str],
        fields: frozenset[str] = frozenset(),
        rate_limits: RateLimits | None = None,
        root_path: str = "",
        dialect_of: DialectOf = lambda _path, _headers: OPENAI,
    ) -> None:
        """fields      names of requests' fields that a log line may hold: any other one is a client's own text
        root_path   what a proxy puts before every path, and perhaps takes away again; empty for nothing
        dialect_of  the form of errors, by path and headers of a request"""
        self._app = app
        self._limits = limits
        self._bodies = bodies
        self._access = access
        self._hosts = hosts
        self._metrics = metrics
        self._lifecycle = lifecycle
        self._routes = routes
        self._patterns = [_pattern_of(route) for route in routes if "{" in route]
        self._fields = fields
        self._dialect_of = dialect_of
        self._rate_limits = rate_limits or RateLimits()
        self._root_path = root_path

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)  # lifespan; uvicorn runs without websockets
            return
        # Some load balancers probe with HEAD; uvicorn, which has the old scope, leaves out the body.
        if scope["method"] == "HEAD":
            scope = {**scope, "method": "GET"}
        path: str = scope["path"]
        if self._root_path:  # the router takes it away again, once: it must see the path that is checked here
            path = path.removeprefix(self._root_path) if path.startswith(f"{self._root_path}/") else path
            scope = {**scope, "root_path": self._root_path, "path": self._root_path + path}
        headers: dict[bytes, bytes] = dict(scope["headers"])
        task = asyncio.current_task()
        assert task is not None
        unique_id = token_hex(16)
        request_id = _request_id(headers) or f"req-{unique_id}"
        context = RequestContext(request_id, time.monotonic(), task, unique_id, Body(self._bodies), path=path)
        context.dialect = self._dialect_of(path, headers)
        responder = Responder(context, send, self._limits.send_timeout_s, writer_of(scope))
        attach_context(scope, context, responder)
        try:
            async with aclosing(context):
                await self._serve(scope, receive, responder, headers)
        finally:
            self._account(scope, context)

    async def _serve(
        self, scope: Scope, receive: Receive, responder: "Responder", headers: Mapping[bytes, bytes]
    ) -> None:
        context = responder.context
        try:
            try:
                await self._run(scope, receive, responder, headers)
            except (ClientGone, SlowClient):
                raise
            except HallmarkError as error:
                await responder.fail(error)
            except Exception:
                logger.exception("a request failed", extra=context.ids())
                await responder.fail(InternalError(INTERNAL_MESSAGE))
        except ClientGone:
            context.outcome = Outcome.DISCONNECTED
        except SlowClient as error:
            if context.outcome is None:  # else it does not read that we have failed
                context.outcome, context.error_code = Outcome.DISCONNECTED, error.code
            await _hang_up(scope)

    async def _run(
        self, scope: Scope, receive: Receive, responder: "Responder", headers: Mapping[bytes, bytes]
    ) -> None:
        """Raises what ends the request early, also where the cause lies outside of it."""
        context = responder.context
        try:
            self._check_headers(scope, headers, context)
            self._lifecycle.arriving.add(context)
            try:
                await self._read_body(receive, headers, context.body)
            finally:
                self._lifecycle.arriving.discard(context)
            run = self._app if scope["method"] != "POST" else partial(self._run_watched, receive, context)
            await run(scope, _replay(context.body), responder)
        except asyncio.CancelledError:
            if context.aborted_by is None:
                raise
            context.task.uncancel()
            raise context.aborted_by from None

    def _check_headers(self, scope: Scope, headers: Mapping[bytes, bytes], context: RequestContext) -> None:
        check_fields(scope["headers"])
        path = context.path
        is_open = path in self._access.open_paths
        self._hosts.check(headers.get(b"host"), http_version=scope["http_version"], is_open=is_open)
        caller = self._access.check(path, _authorization(headers))
        context.tenant, context.key_name = caller.digest, caller.name
        if self._is_route(path):  # else a client would mend its headers before it learns that nothing is there
            check_content(scope["method"], headers)
        if caller.kind is KeyKind.TENANT and scope["method"] == "POST":
            self._limit(context)

    def _is_route(self, path: str) -> bool:
        return path in self._routes or any(pattern.fullmatch(path) for pattern in self._patterns)

    def _limit(self, context: RequestContext) -> None:
        """Count the request among those of its key. Raises RateLimited."""
        context.quota = self._rate_limits.quota(context.tenant)
        if context.quota is not None:
            try:
                context.quota.enter(context)
            except RateLimited as error:
                reason = RejectedFor.KEY_TOKENS if error.is_of_tokens else RejectedFor.KEY_REQUESTS
                self._metrics.traffic.rejected(reason)
                raise

    async def _read_body(self, receive: Receive, headers: Mapping[bytes, bytes], held: Body) -> None:
        limit = self._limits.max_body_bytes
        length = headers.get(b"content-length", b"0")
        if length.isdigit() and len(length) < 20 and int(length) > limit:
            raise PayloadTooLarge(f"The body may have {limit} bytes, its header says {int(length)}.")
        limit_s = self._limits.receive_timeout_s
        try:
            async with asyncio.timeout(limit_s):
                held.put(await _read_all(receive, limit, held))
        except TooManyRequests:
            self._metrics.traffic.rejected(RejectedFor.QUEUE_BYTES)
            raise
        except TimeoutError:
            raise RequestTimeout(f"The body must arrive within {limit_s:g} s; {held.num_bytes} bytes did.") from None

    async def _run_watched(
        self, theirs: Receive, context: RequestContext, scope: Scope, receive: Receive, send: Send
    ) -> None:
        """While a request that computes runs: its client's going, the deadline and the shutdown can end it."""
        limit_s = self._limits.request_timeout_s
        late = DeadlineExceeded(f"The answer took longer than the {limit_s:g} s a request may take.")
        context.limit(limit_s, late)
        writer, watcher = writer_of(scope), None
        if writer is None:
            watcher = asyncio.create_task(_watch(theirs, context))
        else:
            writer.watch(lambda: context.abort(ClientGone()))
        self._lifecycle.inflight.add(context)
        try:
            await self._app(scope, receive, send)
        finally:
            self._lifecycle.inflight.discard(context)
            context.unlimit()
            if writer is not None:
                writer.unwatch()
            if watcher is not None:
                watcher.cancel()

    def _account(self, scope: Scope, context: RequestContext) -> None:
        outcome = context.outcome or _outcome_of(context.status)
        if context.quota is not None:
            context.quota.leave(context)
        if context.key_name is not None:
            self._metrics.traffic.used(context.key_name, context.num_tokens)
        path = getattr(scope.get("route"), "path", context.path)
        route = path if path in self._routes else "other"
        self._metrics.traffic.answered(route, outcome)
        level = logging.INFO if scope["method"] == "POST" or outcome is Outcome.SERVER_ERROR else logging.DEBUG
        if logger.isEnabledFor(level):
            _log(level, scope["method"], route, context, outcome, known_part(context.error_param, self._fields))
        record = context.record
        if record is not None:
            if outcome is Outcome.DISCONNECTED:
                record.disconnected(is_slow=context.error_code == SlowClient.code)
            record.end(outcome, status=context.status, error_code=context.error_code)


def _pattern_of(route: str) -> re.Pattern[str]:
    """The expression that matches the paths of a route with parameters, `{name}` or `{name:path}`."""
    parts = re.split(r"(\{\w+(?::path)?\})", route)
    texts = [re.escape(part) if i % 2 == 0 else ".+" if ":path" in part else "[^/]+" for i, part in enumerate(parts)]
    return re.compile("".join(texts))


def known_part(param: str | None, fields: frozenset[str]) -> str | None:
    """Return the beginning of a field's path whose names are all known; None where the first is not."""
    known = []
    for step in (param or "").split("."):
        name = _STEP.fullmatch(step)
        if name is None or name[1] not in fields:
            break
        known.append(step)
    return ".".join(known) or None


def _log(level: int, method: str, route: str, context: RequestContext, outcome: Outcome, param: str | None) -> None:
    """Write the line of a request, without looking for the caller's place in the code: 4 us of each request."""
    fields = {
        "status": context.status,
        "outcome": outcome.value,
        "code": context.error_code,
        "key": context.key_name,
        "param": param,
        "ms": round((time.monotonic() - context.arrived_at) * 1000, 1),
        **context.ids(),
    }
    record = context.record
    if record is not None and (uses := record.uses):
        fields["kernels"] = ",".join([f"{use.phase}:{use.path}" for use in uses])
        fields["kernel_status"] = record.kernel_status
    logger.handle(logger.makeRecord(logger.name, level, __file__, 0, "%s %s", (method, route), None, extra=fields))


def _authorization(headers: Mapping[bytes, bytes]) -> bytes | None:
    """The header Authorization, or what it would be: Anthropic's clients send their key as X-Api-Key."""
    key = headers.get(b"x-api-key")
    return headers.get(b"authorization", None if key is None else b"Bearer " + key)


def _request_id(headers: Mapping[bytes, bytes]) -> str:
    """The client's X-Request-Id where it is short and plain, else none."""
    given = headers.get(b"x-request-id", b"")
    return given.decode() if _REQUEST_ID.fullmatch(given) else ""


def _replay(held: Body) -> Receive:
    """A `receive` that gives the whole body once; a second call waits, for disconnects are the guard's to see."""
    is_given = False

    async def receive() -> Message:
        nonlocal is_given
        if is_given:
            await asyncio.get_running_loop().create_future()
        is_given = True
        return {"type": "http.request", "body": held.take(), "more_body": False}

    return receive


async def _read_all(receive: Receive, limit: int, held: Body) -> bytes | bytearray:
    """The whole body; it is copied only where it comes in parts.

    Raises ClientGone, PayloadTooLarge and TooManyRequests.
    """
    body: bytes | bytearray = b""
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGone
        part = message.get("body", b"")
        held.grow(len(part))
        if held.num_bytes > limit:
            raise PayloadTooLarge(f"The body may have {limit} bytes, it has more.")
        if not body:
            body = part
        else:
            body = body if isinstance(body, bytearray) else bytearray(body)
            body += part
        if not message.get("more_body", False):
            return body


async def _watch(receive: Receive, context: RequestContext) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    context.abort(ClientGone())


async def _hang_up(scope: Scope) -> None:
    """End a connection whose client does not read: one that is merely closed lives on until everything is read."""
    writer = writer_of(scope)
    if writer is not None:
        writer.hang_up()
        await asyncio.sleep(0)  # uvicorn hears of it, or it would log that the response was not completed


def _outcome_of(status: int | None) -> Outcome:
    if status is None:
        return Outcome.DISCONNECTED
    if status in (429, 503):
        return Outcome.REJECTED
    if status >= 500:
        return Outcome.SERVER_ERROR
    return Outcome.CLIENT_ERROR if status >= 400 else Outcome.OK
