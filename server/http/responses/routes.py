"""Routes of OpenAI's Responses API."""

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import msgspec
from fastapi import APIRouter, Request, Response

from server.edge.context import RequestContext, context_of
from server.edge.routing import PlainRoute
from server.errors import (
    DeadlineExceeded,
    InvalidValue,
    ResponseNotFound,
    TemplateError,
    UnknownField,
    UnsupportedMediaType,
)
from server.http.chat.image_places import check_images
from server.http.chat.prepare import prepare_translated
from server.http.common.document import answers_with, streams, takes
from server.http.common.json_pieces import json_response
from server.http.common.query import Query, parameter
from server.http.common.validation import read
from server.http.generation.admitted import GENERATION_ERRORS, admitted
from server.http.generation.answer import namer_of
from server.http.generation.event_stream import answered
from server.http.generation.prepared import Prepared
from server.http.generation.usage import usage_of
from server.http.images.source import RequestImages
from server.http.responses.answer import ResponseFormat
from server.http.responses.conversation import FIELDS, chat_of, image_places, items_of
from server.http.responses.input_items import INCLUDABLE, INCLUDE, KNOWN, PARAMETERS, input_page, with_ids
from server.http.responses.requests import ResponsesRequest
from server.http.responses.schemas import InputItemList, ResponseAnswer, ResponseDeleted, ResponseStreamEvent
from server.http.responses.store import ResponseStore, Stored
from server.http.responses.tools import ToolSet
from server.http.services import ServedModel, Services
from server.protocol.messages import EngineReady

RESPONSES = "/v1/responses"
# Of OpenAI's client, each with why this server has not got it.
NOT_IMPLEMENTED = {
    f"{RESPONSES}/compact": "is not implemented; send the items to go on from as input",
    f"{RESPONSES}/input_tokens": "is not implemented; /tokenize counts the tokens of messages",
}
REQUESTS = (ResponsesRequest,)
EVENTS = (ResponseStreamEvent,)
_RETRIEVING = [
    parameter("stream", "Only false: a stored answer is given whole.", {"type": "boolean"}),
    INCLUDE,
    parameter("include_obfuscation", "Taken, and changes nothing: it is of streams.", {"type": "boolean"}),
]
_RETRIEVING_KNOWN = frozenset({"stream", "starting_after", "include", "include[]", "include_obfuscation"})
_STREAM = "The whole answer, or with `stream` events, each named by the `type` of its data."


@dataclass(frozen=True, slots=True)
class _Continued:
    """A valid request, with the conversation that it continues."""

    fields: ResponsesRequest
    items: list[Any]  # of the conversation and of the input
    tools: ToolSet


def routes(services: Services) -> APIRouter:
    """The routes, and the store behind them."""
    settings = services.settings
    store = ResponseStore(settings.response_store_bytes, settings.response_store_entries)
    router = APIRouter(route_class=PlainRoute, tags=["OpenAI"])

    @router.post(
        RESPONSES,
        response_model=ResponseAnswer,
        responses=streams(ResponseStreamEvent, _STREAM),
        openapi_extra=takes(ResponsesRequest, TemplateError, ResponseNotFound, *GENERATION_ERRORS),
    )
    async def create_response(request: Request) -> Response:
        """Answer a conversation, which may continue an answer that is stored."""
        return await _created(services, store, request)

    @router.get(
        RESPONSES + "/{response_id}",
        response_model=ResponseAnswer,
        openapi_extra=answers_with(ResponseNotFound, InvalidValue, UnknownField) | {"parameters": _RETRIEVING},
    )
    async def get_response(request: Request) -> Response:
        """Return an answer that is stored, whole."""
        _check_retrieving(Query(request, _RETRIEVING_KNOWN))
        return json_response(_stored(store, request).response)

    @router.get(
        RESPONSES + "/{response_id}/input_items",
        response_model=InputItemList,
        openapi_extra=answers_with(ResponseNotFound, InvalidValue, UnknownField) | {"parameters": PARAMETERS},
    )
    async def list_input_items(request: Request) -> Response:
        """List what a stored answer was made of: the conversation that it continued, and its own input."""
        query = Query(request, KNOWN)
        return json_response(msgspec.json.encode(input_page(_stored(store, request), query)))

    @router.post(
        RESPONSES + "/{response_id}/cancel",
        response_model=ResponseAnswer,
        openapi_extra=answers_with(ResponseNotFound, InvalidValue, UnsupportedMediaType, DeadlineExceeded),
    )
    async def cancel_response(request: Request) -> Response:
        """Refuse to cancel: an answer is stored when it has ended, and `background` is not implemented."""
        _stored(store, request)
        raise InvalidValue(
            "This response has ended, and cannot be cancelled; only one made with background can, which is not "
            "implemented. Close the connection of a request to end its answer.",
            param="response_id",
        )

    @router.delete(
        RESPONSES + "/{response_id}", response_model=ResponseDeleted, openapi_extra=answers_with(ResponseNotFound)
    )
    async def delete_response(request: Request) -> Response:
        """Forget an answer that is stored; what continued it stays."""
        response_id = request.path_params["response_id"]
        store.delete(context_of(request.scope).tenant, response_id)
        return json_response(msgspec.json.encode({"id": response_id, "object": "response", "deleted": True}))

    return router


async def _created(services: Services, store: ResponseStore, request: Request) -> Response:
    context = context_of(request.scope)
    prepare = partial(_prepared, services.model, store, context)
    it = await context.enter(admitted(services, request, route=RESPONSES, operation="chat", prepare=prepare))
    asked = it.prepared.fields

    def ended(response: bytes, items: list[dict[str, Any]]) -> None:
        if asked.fields.store:
            given = with_ids(asked.items, context.unique_id)
            conversation = msgspec.json.encode([*given, *items])
            store.put(context.tenant, shape.response_id, Stored(response, conversation))

    shape = ResponseFormat(
        context.unique_id,
        asked.fields,
        it.prepared.jobs[0].sampling,
        services.model.name,
        tools=asked.tools,
        usage=lambda: usage_of(it.record),
        name=namer_of(it, request.scope, asked.fields.hallmark),
        ended=ended,
    )
    context.dialect = replace(context.dialect, event=shape.failed)
    return await answered(it, shape)


def _check_retrieving(query: Query) -> None:
    """Raises InvalidValue for what asks for a stored answer otherwise than whole."""
    if (query.text("stream") or "false").lower() not in ("false", "0"):
        raise InvalidValue("A stored response cannot be streamed; leave out stream.", param="stream")
    if query.text("starting_after") is not None:
        message = "starting_after is for streams, and a stored response cannot be streamed; leave it out."
        raise InvalidValue(message, param="starting_after")
    for name in ("include", "include[]"):
        query.choices(name, INCLUDABLE)


def _stored(store: ResponseStore, request: Request) -> Stored:
    """The answer that a path names. Raises ResponseNotFound."""
    return store.get(context_of(request.scope).tenant, request.path_params["response_id"])


def _prepared(
    model: ServedModel,
    store: ResponseStore,
    context: RequestContext,
    ready: EngineReady,
    body: dict[str, Any],
    images: RequestImages,
) -> Prepared[_Continued]:
    fields = read(ResponsesRequest, body)
    if fields.stream_options is not None and not fields.stream:
        raise InvalidValue("stream_options needs stream to be true.", param="stream_options")
    given = body["input"]
    items = [{"type": "message", "role": "user", "content": given}] if isinstance(given, str) else given
    if fields.previous_response_id is not None:
        stored = store.get(context.tenant, fields.previous_response_id, param="previous_response_id")
        items = [*msgspec.json.decode(stored.items), *items]
        fields = read(ResponsesRequest, body | {"input": items})
    tools = ToolSet(fields.tools, items_of(fields))
    check_images(model, ready, image_places(fields), "input_image")
    chat = prepare_translated(model, context.unique_id, ready, chat_of(fields, tools), images, FIELDS)
    return chat.of(_Continued(fields, items, tools))
