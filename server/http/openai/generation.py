"""The steps of /v1/completions and /v1/chat/completions: check a request, tokenize, admit, generate, answer."""

import asyncio
import itertools
import re
import time
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from fastapi import Request, Response
from starlette.types import Scope

from server.edge.admission import Edge, Place
from server.edge.body_memory import in_thread
from server.edge.context import RequestContext, context_of, send_of
from server.edge.direct_stream import DirectStream, writer_of
from server.edge.keys import cache_salt_of
from server.errors import InvalidValue, TooManyRequests
from server.http.common.json_body import MAX_VALUES, parse_json
from server.http.common.validation import read
from server.http.openai.answers import AnswerFormat, ChatFormat, CompletionFormat, Usage
from server.http.openai.completion import Job, Piece, merged, pieces
from server.http.openai.echo import Echo, checked_echo, scored
from server.http.openai.event_stream import HEAD, EventStream
from server.http.openai.prompts import chat_prompt, check_choices, check_lengths, encode_prompts, sampling_of
from server.http.openai.requests import ChatRequest, CompletionRequest, GenerationRequest, stops_of
from server.protocol.messages import EngineReady
from server.telemetry.outcomes import RejectedFor
from server.telemetry.request import RequestRecord

INLINE_BODY_BYTES = 4096  # below this, parsing and tokenizing take less time than a hop to a thread
# Parsing token ids holds the interpreter's lock, so that in a thread it stops the event loop as well, and later.
INLINE_IDS_BYTES = 256 * 1024  # some 40k ids, 2 ms
_HAS_IDS = re.compile(rb'"prompt"\s*:\s*\[\s*\d')
DEFAULT_COMPLETION_TOKENS = 16  # OpenAI's default of max_tokens in /v1/completions; a chat may fill the context


@dataclass(frozen=True, slots=True)
class Prepared:
    """A valid request with its tokens."""

    fields: GenerationRequest
    jobs: list[Job]
    echo: Echo | None = None


@dataclass(frozen=True, slots=True)
class Kind:
    """The differences between the two routes."""

    route: str
    operation: str  # in the terms of the GenAI conventions
    format: Callable[[str, str, bool], AnswerFormat]
    prepare: Callable[[Edge, EngineReady, dict[str, Any], str], Prepared]


async def generate(edge: Edge, kind: Kind, request: Request) -> Response:
    """Answer one request, behind the guard."""
    scope = request.scope
    context = context_of(scope)
    record = _record(edge, kind, scope, context)
    ready = edge.require_ready()
    place = _enter(edge, context)
    began_at = time.monotonic()
    prepared = await _prepare(edge, kind, ready, context)
    record.tokenized(began_at)
    _reserve(edge, place, sum(len(job.prompt_token_ids) for job in prepared.jobs))
    fields = prepared.fields
    record.describe(prepared.jobs[0].sampling, matrix_digest=ready.matrix_digest, is_stream=fields.stream)
    salt = cache_salt_of(context.tenant, fields.cache_salt)
    has_usage_chunk = fields.stream_options is not None and fields.stream_options.include_usage
    shape = kind.format(context.unique_id, edge.model, has_usage_chunk)
    direct = _direct_stream(request, shape) if fields.stream and len(prepared.jobs) == 1 else None
    answer = _answer(edge, prepared.jobs, record, place, salt, direct)
    context.cleanup.append(answer.aclose)
    if fields.stream:
        asyncio.get_running_loop().call_soon(shape.text_event, 0, "")  # makes its head while the engine works
        first = await anext(answer)  # where the response has not begun, what fails until here gets its own status
        usage = (lambda: _usage(record, fields.n)) if has_usage_chunk else None
        return EventStream(shape, first, answer, direct, num_choices=len(prepared.jobs), usage=usage)
    if prepared.echo is not None:
        return Response(await _echoed(shape, answer, record, prepared.echo, fields.n), media_type="application/json")
    return Response(await _whole(shape, answer, record, prepared), media_type="application/json")


async def _prepare(edge: Edge, kind: Kind, ready: EngineReady, context: RequestContext) -> Prepared:
    """Parse, validate and tokenize a request's body; a large text off the event loop, which other streams wait for."""

    def prepare(body: bytes | bytearray) -> Prepared:
        fields = parse_json(body, max_values=max(MAX_VALUES, ready.max_model_len + 1000))
        del body  # it may be large, and is not needed while the text is tokenized
        return kind.prepare(edge, ready, fields, context.unique_id)

    body = context.body.take()
    if len(body) <= INLINE_BODY_BYTES or (len(body) <= INLINE_IDS_BYTES and _HAS_IDS.search(body)):
        prepared = prepare(body)
    else:
        work = in_thread(body, prepare)
        del body
        prepared = await work
    context.body.drop()
    return prepared


def _direct_stream(request: Request, shape: AnswerFormat) -> DirectStream | None:
    """Make the direct way of a stream's tokens; None where another server than ours has made the request."""
    writer = writer_of(request.scope)
    if writer is None:
        return None

    def first_events(text: str) -> bytes:
        return shape.opening(1) + shape.opened(Piece(0, text, None))

    event = partial(shape.text_event, 0)
    return DirectStream(writer, send_of(request.scope), HEAD, first_events=first_events, event=event)


def _record(edge: Edge, kind: Kind, scope: Scope, context: RequestContext) -> RequestRecord:
    """Begin the request's trace and its measurements; the guard ends them."""
    parents = [value for name, value in scope["headers"] if name == b"traceparent"]
    known = {"traceparent": parents[-1].decode("latin-1")} if parents else {}
    trace = edge.tracing.begin("POST", kind.route, known, request_id=context.request_id, arrived_at=context.arrived_at)
    context.record = RequestRecord(edge.metrics, trace, context.unique_id, operation=kind.operation)
    return context.record


def _enter(edge: Edge, context: RequestContext) -> Place:
    try:
        place = edge.admission.enter()
    except TooManyRequests:
        edge.metrics.traffic.rejected(RejectedFor.QUEUE_REQUESTS)
        raise
    context.cleanup.append(place.left)
    return place


def _reserve(edge: Edge, place: Place, num_tokens: int) -> None:
    try:
        place.add_tokens(num_tokens)
    except TooManyRequests:
        edge.metrics.traffic.rejected(RejectedFor.QUEUE_TOKENS)
        raise


def _answer(
    edge: Edge, jobs: list[Job], record: RequestRecord, place: Place, salt: bytes, direct: DirectStream | None
) -> AsyncGenerator[Piece]:
    """The pieces of all answers but for what goes to the `direct` stream, which there is for one answer only."""
    num_waiting = len(jobs)

    def began() -> None:
        nonlocal num_waiting
        num_waiting -= 1
        if not num_waiting:
            place.leave(time.monotonic() - record.arrived_at)

    records = [record.sequence(len(job.prompt_token_ids)) for job in jobs]
    streams = [
        pieces(job, edge.engine, edge.tokenizer, it, cache_salt=salt, began=began, direct=direct)
        for job, it in zip(jobs, records, strict=True)
    ]
    return streams[0] if len(streams) == 1 else merged(streams)


async def _whole(
    shape: AnswerFormat, answer: AsyncGenerator[Piece], record: RequestRecord, prepared: Prepared
) -> bytes:
    texts: list[list[str]] = [[] for _ in prepared.jobs]
    finish_reasons = [""] * len(texts)
    async for piece in answer:
        texts[piece.index].append(piece.text)
        finish_reasons[piece.index] = piece.finish_reason or ""
    return shape.whole(["".join(parts) for parts in texts], finish_reasons, _usage(record, prepared.fields.n))


async def _echoed(
    shape: AnswerFormat, answer: AsyncGenerator[Piece], record: RequestRecord, echo: Echo, num_choices: int
) -> bytes:
    pieces = [piece async for piece in answer]
    usage = _usage(record, num_choices, is_empty=echo.is_empty)
    # Off the event loop: naming 32k tokens takes 0.1 s.
    return await asyncio.to_thread(lambda: shape.choices(echo.choices(pieces), usage))


def _usage(record: RequestRecord, num_choices: int, *, is_empty: bool = False) -> Usage:
    """A prompt counts once, however many choices it has; of its cached tokens, the mean over them."""
    num_tokens = 0 if is_empty else record.num_tokens
    return Usage(record.num_prompt_tokens // num_choices, num_tokens, record.num_cached_tokens // num_choices)


def _prepare_completion(edge: Edge, ready: EngineReady, body: dict[str, Any], unique_id: str) -> Prepared:
    fields = read(CompletionRequest, body)
    edge.check_model(fields.model)
    is_empty = fields.max_tokens == 0
    fields = checked_echo(fields, DEFAULT_COMPLETION_TOKENS)
    prompts = encode_prompts(edge.tokenizer, fields.prompts(), ready.max_model_len)
    prepared = _prepared(edge, ready, fields, prompts, unique_id, default_tokens=DEFAULT_COMPLETION_TOKENS)
    if not fields.echo:
        return prepared
    jobs = scored(prepared.jobs, fields.logprobs)
    return Prepared(fields, jobs, Echo(fields, jobs, edge.tokenizer, is_empty=is_empty))


def _prepare_chat(edge: Edge, ready: EngineReady, body: dict[str, Any], unique_id: str) -> Prepared:
    fields = read(ChatRequest, body)
    edge.check_model(fields.model)
    if fields.max_completion_tokens is not None:
        if fields.max_tokens not in (None, fields.max_completion_tokens):
            raise InvalidValue("max_tokens and max_completion_tokens differ; send one.", param="max_tokens")
        fields = fields.model_copy(update={"max_tokens": fields.max_completion_tokens})
    prompt = chat_prompt(
        edge.tokenizer,
        edge.template,
        fields.messages,
        ready.max_model_len,
        special_tokens_in_text=edge.settings.special_tokens_in_text,
    )
    return _prepared(edge, ready, fields, [prompt], unique_id, default_tokens=None)


def _prepared(
    edge: Edge,
    ready: EngineReady,
    fields: GenerationRequest,
    prompts: list[list[int]],
    unique_id: str,
    *,
    default_tokens: int | None,
) -> Prepared:
    if fields.stream_options is not None and not fields.stream:
        raise InvalidValue("stream_options needs stream to be true.", param="stream_options")
    stops = stops_of(fields.stop)
    param = "messages" if isinstance(fields, ChatRequest) else "prompt"
    check_choices(len(prompts), fields.n)
    jobs = []
    for i, (prompt, choice) in enumerate(itertools.product(prompts, range(fields.n))):
        max_tokens = check_lengths(len(prompt), fields.max_tokens, default_tokens, ready.max_model_len, param=param)
        sampling = sampling_of(fields, max_tokens, edge.tokenizer.vocab_size, edge.sampling_defaults, choice=choice)
        jobs.append(Job(i, f"{unique_id}-{i}", prompt, sampling, stops))
    return Prepared(fields, jobs)


COMPLETIONS = Kind("/v1/completions", "text_completion", CompletionFormat, _prepare_completion)
CHAT = Kind("/v1/chat/completions", "chat", ChatFormat, _prepare_chat)
