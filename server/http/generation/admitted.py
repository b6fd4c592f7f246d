"""The steps that every route that generates shares: trace, queue, parse and tokenize, admit, generate."""

import re
import time
from collections.abc import AsyncGenerator, Callable
from typing import Any, Generic, TypeVar

from fastapi import Request
from starlette.types import Scope

from server.edge.admission import Place
from server.edge.body_memory import in_thread
from server.edge.context import RequestContext, context_of
from server.edge.direct_stream import DirectStream
from server.edge.keys import cache_salt_of
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
from server.http.common.json_body import MAX_VALUES, parse_json
from server.http.common.provenance import Namer, is_wanted, provenance_of, unnamed, with_provenance
from server.http.generation.pieces import Piece, merged, pieces
from server.http.generation.prepared import Job, Prepared
from server.http.services import Services
from server.protocol.messages import EngineReady
from server.supervisor.choices import Choices
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
Prepare = Callable[[EngineReady, dict[str, Any], RequestContext], Prepared[FieldsT]]  # from a body's object


class Admitted(Generic[FieldsT]):
    """A request that has its tokens and its place in the queue; `answer` computes it."""

    def __init__(
        self,
        services: Services,
        context: RequestContext,
        record: RequestRecord,
        place: Place,
        prepared: Prepared[FieldsT],
    ) -> None:
        self.services = services
        self.context = context
        self.record = record
        self.prepared = prepared
        self._place = place

    def namer(self, scope: Scope, field: bool) -> Namer:
        """Return what adds the kernels to the answer, as errors of this request have them from here on.

        field  whether its body asks for them. Raises InvalidHeader.
        """
        if not is_wanted(scope, field):
            return unnamed

        def name(answer: bytes) -> bytes:
            return with_provenance(answer, provenance_of(self.record, self.services.engine.attestations))

        self.context.name_kernels = name
        return name

    def answer(self, direct: DirectStream | None = None) -> AsyncGenerator[Piece]:
        """The pieces of all answers but for what goes to the `direct` stream, which there is for one answer only.

        They are closed, and what the engine still computes is cancelled, when the request ends.
        """
        services, record, jobs = self.services, self.record, self.prepared.jobs
        salt = cache_salt_of(self.context.tenant, self.prepared.cache_salt)
        num_waiting = len(jobs)

        def began() -> None:
            nonlocal num_waiting
            num_waiting -= 1
            if not num_waiting:
                self._place.leave(time.monotonic() - record.arrived_at)

        choices = {index: Choices(count) for index, count in self.prepared.num_choices.items()}
        records = [
            record.sequence(len(job.prompt_token_ids), is_first=is_first)
            for job, is_first in zip(jobs, self.prepared.firsts, strict=True)
        ]
        streams = [
            pieces(
                job,
                services.engine,
                services.model.tokenizer,
                it,
                cache_salt=salt,
                choices=None if job.prompt_index is None else choices.get(job.prompt_index),
                began=began,
                direct=direct,
            )
            for job, it in zip(jobs, records, strict=True)
        ]
        answer = streams[0] if len(streams) == 1 else merged(streams)
        self.context.cleanup.append(answer.aclose)
        return answer


async def admitted(
    services: Services, request: Request, *, route: str, operation: str, prepare: Prepare[FieldsT]
) -> Admitted[FieldsT]:
    """Take a request as far as the queue, behind the guard.

    route      its path, for the trace
    operation  its name in the terms of the GenAI conventions
    prepare    validates the parsed body and tokenizes it
    Raises what refuses it: NotReady, TooManyRequests and all that parsing and `prepare` raise.
    """
    context = context_of(request.scope)
    record = _record(services, request, context, route, operation)
    ready = services.require_ready()
    place = _enter(services, context)
    began_at = time.monotonic()
    prepared = await _prepare(ready, context, prepare)
    for grammar in {it for job in prepared.jobs if (it := job.sampling.grammar) is not None}:
        await services.check_grammar(ready, grammar)
    record.tokenized(began_at)
    num_prompt_tokens = prepared.num_prompt_tokens
    _reserve(services, place, num_prompt_tokens)
    if prepared.timeout_s is not None and prepared.timeout_s < services.settings.request_timeout_s:
        message = f"The answer took longer than the {prepared.timeout_s:g} s of the field 'timeout'."
        left_s = context.arrived_at + prepared.timeout_s - time.monotonic()
        context.limit(left_s, TimeLimitReached(message, param="timeout"))
    await _start(services, context, num_prompt_tokens, prepared.jobs)
    record.describe(prepared.jobs[0].sampling, matrix_digest=ready.matrix_digest, is_stream=prepared.is_stream)
    return Admitted(services, context, record, place, prepared)


async def _prepare(ready: EngineReady, context: RequestContext, prepare: Prepare[FieldsT]) -> Prepared[FieldsT]:
    """Parse, validate and tokenize a request's body; a large text off the event loop, which other streams wait for."""

    def parsed(body: bytes | bytearray) -> Prepared[FieldsT]:
        fields = parse_json(body, max_values=max(MAX_VALUES, ready.max_model_len + 1000))
        del body  # it may be large, and is not needed while the text is tokenized
        return prepare(ready, fields, context)

    body = context.body.take()
    if len(body) <= INLINE_BODY_BYTES or (len(body) <= INLINE_IDS_BYTES and _HAS_IDS.search(body)):
        prepared = parsed(body)
    else:
        work = in_thread(body, parsed)
        del body
        prepared = await work
    context.body.drop()
    return prepared


def _record(services: Services, request: Request, context: RequestContext, route: str, operation: str) -> RequestRecord:
    """Begin the request's trace and its measurements; the guard ends them."""
    parents = [value for name, value in request.scope["headers"] if name == b"traceparent"]
    known = {"traceparent": parents[-1].decode("latin-1")} if parents else {}
    trace = services.telemetry.tracing.begin(
        "POST", route, known, request_id=context.request_id, arrived_at=context.arrived_at
    )
    context.record = RequestRecord(services.telemetry.metrics, trace, context.unique_id, operation=operation)
    return context.record


def _enter(services: Services, context: RequestContext) -> Place:
    try:
        place = services.admission.enter()
    except TooManyRequests:
        services.telemetry.metrics.traffic.rejected(RejectedFor.QUEUE_REQUESTS)
        raise
    context.cleanup.append(place.left)
    return place


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


def _reserve(services: Services, place: Place, num_tokens: int) -> None:
    try:
        place.add_tokens(num_tokens)
    except TooManyRequests:
        services.telemetry.metrics.traffic.rejected(RejectedFor.QUEUE_TOKENS)
        raise
