"""The steps of /v1/completions and /v1/chat/completions: check a request, tokenize, admit, generate, answer."""

import asyncio
import itertools
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import msgspec
from fastapi import Request, Response

from server.edge.admission import Edge
from server.edge.context import RequestContext, send_of
from server.edge.direct_stream import DirectStream, writer_of
from server.errors import InvalidValue
from server.grammar.reasoning import behind_reasoning
from server.http.chat.prompts import check_choices, check_lengths, encode_chat, encode_prompts, sampling_of, truncated
from server.http.chat.rendering import chat_text, conversation_of, end_of
from server.http.chat.requests import ChatRequest, CompletionRequest, GenerationRequest, stops_of
from server.http.chat.tools import ToolUse
from server.http.common.provenance import json_response
from server.http.common.validation import read, translated, translated_name
from server.http.generation.admitted import admitted
from server.http.generation.event_stream import HEAD
from server.http.generation.pieces import Job, Piece, joined
from server.http.generation.structured import SINGLE_FIELDS, grammar_of, is_of_format
from server.http.openai.answers import AnswerFormat, ChatFormat, CompletionFormat, Usage
from server.http.openai.details import Details, check_details, details_of
from server.http.openai.event_stream import EventStream
from server.protocol.messages import EngineReady, Grammar, GrammarKind
from server.telemetry.request import RequestRecord
from server.text.answer.deltas import Answer, ContentText, Delta, whole_answer

_BINDING = frozenset({"response_format", "structured_outputs", *SINGLE_FIELDS})
DEFAULT_COMPLETION_TOKENS = 16  # OpenAI's default of max_tokens in /v1/completions; a chat may fill the context


@dataclass(frozen=True, slots=True)
class Prepared:
    """A valid request with its tokens."""

    fields: GenerationRequest
    jobs: list[Job]
    details: Details | None = None

    @property
    def is_stream(self) -> bool:
        return self.fields.stream

    @property
    def cache_salt(self) -> str | None:
        return self.fields.cache_salt

    @property
    def timeout_s(self) -> float | None:
        return self.fields.timeout


@dataclass(frozen=True, slots=True)
class Kind:
    """The differences between the two routes."""

    route: str
    operation: str  # in the terms of the GenAI conventions
    format: Callable[[str, str, bool, str | None], AnswerFormat]
    prepare: Callable[[Edge, EngineReady, dict[str, Any], str], Prepared]


async def generate(edge: Edge, kind: Kind, request: Request) -> Response:
    """Answer one request, behind the guard."""

    def prepare(ready: EngineReady, body: dict[str, Any], context: RequestContext) -> Prepared:
        return kind.prepare(edge, ready, body, context.unique_id)

    it = await admitted(edge, request, route=kind.route, operation=kind.operation, prepare=prepare)
    prepared, record = it.prepared, it.record
    fields = prepared.fields
    options = fields.stream_options
    has_usage_chunk = options is not None and options.include_usage
    shape = kind.format(it.context.unique_id, edge.model, has_usage_chunk, edge.system_fingerprint)
    if options is not None and options.continuous_usage_stats:
        shape = replace(shape, usage_now=lambda: usage_of(record, prepared))
    if prepared.details is not None:
        shape = replace(shape, details=prepared.details)
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
    shape: AnswerFormat, answer: AsyncGenerator[Piece], record: RequestRecord, prepared: Prepared
) -> bytes | Iterator[bytes]:
    num_answers = len(prepared.jobs)
    if prepared.details is None:
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
        deltas[piece.index] += [ContentText(piece.text), *piece.deltas] if piece.text else piece.deltas
        finish_reasons[piece.index] = piece.finish_reason or ""
    return [whole_answer(parts) for parts in deltas], finish_reasons


def usage_of(record: RequestRecord, prepared: Prepared) -> Usage:
    """A prompt and its cached tokens count once, however many choices it has."""
    num_tokens = 0 if prepared.fields.max_tokens == 0 else record.num_tokens
    is_parsed = any(job.parser is not None for job in prepared.jobs)
    return Usage(
        record.num_prompt_tokens,
        num_tokens,
        record.num_cached_tokens,
        record.num_reasoning_tokens if is_parsed else None,
    )


def _prepare_completion(edge: Edge, ready: EngineReady, body: dict[str, Any], unique_id: str) -> Prepared:
    fields = read(CompletionRequest, body)
    edge.check_model(fields.model)
    prompts = encode_prompts(
        edge.tokenizer, fields.prompts(), ready.max_model_len, add_special_tokens=fields.add_special_tokens
    )
    return _prepared(edge, ready, fields, prompts, unique_id, default_tokens=DEFAULT_COMPLETION_TOKENS)


def _prepare_chat(edge: Edge, ready: EngineReady, body: dict[str, Any], unique_id: str) -> Prepared:
    return prepare_chat(edge, ready, read(ChatRequest, body), unique_id)


def prepare_translated(
    edge: Edge, ready: EngineReady, body: dict[str, Any], unique_id: str, names: Mapping[str, str]
) -> Prepared:
    """Tokenize a chat that was made of another protocol's request; `names` as for `translated`.

    In those protocols the tokens that an answer may have are a bound, which may be beyond the context's end: agents
    send one number, 64,000 say, whatever the model.
    """
    with translated(names):
        prepared = prepare_chat(edge, ready, read(ChatRequest, body), unique_id, may_be_less=True)
    return replace(prepared, jobs=[_named(job, names) for job in prepared.jobs])


def prompt_tokens(edge: Edge, body: dict[str, Any], names: Mapping[str, str]) -> int:
    """The number of tokens of a translated chat as a prompt, also where the context does not hold them."""
    with translated(names):
        fields = read(ChatRequest, body)
        edge.check_model(fields.model)
        tools = ToolUse(fields.tools, fields.tool_choice, is_parallel=fields.parallel_tool_calls)
        return len(edge.tokenizer.encode(_chat_text(edge, fields, tools), add_special_tokens=False))


def _named(job: Job, names: Mapping[str, str]) -> Job:
    """The job, whose grammar names the client's own field."""
    grammar = job.sampling.grammar
    if grammar is None:
        return job
    grammar = msgspec.structs.replace(grammar, param=translated_name(grammar.param, names))
    return replace(job, sampling=msgspec.structs.replace(job.sampling, grammar=grammar))


def prepare_chat(
    edge: Edge, ready: EngineReady, fields: ChatRequest, unique_id: str, *, may_be_less: bool = False
) -> Prepared:
    """Tokenize a valid chat, for this route and for those whose requests are translated to it.

    may_be_less  whether an answer may have fewer than `max_tokens` where the context holds no more; else 400
    """
    edge.check_model(fields.model)
    if fields.max_completion_tokens is not None:
        if fields.max_tokens not in (None, fields.max_completion_tokens):
            raise InvalidValue("max_tokens and max_completion_tokens differ; send one.", param="max_tokens")
        fields = fields.model_copy(update={"max_tokens": fields.max_completion_tokens})
    tools = ToolUse(fields.tools, fields.tool_choice, is_parallel=fields.parallel_tool_calls)
    text = _chat_text(edge, fields, tools)
    prompt = encode_chat(edge.tokenizer, text, ready.max_model_len, add_special_tokens=fields.add_special_tokens)
    prepared = _prepared(edge, ready, fields, [prompt], unique_id, default_tokens=None, may_be_less=may_be_less)
    return replace(prepared, jobs=[_parsed(edge, fields, tools, text, job) for job in prepared.jobs])


def _chat_text(edge: Edge, fields: ChatRequest, tools: ToolUse) -> str:
    return chat_text(
        edge.tokenizer,
        edge.template,
        conversation_of(fields, tools),
        syntax=edge.syntax,
        end=end_of(fields.add_generation_prompt, continues=fields.continue_final_message),
        special_tokens_in_text=edge.settings.special_tokens_in_text,
    )


def _parsed(edge: Edge, fields: ChatRequest, tools: ToolUse, prompt: str, job: Job) -> Job:
    """The job with a parser of its answer, and bound to a call where the request asks for one.

    What binds an answer begins behind its reasoning. One that is bound to JSON may be a call instead where there are
    tools. Raises UnsupportedField, and InvalidValue for a call that is no such answer.
    """
    grammar, calls = job.sampling.grammar, None
    if tools.is_forced and grammar is not None:
        if not is_of_format(grammar):
            message = f"tool_choice and {grammar.param} both say what the answer must match; send one."
            raise InvalidValue(message, param=grammar.param)
        grammar = None  # OpenAI's: the format is of text, and the answer is a call
    may_call = tools.schemas is not None and (grammar is None or grammar.kind is GrammarKind.JSON_SCHEMA)
    if may_call and (tools.is_forced or grammar is not None):
        bound = tools.bound(edge.syntax.calls, edge.tokenizer.added_ids, grammar)
        grammar, calls = bound.grammar, bound.form
    if grammar is not None and not fields.continue_final_message:
        reasoning = edge.syntax.reasoning_before(prompt)
        if reasoning is not None:
            grammar = behind_reasoning(grammar, reasoning, edge.tokenizer.added_ids, has_head=calls is None)
    parser = edge.syntax.parser(
        tools.schemas if may_call else None,
        prompt,
        is_streamed=fields.stream,
        is_bound=grammar is not None,
        is_forced=tools.is_forced,
        calls=calls,
        include_reasoning=fields.include_reasoning,
        parallel_tool_calls=fields.parallel_tool_calls,
    )
    if grammar is job.sampling.grammar and parser is None:  # as in most chats
        return job
    return replace(job, sampling=msgspec.structs.replace(job.sampling, grammar=grammar), parser=parser)


def _prepared(
    edge: Edge,
    ready: EngineReady,
    fields: GenerationRequest,
    prompts: list[list[int]],
    unique_id: str,
    *,
    default_tokens: int | None,
    may_be_less: bool = False,
) -> Prepared:
    if fields.stream_options is not None and not fields.stream:
        raise InvalidValue("stream_options needs stream to be true.", param="stream_options")
    check_details(fields)
    stops = stops_of(fields.stop)
    param = "messages" if isinstance(fields, ChatRequest) else "prompt"
    check_choices(len(prompts), fields.n)
    limit = fields.truncate_prompt_tokens
    if limit is not None:
        room, keeps_end = ready.max_model_len - max(1, fields.max_tokens or 0), fields.truncation_side != "right"
        prompts = [truncated(prompt, limit, room, keeps_end=keeps_end) for prompt in prompts]
    grammar = None if fields.model_fields_set.isdisjoint(_BINDING) else _grammar(fields)
    jobs = []
    for i, ((prompt_index, prompt), choice) in enumerate(itertools.product(enumerate(prompts), range(fields.n))):
        # Where none is asked for, the token that ends the computation of the prompt is not given out.
        asked = 1 if fields.max_tokens == 0 else fields.max_tokens
        max_tokens = check_lengths(
            len(prompt), asked, default_tokens, ready.max_model_len, param=param, may_be_less=may_be_less
        )
        sampling = sampling_of(fields, max_tokens, edge.tokenizer, edge.sampling_defaults, choice=choice)
        sampling = msgspec.structs.replace(sampling, grammar=grammar) if grammar is not None else sampling
        job = Job(
            i,
            f"{unique_id}-{i}",
            prompt,
            sampling,
            stops,
            priority=fields.priority,
            continues=not isinstance(fields, ChatRequest) or fields.continue_final_message,
            prompt_index=prompt_index,
        )
        if fields.include_stop_str_in_output or not fields.skip_special_tokens:
            job = replace(
                job,
                includes_stop=fields.include_stop_str_in_output,
                has_special_tokens=not fields.skip_special_tokens,
            )
        jobs.append(job)
    return Prepared(fields, jobs, details_of(fields, jobs, edge.tokenizer))


def _grammar(fields: GenerationRequest) -> Grammar | None:
    single = {name: value for name in SINGLE_FIELDS if (value := getattr(fields, name)) is not None}
    return grammar_of(fields.response_format, fields.structured_outputs, single)


COMPLETIONS = Kind("/v1/completions", "text_completion", CompletionFormat, _prepare_completion)
CHAT = Kind("/v1/chat/completions", "chat", ChatFormat, _prepare_chat)
