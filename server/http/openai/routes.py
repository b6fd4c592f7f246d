"""OpenAI's routes, and vLLM's for tokens."""

from functools import partial
from typing import Any

import msgspec
from fastapi import APIRouter, Request, Response

from server.edge.body_memory import in_thread
from server.edge.context import context_of
from server.edge.routing import PlainRoute
from server.errors import (
    ModelNotFound,
    NotReady,
    PromptTooLong,
    TemplateError,
    TimeLimitReached,
)
from server.http.chat.image_places import check_bounds
from server.http.chat.prepare import chat_ids
from server.http.chat.rendering import conversation_with, end_of
from server.http.chat.requests import ChatRequest
from server.http.chat.tools import ToolUse
from server.http.common.document import streams, takes
from server.http.common.inputs import checked_ids
from server.http.common.json_body import parse_json
from server.http.common.json_pieces import json_response
from server.http.common.validation import read
from server.http.generation.admitted import GENERATION_ERRORS
from server.http.generation.prompts import encode_text
from server.http.images.preparing import with_images
from server.http.images.source import RequestImages
from server.http.openai.generation import CHAT, COMPLETIONS, generate
from server.http.openai.requests import CompletionRequest, DetokenizeRequest, TokenizeRequest
from server.http.openai.schemas import (
    ChatChunk,
    ChatCompletion,
    Completion,
    CompletionChunk,
    Detokenized,
    Tokenized,
)
from server.http.services import ServedModel, Services
from server.protocol.messages import EngineReady

TOKEN_REQUESTS = (TokenizeRequest, DetokenizeRequest)
REQUESTS = (CompletionRequest, ChatRequest, *TOKEN_REQUESTS)
EVENTS = (CompletionChunk, ChatChunk)


def routes(services: Services) -> APIRouter:
    router = APIRouter(route_class=PlainRoute, tags=["OpenAI"])

    @router.post(
        COMPLETIONS.route,
        response_model=Completion,
        responses=streams(CompletionChunk, last="[DONE]"),
        openapi_extra=takes(CompletionRequest, TimeLimitReached, *GENERATION_ERRORS),
    )
    async def completions(request: Request) -> Response:
        """Complete a text or token ids."""
        return await generate(services, COMPLETIONS, request)

    @router.post(
        CHAT.route,
        response_model=ChatCompletion,
        responses=streams(ChatChunk, last="[DONE]"),
        openapi_extra=takes(ChatRequest, TemplateError, TimeLimitReached, *GENERATION_ERRORS),
    )
    async def chat_completions(request: Request) -> Response:
        """Answer a conversation, by the model's own chat template."""
        return await generate(services, CHAT, request)

    @router.post(
        "/tokenize",
        response_model=Tokenized,
        openapi_extra=takes(TokenizeRequest, ModelNotFound, PromptTooLong, TemplateError, NotReady),
    )
    async def tokenize(request: Request) -> Response:
        """Return the token ids of a text or of a conversation."""
        ready = services.require_ready()
        make = partial(_tokenize, services.model, ready)
        tokens = await with_images(services.images, context_of(request.scope).body.take(), None, make)
        counts = {"count": len(tokens), "max_model_len": ready.max_model_len, "tokens": tokens}
        return json_response(msgspec.json.encode(counts))

    @router.post(
        "/detokenize", response_model=Detokenized, openapi_extra=takes(DetokenizeRequest, ModelNotFound, NotReady)
    )
    async def detokenize(request: Request) -> Response:
        """Return the text of token ids, special tokens among it."""
        services.require_ready()
        body = context_of(request.scope).body.take()
        text = await in_thread(body, lambda it: _detokenize(services.model, parse_json(it)))
        return json_response(msgspec.json.encode({"prompt": text}))

    return router


def _tokenize(model: ServedModel, ready: EngineReady, body: dict[str, Any], images: RequestImages) -> list[int]:
    fields = read(TokenizeRequest, body)
    model.check_name(fields.model)
    fields.check()
    if fields.prompt is not None:
        added = fields.add_special_tokens is not False
        return encode_text(model.tokenizer, fields.prompt, ready.max_model_len, add_special_tokens=added)
    assert fields.messages is not None
    tools, options = ToolUse(fields.tools, None).for_template(), fields.chat_template_kwargs or {}
    check_bounds(model, fields.mm_processor_kwargs)
    conversation = conversation_with(fields.messages, fields.mm_processor_kwargs, tools, None, options)
    end = end_of(fields.add_generation_prompt, continues=fields.continue_final_message)
    added = fields.add_special_tokens is True
    return chat_ids(model, ready, conversation, end, images, add_special_tokens=added).token_ids


def _detokenize(model: ServedModel, body: dict[str, Any]) -> str:
    fields = read(DetokenizeRequest, body)
    model.check_name(fields.model)
    ids = checked_ids(fields.tokens, model.tokenizer.vocab_size, "tokens")
    return model.tokenizer.decode(ids, skip_special_tokens=False)
