"""The steps of /v1/completions and /v1/chat/completions: check a request, tokenize, admit, generate, answer."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from fastapi import Request, Response

from server.edge.context import context_of, send_of
from server.edge.direct_stream import DirectStream, writer_of
from server.http.chat.prepare import prepare_chat
from server.http.common.validation import read
from server.http.generation.admitted import admitted
from server.http.generation.answer import namer_of
from server.http.generation.event_stream import HEAD, answered
from server.http.generation.jobs import jobs_of
from server.http.generation.pieces import Piece
from server.http.generation.prepared import Prepared
from server.http.generation.prompts import encode_prompts, held
from server.http.generation.requests import GenerationRequest
from server.http.generation.usage import usage_of
from server.http.images.source import RequestImages
from server.http.openai.answers import AllChoices, AnswerFormat, ChatFormat, CompletionFormat
from server.http.openai.details import details_of, prompt_texts
from server.http.openai.exact_sampling import exactly
from server.http.openai.requests import CompletionRequest
from server.http.services import ServedModel, Services
from server.protocol.messages import EngineReady

DEFAULT_COMPLETION_TOKENS = 16  # OpenAI's default of max_tokens in /v1/completions; a chat may fill the context


@dataclass(frozen=True, slots=True)
class Kind:
    """The differences between the two routes."""

    route: str
    operation: str  # in the terms of the GenAI conventions
    format: type[AnswerFormat]
    prepare: Callable[[ServedModel, str, EngineReady, dict[str, Any], RequestImages], Prepared[GenerationRequest]]


async def generate(services: Services, kind: Kind, request: Request) -> Response:
    """Answer one request, behind the guard."""
    context = context_of(request.scope)
    prepare = partial(kind.prepare, services.model, context.unique_id)
    it = await context.enter(admitted(services, request, route=kind.route, operation=kind.operation, prepare=prepare))
    fields, jobs = it.prepared.fields, it.prepared.jobs
    options = fields.stream_options
    shape = kind.format(
        unique_id=context.unique_id,
        model=services.model.name,
        usage=lambda: usage_of(it.record, is_empty=fields.max_tokens == 0),
        has_usage_chunk=options is not None and options.include_usage,
        has_usage_in_each=options is not None and options.continuous_usage_stats,
        has_reasoning_count=any(job.parser is not None for job in jobs),
        system_fingerprint=services.system_fingerprint,
        details=details_of(fields, jobs, services.model.tokenizer),
        may_call=fields.may_call,
    )
    answer = AllChoices(shape, len(jobs), namer_of(it, request.scope, fields.hallmark))
    direct = None
    if fields.stream and shape.is_plain:
        asyncio.get_running_loop().call_soon(shape.text_event, 0, "")  # makes its head while the engine works
        if len(jobs) == 1 and jobs[0].parser is None:
            direct = _direct_stream(request, shape)
    return await answered(it, answer, direct)


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


def _prepare_completion(
    model: ServedModel, unique_id: str, ready: EngineReady, body: dict[str, Any], _images: RequestImages
) -> Prepared[CompletionRequest]:
    fields = read(CompletionRequest, body)
    model.check_name(fields.model)
    longest = ready.max_model_len
    given = fields.prompts()
    if fields.truncate_prompt_tokens is not None:
        keeps_end = fields.truncation_side != "right"
        given = [held(it, longest, keeps_end=keeps_end) if isinstance(it, str) else it for it in given]
    prompts = encode_prompts(model.tokenizer, given, longest, add_special_tokens=fields.add_special_tokens)
    default = DEFAULT_COMPLETION_TOKENS
    jobs = jobs_of(model, fields, prompts, unique_id, longest, default_tokens=default)
    if fields.exact_sampling is not None:
        jobs = exactly(fields.exact_sampling, jobs, model.tokenizer.vocab_size)
    return Prepared(
        fields,
        jobs,
        fields.stream,
        fields.cache_salt,
        fields.timeout,
        wants_receipt=fields.receipt,
        may_have_receipt=fields.max_tokens != 0,
        texts=partial(prompt_texts, fields, jobs, model.tokenizer),
    )


COMPLETIONS = Kind("/v1/completions", "text_completion", CompletionFormat, _prepare_completion)
CHAT = Kind("/v1/chat/completions", "chat", ChatFormat, prepare_chat)
