"""The kernels that served an answer: how they are asked for, and the object that names them.

The guard's responder adds the headers to every answer of a request with a record, so that a route does nothing for
them. The object has the same facts, from the same record.
"""

from collections.abc import Callable, Iterator
from typing import Any

import msgspec
from pydantic import Field
from starlette.types import Scope

from kernels.vocabulary.buckets import bucket_of
from server.errors import InvalidHeader
from server.http.common.schemas import Schema
from server.supervisor.requests import AttestationRequests
from server.telemetry.request import RequestRecord

HEADER = b"x-hallmark"  # 1 asks for the object, as the field `hallmark` does
FIELD = "hallmark"
# Adds the kernels to an answer, or to its last event, where the request asks for them.
Namer = Callable[[bytes], bytes]
HEADERS = {  # of an answer, for the document
    "X-Hallmark-Status": {
        "description": "How well the kernels are proven that had served the request when the answer began: "
        "the worst of `proven`, `provisional`, `stale`, `unproven`, `failed` and `quarantined`.",
        "schema": {"type": "string"},
    },
    "X-Hallmark-Layers": {
        "description": "Whether the layers compute what the plain forward pass of the checkpoint's own tensors does: "
        "`proven`, `failed` or `not checked`. `failed` makes the status `failed` too.",
        "schema": {"type": "string"},
    },
    "X-Hallmark-Plan": {
        "description": "The digest of the matrix that the plan was made with, or `none`.",
        "schema": {"type": "string"},
    },
    "X-Hallmark-Receipt": {
        "description": "`sha256:` and the digest of the content of the answer's receipt, where it has one and is no "
        "stream.",
        "schema": {"type": "string"},
    },
}


class ServedPhase(Schema):
    """One decision that served the request."""

    phase: str = Field(description="prefill, extend or decode; tower, which computed the prompt's images.")
    path: str
    status: str
    fallback_reasons: list[str] = Field(description="Of the closed list of reasons; empty where it is no fallback.")


class LatestAttestation(Schema):
    """The latest attestation before the answer ended. GET /attention has all of it."""

    id: str
    at: float = Field(description="Unix seconds.")
    result: str = Field(description="match, mismatch or error.")


class Provenance(Schema):
    """The kernels that served an answer."""

    status: str | None = Field(description="The worst status of the phases.")
    phases: list[ServedPhase] = Field(description="Each distinct decision, in the order of their first use.")
    bucket: str | None = Field(description="Of the longest prompt's tokens.")
    cached_tokens: int = Field(description="Of the prompts, found in the prefix cache and not computed again.")
    ttft_ms: float | None = Field(description="From the request's arrival to its first token.")
    matrix_digest: str | None
    layers: str | None = Field(description="proven, failed or not checked: at the start of the engine.")
    attestation: LatestAttestation | None = Field(description="null before the first.")


def is_wanted(scope: Scope, field: bool) -> bool:
    """Return whether a request asks for its kernels, by its field or by the header. Raises InvalidHeader."""
    values = {value.strip() for name, value in scope["headers"] if name == HEADER}
    if not values <= {b"0", b"1"}:
        raise InvalidHeader("The header X-Hallmark must be 1 or 0.")
    return field or b"1" in values


def provenance_of(record: RequestRecord, attestations: AttestationRequests) -> Provenance:
    """The kernels that have served a request so far."""
    longest, first_token_at, latest = record.longest_prompt, record.first_token_at, attestations.latest
    return Provenance(
        status=record.kernel_status,
        phases=[ServedPhase(**msgspec.structs.asdict(use)) for use in record.uses],
        bucket=None if longest is None else bucket_of(longest).label,
        cached_tokens=record.num_cached_tokens,
        ttft_ms=None if first_token_at is None else round(1000 * (first_token_at - record.arrived_at), 3),
        matrix_digest=record.matrix_digest,
        layers=None if record.layers is None else record.layers.value,
        attestation=None if latest is None else LatestAttestation(id=latest.id, at=latest.at, result=latest.result),
    )


def with_provenance(answer: bytes, provenance: Provenance) -> bytes:
    """Add the field `hallmark` to the JSON object that ends `answer`: a body, or the last of its events."""
    end = answer.rindex(b"}")
    fields: dict[str, Any] = provenance.model_dump()
    return b"".join((answer[:end], b',"', FIELD.encode(), b'":', msgspec.json.encode(fields), answer[end:]))


def unnamed(answer: bytes) -> bytes:
    """Return the answer as it is: its request does not ask for the kernels."""
    return answer


def named_pieces(answer: Iterator[bytes], name: Namer) -> Iterator[bytes]:
    """The pieces of an answer, the last of them with the kernels, where the request asks for them."""
    last = next(answer)
    for piece in answer:
        yield last
        last = piece
    yield name(last)
