"""The served model, as OpenAI's clients list it, and as Anthropic's do, which send the header anthropic-version."""

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path

from fastapi import APIRouter, Request, Response
from pydantic import BaseModel

from server.edge.dialect import OPENAI, Dialect
from server.edge.routing import PlainRoute
from server.errors import InvalidValue, ModelNotFound, UnknownField
from server.http.anthropic.errors import ANTHROPIC
from server.http.anthropic.routes import COUNT_TOKENS, MESSAGES
from server.http.anthropic.schemas import AnthropicModel, AnthropicModelList, MessageError
from server.http.common.document import ErrorEnvelope, answers_with
from server.http.common.json_pieces import json_response
from server.http.common.query import Query, parameter
from server.http.openai.schemas import ModelCard, ModelList
from server.http.services import Services

MODELS = "/v1/models"
EVENTS = (MessageError,)  # which the document names, though no route's answer is one
_VERSION = "anthropic-version"  # a header that every client of Anthropic's sends, and no other
_BELOW = (f"{MODELS}/", f"{MESSAGES}/")
_LIFECYCLES = ("active", "deprecated", "retired")
_HEADER = parameter(
    _VERSION, "With any value the answer is Anthropic's, and its errors too.", {"type": "string"}, place="header"
)
_PAGING = [
    parameter("limit", "Anthropic's: models of a page.", {"type": "integer", "minimum": 1, "maximum": 1000}),
    parameter("after_id", "Anthropic's: the model before the page.", {"type": "string"}),
    parameter("before_id", "Anthropic's: the model behind the page.", {"type": "string"}),
    parameter(
        "lifecycle[]",
        "Anthropic's: stages that are listed; the served model is active.",
        {"type": "array", "items": {"type": "string", "enum": [*_LIFECYCLES]}},
    ),
]
# The client's `beta` resources say so in the query, and mean the same.
_KNOWN = frozenset({"limit", "after_id", "before_id", "lifecycle[]", "beta"})


def dialect_of(path: str, headers: Mapping[bytes, bytes]) -> Dialect:
    """Return the form of a request's errors: Anthropic's on its own routes, and for its clients beside them."""
    if path in (MESSAGES, COUNT_TOKENS):
        return ANTHROPIC
    is_theirs = (path == MODELS or path.startswith(_BELOW)) and _VERSION.encode() in headers
    return ANTHROPIC if is_theirs else OPENAI


def model_routes(services: Services) -> APIRouter:
    router = APIRouter(route_class=PlainRoute, tags=["OpenAI", "Anthropic"])
    both = (ErrorEnvelope, MessageError)

    @router.get(
        MODELS,
        response_model=ModelList | AnthropicModelList,
        openapi_extra=answers_with(InvalidValue, UnknownField, envelopes=both) | {"parameters": [_HEADER, *_PAGING]},
    )
    async def models(request: Request) -> Response:
        """List the served model, under each of its names."""
        if _VERSION in request.headers:
            return _json(_page([_anthropic_model(services, it) for it in services.model.names], Query(request, _KNOWN)))
        return _json(ModelList(object="list", data=[_openai_model(services, it) for it in services.model.names]))

    @router.get(
        MODELS + "/{name:path}",
        response_model=ModelCard | AnthropicModel,
        openapi_extra=answers_with(ModelNotFound, envelopes=both) | {"parameters": [_HEADER]},
    )
    async def model(request: Request) -> Response:
        """Return the served model by one of its names, which may have slashes."""
        name = request.path_params["name"]
        services.model.check_name(name)
        return _json(_anthropic_model(services, name) if _VERSION in request.headers else _openai_model(services, name))

    return router


def _openai_model(services: Services, name: str) -> ModelCard:
    ready = services.engine.ready
    sees_images = services.model.images is not None and ready is not None and ready.max_image_tokens > 0
    return ModelCard(
        id=name,
        object="model",
        created=services.program.started_at,
        owned_by="hallmark",
        root=_root_of(services.settings.model),
        input_modalities=["text", "image"] if sees_images else ["text"],
        task=services.model.task.value,  # type: ignore[arg-type]  # never `auto`
        max_model_len=ready.max_model_len if ready else None,  # not known before the engine has started
    )


def _root_of(model: str) -> str:
    """Return the hub id of a folder in the hub's cache, `models--ORG--NAME/snapshots/REVISION`, else the folder."""
    repository = Path(model).parent.parent.name
    is_cached = Path(model).parent.name == "snapshots" and repository.startswith("models--")
    return repository.removeprefix("models--").replace("--", "/") if is_cached else model


def _anthropic_model(services: Services, name: str) -> AnthropicModel:
    ready = services.engine.ready
    max_tokens = ready.max_model_len if ready else None
    return AnthropicModel(
        type="model",
        id=name,
        display_name=name,
        created_at=datetime.fromtimestamp(services.program.started_at, UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        lifecycle="active",
        max_input_tokens=max_tokens,
        max_tokens=max_tokens,
    )


def _page(models: Sequence[AnthropicModel], query: Query) -> AnthropicModelList:
    """A page of the models. Raises InvalidValue for a cursor that is no model here."""
    limit = query.number("limit", maximum=1000, default=20)
    stages = query.choices("lifecycle[]", _LIFECYCLES)
    ids = [model.id for model in models]
    places: dict[str, int | None] = {}
    for name in ("after_id", "before_id"):
        cursor = query.text(name)
        if cursor is not None and cursor not in ids:
            raise InvalidValue(f"{name}: there is no model {cursor[:128]!a} here.", param=name)
        places[name] = None if cursor is None else ids.index(cursor)
    after, before = places["after_id"], places["before_id"]
    found = [
        model for model in models[0 if after is None else after + 1 : before] if not stages or model.lifecycle in stages
    ]
    is_backward = before is not None and after is None  # a page before a model is the one next to it
    page = found[-limit:] if is_backward else found[:limit]
    first, last = (page[0].id, page[-1].id) if page else (None, None)
    return AnthropicModelList(data=page, has_more=len(found) > len(page), first_id=first, last_id=last)


def _json(answer: BaseModel) -> Response:
    return json_response(answer.model_dump_json().encode())
