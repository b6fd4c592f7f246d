"""/openapi.json, made of the routes and the pydantic models that the routes use.

A route that takes a body reads it by itself (`PlainRoute` in server/edge/routing.py); `takes` says which model it
validates and which errors it may answer with. What every route may answer with is added here: the guard's errors, and
the key that it asks for.
"""

import re
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel, Field
from pydantic.json_schema import models_json_schema

from server import errors
from server.edge.keys import Access, KeyKind
from server.http.common.provenance import HEADERS, Provenance
from server.http.common.validation import RequestModel

_ERRORS_KEY = "x-errors"  # in an operation, until the document is whole
_ENVELOPES_KEY = "x-envelopes"
_OF_ALL = (
    errors.InvalidHttp,
    errors.InvalidHeader,
    errors.HeadersTooLarge,
    errors.RequestTimeout,
    errors.PayloadTooLarge,
    errors.TooManyRequests,
    errors.RateLimited,
    errors.InternalError,
    errors.ShuttingDown,
)
_OF_BODIES = (
    errors.InvalidJson,
    errors.UnknownField,
    errors.UnsupportedField,
    errors.InvalidValue,
    errors.UnsupportedMediaType,
    errors.DeadlineExceeded,
)
_RETRY_AFTER = {"Retry-After": {"description": "Seconds to wait.", "schema": {"type": "integer", "minimum": 1}}}
_DESCRIPTION = """\
Routes of OpenAI's API, of Anthropic's messages, and of Hallmark's operators.

A field that is not implemented is refused by its name, never ignored, but for this closed list. **Taken, and changes
nothing:** {without_effect}. **Not implemented on any route, taken with the values in
its schema only, which ask for nothing:** {fields}. What one route implements and another does not (`tools`, say) is in
the schema of each. A null counts as absent, under any name.

Each error has the envelope `ErrorEnvelope`, and Anthropic's on Anthropic's routes; its `code` is stable, its `message`
names the field, the limit and the kind of the value, never a text of the request. In a stream that has begun it is an
event of its own, before `data: [DONE]`. `X-Request-Id` and `traceparent` are taken from the request and given back. A
key may come as X-Api-Key, too.
"""


class ErrorBody(BaseModel):
    message: str = Field(description="What is wrong, for people.")
    type: str = Field(description="OpenAI's class of the error.")
    param: str | None = Field(description="The field that is to blame.")
    code: str = Field(description="What is wrong, for programs.")
    request_id: str | None = Field(None, description="As in the header X-Request-Id.")
    trace_id: str | None = Field(None, description="Of a request that generates.")


class ErrorEnvelope(BaseModel):
    error: ErrorBody
    hallmark: Provenance | None = Field(None, description="Where asked for, and kernels had served the request.")


def takes(
    model: type[RequestModel],
    *refusals: type[errors.HallmarkError],
    is_required: bool = True,
    envelope: type[BaseModel] = ErrorEnvelope,
) -> dict[str, Any]:
    """The `openapi_extra` of a route that reads a JSON body. `envelope`: of its errors."""
    content = {"application/json": {"schema": {"$ref": f"#/components/schemas/{model.__name__}"}}}
    body = {"requestBody": {"required": is_required, "content": content}}
    return body | answers_with(*_OF_BODIES, *refusals, envelopes=(envelope,))


def answers_with(
    *refusals: type[errors.HallmarkError], envelopes: Iterable[type[BaseModel]] = (ErrorEnvelope,)
) -> dict[str, Any]:
    """The `openapi_extra` of a route with errors of its own. `envelopes`: those its errors may have."""
    return {
        _ERRORS_KEY: [kind.__name__ for kind in refusals],
        _ENVELOPES_KEY: [envelope.__name__ for envelope in envelopes],
    }


def streams(
    model: type[BaseModel],
    description: str = "The whole answer, or with `stream` events `data: {chunk}` and at the end `data: [DONE]`.",
    *,
    last: str | None = None,
) -> dict[int | str, dict[str, Any]]:
    """The `responses` of a route that may answer with server-sent events; `last`: what the last one is, if no JSON."""
    chunk = {"$ref": f"#/components/schemas/{model.__name__}"}
    data: dict[str, Any] = {"type": "string", "contentMediaType": "application/json", "contentSchema": chunk}
    if last is not None:
        data = {"anyOf": [data, {"type": "string", "const": last}]}
    event = {"type": "object", "properties": {"event": {"type": "string"}, "data": data}, "required": ["data"]}
    # As FastAPI documents its own streams, and OpenAPI 3.2 any.
    content = {"text/event-stream": {"itemSchema": event}}
    return {200: {"description": description, "headers": HEADERS, "content": content}}


def document(
    app: FastAPI, access: Access, requests: Iterable[type[RequestModel]], events: Iterable[type[BaseModel]]
) -> None:
    """Make `app` answer with its document.

    requests, events  the models that its routes name by `takes` and `streams`
    """
    requests = tuple(requests)
    models = [*[(model, "validation") for model in requests], *[(model, "serialization") for model in events]]

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            app.openapi_schema = _schema(app, access, models, requests)
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]  # as FastAPI's documentation extends it


def _schema(app: FastAPI, access: Access, models: Any, requests: Iterable[type[RequestModel]]) -> dict[str, Any]:
    taken = {(name, model.has_effect(name)) for model in requests for name in model.model_fields}
    honoured = {name for name, has_effect in taken if has_effect}
    fields = {name for model in requests for name in model.unsupported} - {name for name, _ in taken}
    without_effect = {name for name, _ in taken} - honoured
    description = _DESCRIPTION.format(fields=_listed(fields), without_effect=_listed(without_effect))
    schema = get_openapi(title=app.title, version=app.version, description=description, routes=app.routes)
    components = schema.setdefault("components", {})
    schemas = components.setdefault("schemas", {})
    _, definitions = models_json_schema(
        [*models, (ErrorEnvelope, "serialization")], ref_template="#/components/schemas/{model}"
    )
    schemas |= definitions["$defs"]
    for unused in ("HTTPValidationError", "ValidationError"):  # FastAPI's 422: no route here answers with it
        schemas.pop(unused, None)
    components["securitySchemes"] = {
        kind.value: {
            "type": "http",
            "scheme": "bearer",
            "description": f"The key of {kind.value}.",
        }
        for kind in KeyKind
    }
    for path, operations in schema["paths"].items():
        key = access.needed_key(path)
        for operation in operations.values():
            operation["security"] = [] if key is None else [{kind.value: []} for kind in KeyKind if kind.opens(key)]
            _add_refusals(operation, key)
            _add_path_parameters(operation, path)
    return schema


def _add_path_parameters(operation: dict[str, Any], path: str) -> None:
    """Add what FastAPI does not see, since the endpoint of a `PlainRoute` takes nothing but the request."""
    known = {parameter["name"] for parameter in operation.get("parameters", ())}
    missing = [name for name in re.findall(r"{(\w+)}", path) if name not in known]
    if missing:
        operation["parameters"] = [
            *operation.get("parameters", ()),
            *({"name": name, "in": "path", "required": True, "schema": {"type": "string"}} for name in missing),
        ]


def _listed(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in sorted(set(names)))


def _add_refusals(operation: dict[str, Any], key: KeyKind | None) -> None:
    names = operation.pop(_ERRORS_KEY, [])
    envelopes = operation.pop(_ENVELOPES_KEY, [ErrorEnvelope.__name__])
    references = [{"$ref": f"#/components/schemas/{name}"} for name in envelopes]
    envelope = references[0] if len(references) == 1 else {"anyOf": references}
    kinds = [*_OF_ALL, *(getattr(errors, name) for name in names)]
    if key is not None:
        kinds.append(errors.Unauthorized)
    if key is KeyKind.OPERATOR:
        kinds.append(errors.Forbidden)
    by_status: defaultdict[int, list[str]] = defaultdict(list)
    for kind in kinds:
        by_status[kind.status].append(f"`{kind.code}`: {kind.__doc__}")
    responses = operation["responses"]
    responses.pop("422", None)
    for status, lines in sorted(by_status.items()):
        description = "\n\n".join(dict.fromkeys(lines))
        response: dict[str, Any] = responses.setdefault(str(status), {"description": "", "content": {}})
        response["description"] = "\n\n".join(filter(None, [response["description"], description]))
        media = response["content"].setdefault("application/json", {"schema": envelope})
        if media["schema"] != envelope:
            media["schema"] = {"anyOf": [media["schema"], envelope]}
        if status in (429, 503):
            response["headers"] = _RETRY_AFTER
