"""The steps of /v1/completions and /v1/chat/completions: check a request, tokenize, admit, generate, answer."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from fastapi import Request, Response

from server.edge.admission import Edge
from server.edge.context import RequestContext, send_of
from server.edge.direct_stream import DirectStream, writer_of
from server.http.chat.prepare import prepare_chat
from server.http.chat.requests import ChatRequest
from server.http.common.provenance import json_response
from server.http.common.validation import read
from server.http.generation.admitted import admitted
from server.http.generation.event_stream import HEAD
from server.http.generation.jobs import jobs_of
from server.http.generation.pieces import Piece, joined
from server.http.generation.prepared import Prepared
from server.http.generation.prompts import encode_prompts
from server.http.generation.requests import GenerationRequest
from server.http.openai.answers import AnswerFormat, ChatFormat, CompletionFormat, Usage
from server.http.openai.details import details_of
from server.http.openai.event_stream import EventStream
from server.http.openai.requests import CompletionRequest
from server.protocol.messages import EngineReady
from server.telemetry.request import RequestRecord
from server.text.answer.deltas import Answer, Delta, whole_answer

DEFAULT_COMPLETION_TOKENS = 16  # OpenAI's default of max_tokens in /v1/completions; a chat may fill the context


@dataclass(frozen=True, slots=True)
class Kind:
    """The differences between the two routes."""

    route: str
    operation: str  # in the terms of the GenAI conventions
    format: Callable[[str, str, bool, str | None], AnswerFormat]
    prepare: Callable[[Edge, EngineReady, dict[str, Any], str], Prepared[GenerationRequest]]


async def generate(edge: Edge, kind: Kind, request: Request) -> Response:
    """Answer one request, behind the guard."""

    def prepare(ready: EngineReady, body: dict[str, Any], context: RequestContext) -> Prepared[GenerationRequest]:
        return kind.prepare(edge, ready, body, context.unique_id)

    it = await admitted(edge, request, route=kind.route, operation=kind.operation, prepare=prepare)
    prepared, record = it.prepared, it.record
    fields = prepared.fields
    options = fields.stream_options
    has_usage_chunk = options is not None and options.include_usage
    shape = kind.format(it.context.unique_id, edge.model, has_usage_chunk, edge.system_fingerprint)
    if options is not None and options.continuous_usage_stats:
        shape = replace(shape, usage_now=lambda: usage_of(record, prepared))
    details = details_of(fields, prepared.jobs, edge.tokenizer)
    if details is not None:
        shape = replace(shape, details=details)
    if isinstance(fields, ChatRequest) and fields.tools and fields.tool_choice != "none":
        shape = replace(shape, may_call=True)
    provenance = it.provenance(request.scope, fields.hallmark)
    is_plain = shape.is_plain and len(prepared.jobs) == 1 and prepared.jobs[0].parser is None
    direct = _direct_stream(request, shape) if fields.stream and is_plain else None
    answer = it.answer(direct)
    if fields.stream:
        if shape.is_plain:
            asyncio.get_running_loop().call_soon(shape.text_event, 0, "")  # makes its head while the engine works
        first = await anext(answer)  # where the response has not begun, what fails until here gets its own status
        usage = (lambda: usage_of(record, prepared)) if has_usage_chunk else None
        num_choices = len(prepared.jobs)
        return EventStream(shape, first, answer, direct, num_choices=num_choices, usage=usage, provenance=provenance)
    body = await _whole(shape, answer, record, prepared)
    return json_response(body, provenance)


def _direct_stream(request: Request, shape: AnswerFormat) -> DirectStream | None:
    """Make the direct way of a stream's tokens; None where another server than ours has made the request."""
    writer = writer_of(request.scope)
    if writer is None:
        return None

    def first_events(text: str) -> bytes:
        opened = shape.opened(Piece(0, text, None))
        assert isinstance(opened, bytes)  # a plain answer has no details
        return shape.opening(1) + opened

    event = partial(shape.text_event, 0)
    return DirectStream(writer, send_of(request.scope), HEAD, first_events=first_events, event=event)


async def _whole(
    shape: AnswerFormat, answer: AsyncGenerator[Piece], record: RequestRecord, prepared: Prepared[GenerationRequest]
) -> bytes | Iterator[bytes]:
    num_answers = len(prepared.jobs)
    if shape.details is None:
        answers, finish_reasons = await collected(answer, num_answers)
        return shape.whole(answers, finish_reasons, usage_of(record, prepared))
    found: list[list[Piece]] = [[] for _ in range(num_answers)]
    async for piece in answer:
        found[piece.index].append(piece)
    usage = usage_of(record, prepared)
    return shape.whole_with_details([joined(pieces) for pieces in found], usage)


async def collected(answer: AsyncGenerator[Piece], num_answers: int) -> tuple[list[Answer], list[str]]:
    """Whole answers out of their pieces, and why each ended."""
    deltas: list[list[Delta]] = [[] for _ in range(num_answers)]
    finish_reasons = [""] * num_answers
    async for piece in answer:
        deltas[piece.index] += piece.all_deltas
        finish_reasons[piece.index] = piece.finish_reason or ""
    return [whole_answer(parts) for parts in deltas], finish_reasons


def usage_of(record: RequestRecord, prepared: Prepared[GenerationRequest]) -> Usage:
    """A prompt and its cached tokens count once, however many choices it has."""
    num_tokens = 0 if prepared.fields.max_tokens == 0 else record.num_tokens
    is_parsed = any(job.parser is not None for job in prepared.jobs)
    return Usage(
        record.num_prompt_tokens,
        num_tokens,
        record.num_cached_tokens,
        record.num_reasoning_tokens if is_parsed else None,
    )


def _prepare_completion(
    edge: Edge, ready: EngineReady, body: dict[str, Any], unique_id: str
) -> Prepared[CompletionRequest]:
    fields = read(CompletionRequest, body)
    edge.check_model(fields.model)
    prompts = encode_prompts(
        edge.tokenizer, fields.prompts(), ready.max_model_len, add_special_tokens=fields.add_special_tokens
    )
    default = DEFAULT_COMPLETION_TOKENS
    jobs = jobs_of(edge, fields, prompts, unique_id, ready.max_model_len, default_tokens=default)
    return Prepared(fields, jobs, fields.stream, fields.cache_salt, fields.timeout)


COMPLETIONS = Kind("/v1/completions", "text_completion", CompletionFormat, _prepare_completion)
CHAT = Kind("/v1/chat/completions", "chat", ChatFormat, prepare_chat)
