"""Anthropic's routes."""

from functools import partial
from typing import Any

import msgspec
from fastapi import APIRouter, Request, Response

from server.edge.context import context_of
from server.edge.routing import PlainRoute
from server.errors import ModelNotFound, NotReady, TemplateError
from server.http.anthropic.context_edits import Edited, edited
from server.http.anthropic.conversation import FIELDS, chat_of, hides_thinking, image_places, left_out, prompt_of
from server.http.anthropic.message import MessageFormat
from server.http.anthropic.requests import CountTokensRequest, MessagesRequest
from server.http.anthropic.schemas import MessageAnswer, MessageError, MessageEvent, TokenCount
from server.http.chat.image_places import check_images
from server.http.chat.prepare import prepare_translated, prompt_tokens
from server.http.common.document import streams, takes
from server.http.common.json_pieces import json_response
from server.http.common.validation import read
from server.http.generation.admitted import GENERATION_ERRORS, admitted
from server.http.generation.answer import namer_of
from server.http.generation.event_stream import answered
from server.http.generation.prepared import Prepared
from server.http.generation.usage import usage_of
from server.http.images.preparing import with_images
from server.http.images.source import RequestImages
from server.http.services import ServedModel, Services
from server.protocol.messages import EngineReady

MESSAGES = "/v1/messages"
COUNT_TOKENS = "/v1/messages/count_tokens"
REQUESTS = (MessagesRequest, CountTokensRequest)
EVENTS = (MessageEvent, MessageError)
_IMAGE = "image"  # the type of its block
_STREAM = "The whole answer, or with `stream` events, each named by the `type` of its data."


def routes(services: Services) -> APIRouter:
    router = APIRouter(route_class=PlainRoute, tags=["Anthropic"])

    @router.post(
        MESSAGES,
        response_model=MessageAnswer,
        responses=streams(MessageEvent, _STREAM),
        openapi_extra=takes(MessagesRequest, TemplateError, *GENERATION_ERRORS, envelope=MessageError),
    )
    async def messages(request: Request) -> Response:
        """Answer a conversation of Anthropic's clients, by the model's own chat template."""
        context = context_of(request.scope)
        prepare = partial(_prepared, services.model, context.unique_id)
        it = await context.enter(admitted(services, request, route=MESSAGES, operation="chat", prepare=prepare))
        changed = it.prepared.fields
        fields = changed.fields
        shape = MessageFormat(
            context.unique_id,
            services.model.name,
            lambda: usage_of(it.record),
            namer_of(it, request.scope, fields.hallmark),
            applied_edits=None if fields.context_management is None else changed.applied,
            left_out_tools=left_out(fields),
            hides_thinking=hides_thinking(fields),
            has_less_room=it.prepared.jobs[0].sampling.max_tokens < fields.max_tokens,
        )
        return await answered(it, shape)

    @router.post(
        COUNT_TOKENS,
        response_model=TokenCount,
        openapi_extra=takes(CountTokensRequest, TemplateError, ModelNotFound, NotReady, envelope=MessageError),
    )
    async def count_tokens(request: Request) -> Response:
        """Return how many tokens a conversation has as a prompt, also where the context does not hold them."""
        ready = services.require_ready()
        context = context_of(request.scope)

        def count(body: dict[str, Any], images: RequestImages) -> dict[str, Any]:
            fields = read(CountTokensRequest, body)
            check_images(services.model, ready, image_places(fields), _IMAGE)
            changed = edited(fields, partial(_num_tokens, services.model, ready, images))
            num_tokens = _num_tokens(services.model, ready, images, changed.fields)
            if fields.context_management is None:
                return {"input_tokens": num_tokens}
            before = num_tokens if changed.num_original_tokens is None else changed.num_original_tokens
            return {"input_tokens": num_tokens, "context_management": {"original_input_tokens": before}}

        counts = await with_images(services.images, context.body.take(), None, count)
        return json_response(msgspec.json.encode(counts))

    return router


def _prepared(
    model: ServedModel, unique_id: str, ready: EngineReady, body: dict[str, Any], images: RequestImages
) -> Prepared[Edited[MessagesRequest]]:
    fields = read(MessagesRequest, body)
    check_images(model, ready, image_places(fields), _IMAGE)
    changed = edited(fields, partial(_num_tokens, model, ready, images))
    return prepare_translated(model, unique_id, ready, chat_of(changed.fields), images, FIELDS).of(changed)


def _num_tokens(model: ServedModel, ready: EngineReady, images: RequestImages, fields: CountTokensRequest) -> int:
    return prompt_tokens(model, ready, prompt_of(fields), images, FIELDS)
