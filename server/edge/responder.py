"""The answer to a request, also where it fails."""

import asyncio

from starlette.types import Message, Send

from server.edge.context import RequestContext
from server.edge.direct_stream import ChunkWriter
from server.errors import (
    HallmarkError,
    HeadersTooLarge,
    MethodNotAllowed,
    PayloadTooLarge,
    RequestTimeout,
    SlowClient,
    TimeLimitReached,
    Unauthorized,
)
from server.telemetry.outcomes import Outcome
from server.telemetry.request import RequestRecord


class Responder:
    """`send` with the request's id in the headers, a limit on slow readers, and a way to answer with an error."""

    def __init__(self, context: RequestContext, send: Send, timeout_s: float, writer: ChunkWriter | None) -> None:
        """`writer`: of the same connection; None where another server than ours has made it."""
        self.context = context
        self._send = send
        self._timeout_s = timeout_s
        self._writer = writer

    async def __call__(self, message: Message) -> None:
        context = self.context
        if message["type"] == "http.response.start":
            context.status = message["status"]
            request_id = context.request_id.encode()
            headers = [*message.get("headers", ()), *((name, request_id) for name in context.dialect.id_headers)]
            if context.record is not None:
                headers.append((b"traceparent", context.record.trace.traceparent.encode()))
                if context.status == 200 or context.record.kernel_status is not None:
                    headers += _kernel_headers(context.record)
            if context.quota is not None:
                headers += context.quota.headers()
            context.is_event_stream = any(value.startswith(b"text/event-stream") for _, value in headers)
            message = {**message, "headers": headers}
        elif not message.get("more_body", False):
            context.is_answered = True
        if self._writer is not None and self._writer.has_room():
            await self._send(message)  # without waiting, so that it needs no timer
            return
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._send(message)
        except TimeoutError:
            raise SlowClient(f"The client read nothing for {self._timeout_s:g} s.") from None

    async def fail(self, error: HallmarkError) -> None:
        """Answer with `error`; as an event where the response has begun as a stream of them."""
        context = self.context
        context.error_code, context.error_param = error.code, error.param
        if context.is_answered:
            return
        if context.status is None:
            body = self._with_kernels(context.dialect.envelope(error, context.ids()))
            await self({"type": "http.response.start", "status": error.status, "headers": _headers(error, body)})
            await self({"type": "http.response.body", "body": body})
            return
        context.outcome = Outcome.CLIENT_ERROR if isinstance(error, TimeLimitReached) else Outcome.SERVER_ERROR
        if context.is_event_stream:
            event = self._with_kernels(context.dialect.event(error, context.ids()))
            await self({"type": "http.response.body", "body": event})

    def _with_kernels(self, answer: bytes) -> bytes:
        """Add to an error, where the request asks for it, the kernels that had served it."""
        context = self.context
        has_kernels = context.record is not None and context.record.kernel_status is not None
        return context.name_kernels(answer) if has_kernels and context.name_kernels is not None else answer


def _kernel_headers(record: RequestRecord) -> list[tuple[bytes, bytes]]:
    """Return the headers of an answer: how well its kernels are proven, by which matrix, and its receipt's digest."""
    status = record.kernel_status
    proof = [] if status is None else [(b"x-hallmark-status", status.encode())]
    if record.layers is not None:
        proof.append((b"x-hallmark-layers", record.layers.value.encode()))
    found = [*proof, (b"x-hallmark-plan", (record.matrix_digest or "none").encode())]
    if record.receipt_digest is not None:  # a stream's receipt comes when its head has been sent
        found.append((b"x-hallmark-receipt", f"sha256:{record.receipt_digest}".encode()))
    return found


def _headers(error: HallmarkError, body: bytes) -> list[tuple[bytes, bytes]]:
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    if error.retry_after_s is not None:
        headers.append((b"retry-after", str(error.retry_after_s).encode()))
    if isinstance(error, TimeLimitReached):
        headers.append((b"x-should-retry", b"false"))
    if isinstance(error, Unauthorized):
        headers.append((b"www-authenticate", b"Bearer"))
    if isinstance(error, MethodNotAllowed):
        headers.append((b"allow", error.allowed.encode()))
    if isinstance(error, PayloadTooLarge | RequestTimeout | HeadersTooLarge):
        headers.append((b"connection", b"close"))  # what is left of the request is not worth reading
    return headers
