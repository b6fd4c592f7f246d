"""Anthropic's routes."""

from typing import Any

import msgspec
from fastapi import APIRouter, Request, Response

from server.edge.admission import Edge
from server.edge.body_memory import in_thread
from server.edge.context import RequestContext, context_of
from server.errors import ModelNotFound, NotReady, PromptTooLong, TemplateError
from server.http.anthropic.answers import MessageAnswer, MessageError, MessageEvent, TokenCount
from server.http.anthropic.conversation import FIELDS, chat_of, prompt_of
from server.http.anthropic.message import MessageFormat
from server.http.anthropic.requests import CountTokensRequest, MessagesRequest
from server.http.common.document import PlainRoute, streams, takes
from server.http.common.json_body import parse_json
from server.http.common.validation import read
from server.http.generation.admitted import admitted
from server.http.generation.event_stream import answered
from server.http.generation.usage import usage_of
from server.http.openai.generation import Prepared, prepare_translated
from server.http.openai.routes import GENERATION_ERRORS
from server.protocol.messages import EngineReady

MESSAGES = "/v1/messages"
COUNT_TOKENS = "/v1/messages/count_tokens"
REQUESTS = (MessagesRequest, CountTokensRequest)
EVENTS = (MessageEvent, MessageError)
_STREAM = "The whole answer, or with `stream` events, each named by the `type` of its data."


def routes(edge: Edge) -> APIRouter:
    router = APIRouter(route_class=PlainRoute, tags=["Anthropic"])

    @router.post(
        MESSAGES,
        response_model=MessageAnswer,
        responses=streams(MessageEvent, _STREAM),
        openapi_extra=takes(MessagesRequest, TemplateError, *GENERATION_ERRORS, envelope=MessageError),
    )
    async def messages(request: Request) -> Response:
        """Answer a conversation of Anthropic's clients, by the model's own chat template."""
        names_kernels = False

        def prepare(ready: EngineReady, body: dict[str, Any], context: RequestContext) -> Prepared:
            nonlocal names_kernels
            fields = read(MessagesRequest, body)
            names_kernels = fields.hallmark
            return _prepared(edge, ready, chat_of(fields), context.unique_id)

        it = await admitted(edge, request, route=MESSAGES, operation="chat", prepare=prepare)
        shape = MessageFormat(it.context.unique_id, edge.model, lambda: usage_of(it.record))
        return await answered(request, it, shape, names_kernels=names_kernels)

    @router.post(
        COUNT_TOKENS,
        response_model=TokenCount,
        openapi_extra=takes(
            CountTokensRequest, TemplateError, ModelNotFound, PromptTooLong, NotReady, envelope=MessageError
        ),
    )
    async def count_tokens(request: Request) -> Response:
        """Return how many tokens a conversation has as a prompt."""
        ready = edge.require_ready()
        context = context_of(request.scope)

        def count(body: bytes | bytearray) -> int:
            chat = prompt_of(read(CountTokensRequest, parse_json(body)))
            return len(_prepared(edge, ready, chat, context.unique_id).jobs[0].prompt_token_ids)

        num_tokens = await in_thread(context.body.take(), count)
        return Response(msgspec.json.encode({"input_tokens": num_tokens}), media_type="application/json")

    return router


def _prepared(edge: Edge, ready: EngineReady, chat: dict[str, Any], unique_id: str) -> Prepared:
    return prepare_translated(edge, ready, chat, unique_id, FIELDS)
