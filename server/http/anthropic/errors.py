"""Errors in the envelope of Anthropic's clients."""

from collections.abc import Mapping
from typing import Any

import msgspec

from server.edge.dialect import Dialect
from server.errors import HallmarkError
from server.http.generation.event_stream import named_event

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    500: "api_error",
    503: "overloaded_error",
    504: "timeout_error",
}
_OTHERWISE = "invalid_request_error"
ERROR_TYPES = (*_TYPES.values(), _OTHERWISE)


def _error(error: HallmarkError, ids: Mapping[str, str]) -> dict[str, Any]:
    what = {"type": _TYPES.get(error.status, _OTHERWISE), "message": error.message}
    return {"type": "error", "error": {**what, "param": error.param, "code": error.code}, **ids}


def _envelope(error: HallmarkError, ids: Mapping[str, str]) -> bytes:
    return msgspec.json.encode(_error(error, ids))


def _event(error: HallmarkError, ids: Mapping[str, str]) -> bytes:
    return named_event(_error(error, ids))


ANTHROPIC = Dialect(_envelope, _event, id_headers=(b"request-id", b"x-request-id"))
