"""The way into the queue and out of it, for every route that generates: trace, queue, parse, tokenize, admit."""

import re
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from fastapi import Request

from server.edge.admission import Place
from server.edge.context import RequestContext, context_of
from server.errors import (
    DeadlyPrompt,
    EngineDied,
    InvalidGrammar,
    ModelNotFound,
    NonFiniteLogits,
    NotReady,
    PromptTooLong,
    RateLimited,
    SlowClient,
    TimeLimitReached,
    TooManyRequests,
)
from server.http.common.json_body import MAX_VALUES
from server.http.generation.prepared import Job, Prepared
from server.http.generation.receipt import ReceiptDraft, receipts_for, seeded
from server.http.images.preparing import with_images
from server.http.images.source import RequestImages
from server.http.services import Services
from server.protocol.messages import EngineReady
from server.telemetry.outcomes import RejectedFor
from server.telemetry.request import RequestRecord

INLINE_BODY_BYTES = 4096  # below this, parsing and tokenizing take less time than a hop to a thread
# Parsing token ids holds the interpreter's lock, so that in a thread it stops the event loop as well, and later.
INLINE_IDS_BYTES = 256 * 1024  # some 40k ids, 2 ms
# Of an answer, of its key's tokens a minute, while it is computed. Few answers are longer, and a request that leaves
# max_tokens open would reserve a whole context; a longer answer counts in full as it is computed.
RESERVED_TOKENS = 4096
_HAS_IDS = re.compile(rb'"prompt"\s*:\s*\[\s*\d')


GENERATION_ERRORS = (
    *(ModelNotFound, PromptTooLong, InvalidGrammar, DeadlyPrompt),
    *(NotReady, EngineDied, NonFiniteLogits, SlowClient),
)

FieldsT = TypeVar("FieldsT")
# From a body's object, and the images of it that have been read. Raises ImagesNeeded where others are to be.
Prepare = Callable[[EngineReady, dict[str, Any], RequestImages], Prepared[FieldsT]]


@dataclass(frozen=True, slots=True)
class Admitted(Generic[FieldsT]):
    """A request that has its tokens and its place in the queue."""

    services: Services
    context: RequestContext
    record: RequestRecord
    place: Place
    prepared: Prepared[FieldsT]
    receipt: ReceiptDraft | None = None  # where it gets one


@asynccontextmanager
async def admitted(
    services: Services, request: Request, *, route: str, operation: str, prepare: Prepare[FieldsT]
) -> AsyncIterator[Admitted[FieldsT]]:
    """Take a request as far as the queue, behind the guard, and out of the queue when it ends.

    route      its path, for the trace
    operation  its name in the terms of the GenAI conventions
    prepare    validates the parsed body and tokenizes it
    Raises what refuses it: NotReady, TooManyRequests and all that parsing and `prepare` raise.
    """
    context = context_of(request.scope)
    record = _record(services, request, context, route, operation)
    ready = services.require_ready()
    place = _enter(services)
    try:
        began_at = time.monotonic()
        prepared = seeded(services, await _prepare(services, ready, context, prepare))
        for grammar in {it for job in prepared.jobs if (it := job.sampling.grammar) is not None}:
            await services.check_grammar(ready, grammar)
        record.tokenized(began_at)
        num_prompt_tokens = prepared.num_prompt_tokens
        _reserve(services, place, num_prompt_tokens, prepared.num_image_bytes)
        if prepared.timeout_s is not None and prepared.timeout_s < services.settings.request_timeout_s:
            message = f"The answer took longer than the {prepared.timeout_s:g} s of the field 'timeout'."
            left_s = context.arrived_at + prepared.timeout_s - time.monotonic()
            context.limit(left_s, TimeLimitReached(message, param="timeout"))
        await _start(services, context, num_prompt_tokens, prepared.jobs)
        record.describe(
            prepared.jobs[0].sampling,
            matrix_digest=ready.matrix_digest,
            layers=ready.layers.status,
            is_stream=prepared.is_stream,
        )
        receipts = receipts_for(services, prepared)
        receipt = None if receipts is None else ReceiptDraft(services, receipts, record, prepared, context.unique_id)
        yield Admitted(services, context, record, place, prepared, receipt)
    finally:
        place.leave()


async def _prepare(
    services: Services, ready: EngineReady, context: RequestContext, prepare: Prepare[FieldsT]
) -> Prepared[FieldsT]:
    """Parse, validate and tokenize a request's body; a large text off the event loop, which other streams wait for."""
    body = context.body.take()
    is_inline = len(body) <= INLINE_BODY_BYTES or (len(body) <= INLINE_IDS_BYTES and _HAS_IDS.search(body) is not None)
    most = max(MAX_VALUES, ready.max_model_len + 1000)
    work = with_images(services.images, body, most, lambda it, images: prepare(ready, it, images), is_inline=is_inline)
    del body
    prepared = await work
    context.body.drop()
    return prepared


def _record(services: Services, request: Request, context: RequestContext, route: str, operation: str) -> RequestRecord:
    """Begin the request's trace and its measurements; the guard ends them."""
    parents = [value for name, value in request.scope["headers"] if name == b"traceparent"]
    known = {"traceparent": parents[-1].decode("latin-1")} if parents else {}
    metrics, tracing = services.telemetry.metrics, services.telemetry.tracing
    trace = tracing.begin("POST", route, known, request_id=context.request_id, arrived_at=context.arrived_at)
    context.record = RequestRecord(metrics, trace, context.unique_id, operation=operation)
    return context.record


def _enter(services: Services) -> Place:
    try:
        return services.admission.enter()
    except TooManyRequests:
        services.telemetry.metrics.traffic.rejected(RejectedFor.QUEUE_REQUESTS)
        raise


async def _start(services: Services, context: RequestContext, num_prompt_tokens: int, jobs: list[Job]) -> None:
    """Wait for the tokens of the request's key. Raises RateLimited where it has used them up."""
    if context.quota is None:
        return
    num_new = sum(min(job.sampling.max_tokens, RESERVED_TOKENS) for job in jobs)
    try:
        await context.quota.start(context, num_prompt_tokens + num_new)
    except RateLimited:
        services.telemetry.metrics.traffic.rejected(RejectedFor.KEY_TOKENS)
        raise


def _reserve(services: Services, place: Place, num_tokens: int, num_image_bytes: int) -> None:
    reason = RejectedFor.QUEUE_TOKENS
    try:
        place.add_tokens(num_tokens)
        reason = RejectedFor.QUEUE_BYTES
        place.add_image_bytes(num_image_bytes)
    except TooManyRequests:
        services.telemetry.metrics.traffic.rejected(reason)
        raise
