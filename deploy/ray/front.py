"""Front of Ray's proxy, in its process: nothing is lost with a replica, and our own server's limits hold.

Ray's proxy loads it where RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH is `deploy.ray.front:middlewares`; `up.py` sets it.

A replica that is killed takes its requests along. What has not begun to be answered is run again, on another replica;
a stream that has begun ends with an error event, as it does where only the engine dies. A request that was on a
replica or engine that died is run again MAX_RERUNS times: one that kills engines must not go through all of them.
"""

import asyncio
import logging
import os
import re
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from secrets import token_hex
from typing import Any

import msgspec
from starlette.middleware import Middleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from deploy.ray.affinity import key_of
from deploy.ray.replica import REPLICA_HEADER
from server.edge.body_memory import Bodies, Body
from server.edge.dialect import OPENAI, Dialect
from server.edge.headers import check_fields
from server.errors import (
    RETRY_AFTER_S,
    DeadlineExceeded,
    EngineDied,
    HallmarkError,
    NotReady,
    PayloadTooLarge,
    RequestError,
    RequestTimeout,
    TooManyRequests,
)
from server.http.anthropic import routes as anthropic
from server.http.anthropic.errors import ANTHROPIC
from server.http.generation.event_stream import named_event
from server.http.responses.answer import failed_events
from server.http.responses.routes import RESPONSES
from server.settings import read_settings

logger = logging.getLogger("ray.serve")  # Ray's own file of the proxy's log

MAX_RERUNS = 2
_DIALECTS = {anthropic.MESSAGES: ANTHROPIC, anthropic.COUNT_TOKENS: ANTHROPIC}
_RAYS_PATHS = "/-/"
_REQUEST_ID = re.compile(rb"[A-Za-z0-9._:-]{1,128}")  # as the server takes it
_SESSION = b"x-session-id"  # by it Ray's router chooses a replica
# With these a client could choose a replica, or let what it has left be computed to the end.
_RAYS_HEADERS = {
    b"serve_multiplexed_model_id",
    b"x_session_id",
    b"x_request_timeout_seconds",
    b"x_request_disconnect_disabled",
}


class LengthRequired(RequestError):
    """The body has no length."""

    status = 411
    code = "length_required"


@dataclass(frozen=True, slots=True)
class FrontLimits:
    max_body_bytes: int
    max_queued_bytes: int
    receive_timeout_s: float
    send_timeout_s: float = 30.0  # for a reader whose buffers are full
    retry_for_s: float = 60.0  # what a replica refuses because it is not ready, or ending
    pauses_s: tuple[float, float] = (0.05, 1.0)  # before another try: the first, and the longest


def middlewares() -> list[Middleware]:
    """Ray's proxy calls this once. The limits are HALLMARK_* variables of the cluster, or the server's defaults."""
    settings = read_settings({}, os.environ)
    limits = FrontLimits(settings.max_body_bytes, settings.max_queued_bytes, settings.receive_timeout_s)
    return [Middleware(Front, limits=limits)]


class Front:
    """ASGI middleware around Ray's proxy."""

    def __init__(self, app: ASGIApp, *, limits: FrontLimits) -> None:
        self._app = app
        self._limits = limits
        self._bodies = Bodies(limits.max_queued_bytes)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":
            await receive()
            await send({"type": "websocket.close", "code": 1000})  # nothing here speaks it
            return
        if scope["type"] != "http" or scope["path"].startswith(_RAYS_PATHS):
            await self._app(scope, receive, send)
            return
        scope = _with_id(scope)
        client = _Client(receive, send, self._limits.send_timeout_s)
        body = Body(self._bodies)
        try:
            await self._serve(scope, client, body)
        except HallmarkError as error:
            await _fail(client, _DIALECTS.get(scope["path"], OPENAI), error, _ids(scope))
        finally:
            body.drop()

    async def _serve(self, scope: Scope, client: "_Client", held: Body) -> None:
        """Raises what is refused here."""
        check_fields(scope["headers"])
        headers: dict[bytes, bytes] = dict(scope["headers"])
        if b"transfer-encoding" in headers:
            # uvicorn, in Ray's proxy, adds the trailers of a chunked body to the headers: they would pass for some.
            raise LengthRequired("Send the header Content-Length; a chunked body is not taken here.")
        body = await self._read(client, headers, held)
        if client.has_gone:
            return
        key = key_of(body, headers) if scope["method"] == "POST" else None
        fields = [field for field in scope["headers"] if field[0].lower().replace(b"-", b"_") not in _RAYS_HEADERS]
        if key is not None:
            fields.append((_SESSION, key.encode()))
        await self._answer({**scope, "headers": fields}, client, body)

    async def _read(self, client: "_Client", headers: Mapping[bytes, bytes], held: Body) -> bytes:
        limit, limit_s = self._limits.max_body_bytes, self._limits.receive_timeout_s
        length = headers.get(b"content-length", b"0")
        if length.isdigit() and len(length) < 20 and int(length) > limit:
            raise PayloadTooLarge(f"The body may have {limit} bytes, its header says {int(length)}.")
        parts: list[bytes] = []
        try:
            async with asyncio.timeout(limit_s):
                while True:
                    message = await client.receive()
                    if message["type"] == "http.disconnect":
                        return b""
                    parts.append(message.get("body", b""))
                    held.grow(len(parts[-1]))
                    if held.num_bytes > limit:
                        raise PayloadTooLarge(f"The body may have {limit} bytes, it has more.")
                    if not message.get("more_body", False):
                        return parts[0] if len(parts) == 1 else b"".join(parts)
        except TimeoutError:
            raise RequestTimeout(f"The body must arrive within {limit_s:g} s; {held.num_bytes} bytes did.") from None

    async def _answer(self, scope: Scope, client: "_Client", body: bytes) -> None:
        """Run the request until it is answered. Raises what has become of it where it has no answer."""
        dialect, ids = _DIALECTS.get(scope["path"], OPENAI), _ids(scope)
        due, pause_s, num_reruns = time.monotonic() + self._limits.retry_for_s, self._limits.pauses_s[0], 0
        while True:
            answer = _Answer(client)
            # A copy of the headers: Ray adds the request's id to them.
            await self._app({**scope, "headers": list(scope["headers"])}, client.replay(body), answer)
            if client.has_gone or answer.is_ended:
                return
            if answer.is_begun:
                logger.warning("a replica died during the stream of request %s", ids["request_id"])
                end = _failed_response(answer, ids) if scope["path"] == RESPONSES else dialect.event(_died(), ids)
                await client.send(_last(b"\n\n" * (not answer.is_between_events) + end))
                return
            code = answer.code
            is_death = code in (None, EngineDied.code)
            if is_death and num_reruns < MAX_RERUNS:
                num_reruns += 1
            elif is_death or code not in ("not_ready", "shutting_down") or time.monotonic() > due:
                if not answer.is_whole:
                    raise _died()
                await answer.release()
                return
            logger.warning("request %s is run again: %s", ids["request_id"], code or "its replica died")
            # Its own replica has lost what it had computed, or is not ready: the least loaded one is better.
            scope = {**scope, "headers": [field for field in scope["headers"] if field[0] != _SESSION]}
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, self._limits.pauses_s[1])


class _Client:
    """The connection, as far as it is still there."""

    def __init__(self, receive: Receive, send: Send, send_timeout_s: float) -> None:
        self.has_gone = False
        self.receive = receive
        self._send = send
        self._send_timeout_s = send_timeout_s
        self._is_stuck = asyncio.Event()  # it reads nothing

    async def send(self, message: Message) -> None:
        if self.has_gone:
            return
        try:
            async with asyncio.timeout(self._send_timeout_s):
                await self._send(message)
        except TimeoutError:
            self.has_gone = True
            self._is_stuck.set()  # Ray hears that the client has gone, and ends the request

    def replay(self, body: bytes) -> Receive:
        """A `receive` that gives the body once more, and then waits for the client's going."""
        is_given = False

        async def receive() -> Message:
            nonlocal is_given
            if not is_given:
                is_given = True
                return {"type": "http.request", "body": body, "more_body": False}
            waits = [asyncio.ensure_future(self._wait_gone()), asyncio.ensure_future(self._is_stuck.wait())]
            try:
                await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for each in waits:
                    each.cancel()
            self.has_gone = True
            return {"type": "http.disconnect"}

        return receive

    async def _wait_gone(self) -> None:
        while (await self.receive())["type"] != "http.disconnect":
            pass


class _Answer:
    """`send` of one run. A stream passes from its first event on; anything else is held until it is whole."""

    def __init__(self, client: _Client) -> None:
        self._client = client
        self._held: list[Message] = []
        self._start: Message | None = None
        self.is_begun = False  # the client has some of it
        self.is_whole = False  # what is held has its end
        self.is_ended = False  # the client has all of it
        self.is_between_events = True
        self.begin = b""  # the first events of a stream
        self.num_events = 0  # that are whole

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._start = {**message, "headers": _without_doubles(message.get("headers", ()))}
            self._held = [self._start]
            return
        is_last = not message.get("more_body", False)
        if message.get("body"):
            self.is_between_events = message["body"].endswith(b"\n\n")
            self.begin = self.begin or message["body"]
            self.num_events += message["body"].count(b"\n\n")
        if self.is_begun:
            self.is_ended = is_last
            await self._client.send(message)
            return
        self._held.append(message)
        self.is_whole = is_last
        if self._is_stream and message.get("body"):
            self.is_begun = True
            await self.release()
        elif is_last and self.code == "" and self._rays_refusal is None:
            await self.release()

    @property
    def _is_stream(self) -> bool:
        headers = [] if self._start is None else self._start["headers"]
        return any(name == b"content-type" and value.startswith(b"text/event-stream") for name, value in headers)

    @property
    def code(self) -> str | None:
        """The code of a refusal that might not last; empty for any other answer, None where there is no whole one."""
        if self._start is None or not self.is_whole:
            return None
        if self._start["status"] != 503:
            return ""
        body = b"".join(message.get("body", b"") for message in self._held[1:])
        with suppress(msgspec.DecodeError):
            return msgspec.json.decode(body, type=_Refusal).error.code
        return ""

    @property
    def _rays_refusal(self) -> HallmarkError | None:
        """The error in place of what Ray says by itself, which is plain text; None for an answer of a replica."""
        if self._start is None or any(name == REPLICA_HEADER for name, _ in self._start["headers"]):
            return None
        return _OF_RAY[self._start["status"]]() if self._start["status"] in _OF_RAY else None

    async def release(self) -> None:
        """Send what is held. Raises what stands for a refusal of Ray's own: not while Ray runs."""
        if (refusal := self._rays_refusal) is not None:
            raise refusal
        held, self._held = self._held, []
        self.is_ended = self.is_whole
        for message in held:
            await self._client.send(message)


class _Code(msgspec.Struct):
    code: str = ""


class _Refusal(msgspec.Struct):
    """An error in OpenAI's envelope or Anthropic's."""

    error: _Code


_OF_RAY: dict[int, Callable[[], HallmarkError]] = {
    404: lambda: NotReady("No replica serves here yet, or none any more.", retry_after_s=RETRY_AFTER_S),
    408: lambda: DeadlineExceeded("The answer took longer than request_timeout_s of Ray Serve."),
    429: lambda: TooManyRequests("All replicas are busy and the queue is full.", retry_after_s=RETRY_AFTER_S),
    503: lambda: NotReady("No replica can take the request, or the queue is full.", retry_after_s=RETRY_AFTER_S),
}


class _Created(msgspec.Struct):
    """The data of the first event of a stream of /v1/responses, which has the whole response so far."""

    response: dict[str, Any]


def _failed_response(answer: _Answer, ids: Mapping[str, str]) -> bytes:
    """The last events of a stream of /v1/responses, numbered on: its clients read no others."""
    data = answer.begin.partition(b"data: ")[2].partition(b"\n")[0]
    created = msgspec.json.decode(data, type=_Created)
    events = enumerate(failed_events(created.response, _died(), ids), start=answer.num_events)
    return b"".join(named_event({**event, "sequence_number": number}) for number, event in events)


def _died() -> EngineDied:
    return EngineDied("The replica died while it served this request.", retry_after_s=RETRY_AFTER_S)


async def _fail(client: _Client, dialect: Dialect, error: HallmarkError, ids: Mapping[str, str]) -> None:
    body = dialect.envelope(error, ids)
    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
    headers += [(name, ids["request_id"].encode("latin-1")) for name in dialect.id_headers]
    if error.retry_after_s is not None:
        headers.append((b"retry-after", b"%d" % error.retry_after_s))
    if isinstance(error, RequestError):
        headers.append((b"connection", b"close"))  # what is left of the request is not worth reading
    await client.send({"type": "http.response.start", "status": error.status, "headers": headers})
    await client.send(_last(body))


def _last(body: bytes) -> Message:
    return {"type": "http.response.body", "body": body, "more_body": False}


def _with_id(scope: Scope) -> Scope:
    """Name the request, where its client has not: the same id is in Ray's log, the replica's and the answer."""
    others = [field for field in scope["headers"] if field[0] != b"x-request-id"]
    given = dict(scope["headers"]).get(b"x-request-id", b"")
    unique = b"req-" + token_hex(16).encode()
    return {**scope, "headers": [*others, (b"x-request-id", given if _REQUEST_ID.fullmatch(given) else unique)]}


def _ids(scope: Scope) -> dict[str, str]:
    return {"request_id": dict(scope["headers"])[b"x-request-id"].decode("latin-1")}


def _without_doubles(headers: list[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
    """Drop the second X-Request-Id, which Ray adds behind the replica's."""
    seen: set[bytes] = set()
    kept = []
    for name, value in headers:
        if name.lower() != b"x-request-id" or b"x-request-id" not in seen:
            kept.append((bytes(name), bytes(value)))
        seen.add(name.lower())
    return kept
