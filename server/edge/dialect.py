"""The forms that clients of different protocols expect errors in."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import msgspec

from server.errors import HallmarkError

ErrorBytes = Callable[[HallmarkError, Mapping[str, str]], bytes]  # of an error and the ids that find it in the logs


@dataclass(frozen=True, slots=True)
class Dialect:
    """Form in which a client expects an error."""

    envelope: ErrorBytes  # a body
    event: ErrorBytes  # the last events of a stream that has begun
    id_headers: tuple[bytes, ...] = (b"x-request-id",)


DialectOf = Callable[[str, Mapping[bytes, bytes]], Dialect]  # of a request's path and headers


def openai_envelope(error: HallmarkError, ids: Mapping[str, str]) -> bytes:
    """The error as OpenAI's clients expect it, with `ids`: when a stream fails, its headers are long gone."""
    fields = {"message": error.message, "type": error.type, "param": error.param, "code": error.code}
    return msgspec.json.encode({"error": {**fields, **ids}})


def _openai_event(error: HallmarkError, ids: Mapping[str, str]) -> bytes:
    return b"data: " + openai_envelope(error, ids) + b"\n\ndata: [DONE]\n\n"


OPENAI = Dialect(openai_envelope, _openai_event)
