"""Requests and answers of the routes for probes and operators."""

from typing import Any, ClassVar, Literal

from pydantic import Field

from server.http.common.schemas import Schema
from server.http.common.validation import RequestModel


class AttestRequest(RequestModel):
    """Empty: every path is attested, and a field that asks for less must not be ignored."""

    unknown_field_message: ClassVar[str] = "There is no field {field!r} here: the body is {{}} or empty."


class QuarantineRequest(RequestModel):
    unknown_field_message: ClassVar[str] = "There is no field {field!r} here; there are: path, shape."
    missing_field_message: ClassVar[str] = "The field {field!r} is missing; path must be the name of a kernel path."

    path: str = Field(description="The name of a kernel path.", examples=["triton.decode"])
    shape: str | None = Field(None, description="A shape as GET /attention writes it; absent for all shapes.")


class Health(Schema):
    status: Literal["ok", "unavailable"]
    reasons: list[str] | None = Field(None, description="Only where it is unavailable.")


class Load(Schema):
    server_load: int = Field(description="Requests that generate and have not ended, as vLLM names it: the next two.")
    num_running: int = Field(description="Requests whose prompts all have their first token.")
    num_waiting: int = Field(description="Requests that wait for a first token.")


class ReceiptKey(Schema):
    """A key that has signed receipts since the start."""

    key_id: str = Field(description="The first 16 digits of SHA-256 of the key's 32 bytes.")
    algorithm: Literal["ed25519"]
    public_key: str = Field(description="Its 32 bytes in base64.")
    is_current: bool = Field(description="Whether it signs the next receipt.")


class Version(Schema):
    version: str
    fingerprint: dict[str, Any] | None = Field(
        description="GPU, driver and libraries; null before the engine is ready."
    )
    receipt_keys: list[ReceiptKey] = Field(description="The current one first; empty where there are no receipts.")


class PathAndShape(Schema):
    path: str
    shape: str


class Rejection(Schema):
    code: str = Field(description="One of the closed list of reasons.")
    detail: str


class MatrixName(Schema):
    digest: str | None
    verdict: str | None


class ShapeReport(Schema):
    """The decision for one shape."""

    shape: str
    phase: str
    query_bucket: str
    context_bucket: str
    head_dim: int | None = Field(description="null for another operator than attention.")
    path: str | None = Field(description="What serves it; null where nothing may.")
    status: str
    wanted: str = Field(description="The path that would serve it, were nothing in the way.")
    fallback_reasons: list[str]
    is_fallback: bool
    rejected: dict[str, list[Rejection]] = Field(description="By path; empty where a path is only less preferred.")
    matrix_digest: str | None
    evidence: dict[str, float | str | bool | None] | None
    notes: list[str] = Field(
        description="How measured times chose, where the catalog says otherwise; weights that were re-encoded."
    )
    order: str | None = Field(description="In which the path sums; null unless --reproducible.")


class ExplainedTimeReport(Schema):
    """Time of a forward pass on its device, by what is known of the kernels."""

    share: float = Field(description="0 to 1: in kernels of valid evidence and in small ones that are named.")
    seconds: dict[str, float] = Field(description="By class: evidence, named, unproven, unexplained.")
    unproven: dict[str, float] = Field(
        description="Seconds in kernels of an operator without valid evidence; at most 8, the longest first."
    )
    unexplained: dict[str, float] = Field(description="Seconds in kernels that no list names, as `unproven`.")


class AttestedBatchReport(Schema):
    """One forward pass of a batch that belongs to no request."""

    phase: str
    paths: list[str]
    is_replay: bool = Field(description="Of a CUDA graph.")
    kernels: dict[str, int] = Field(description="Launches of each attention kernel.")
    result: str = Field(description="match, mismatch or error.")
    detail: str | None
    explained: ExplainedTimeReport | None = Field(description="Null where the kernels could not be timed.")


class Attestation(Schema):
    """The kernels that forward passes launched, held against those of the evidence."""

    type: Literal["AttestationReport"]
    trigger: str = Field(description="start, request or timer.")
    result: str = Field(description="The worst of the batches'.")
    at: float = Field(description="Unix seconds.")
    busy_s: float = Field(description="Seconds for which the engine made no step.")
    batches: list[AttestedBatchReport]
    quarantined: list[tuple[str, str]] = Field(description="(path, shape) pairs that serve no more.")
    id: str = Field(description="As in the field `hallmark` of an answer.")


class ShadowCheck(Schema):
    """Something that a client's step computed, which was computed again in fp64."""

    type: Literal["ShadowReport"]
    result: str = Field(description="match, mismatch or skipped.")
    at: float = Field(description="Unix seconds.")
    phase: str = Field(description="Of attention; or `linear`, `experts`, `collective` or `recurrence`.")
    path: str = Field(description="`none` where the step has told a path what is wrong.")
    layer: int | None = Field(description="null for the head of the model.")
    head: int | None = Field(
        description="Of the largest error, among its rank's; null for products, or where nothing was compared."
    )
    position: int | None = Field(
        description="Of the query with the largest error, in its sequence; of a product its row in the step."
    )
    num_rows: int = Field(description="Rows that were compared.")
    weight: str | None = Field(description="Of a product: the name of its weight in the layer.")
    rank: int = Field(description="That has computed it; 0 where there is one.")
    factor: float | None = Field(description="The largest error as a share of its limit.")
    detail: str | None
    spent_s: float = Field(description="Seconds spent on checks since the report before.")
    quarantined: list[tuple[str, str]] = Field(description="(path, shape) pairs that serve no more.")


class ReplayedAnswer(Schema):
    """An answer that was served, computed again alone and compared."""

    type: Literal["ReplayReport"]
    result: str = Field(description="match, mismatch, beyond_limits, skipped or preempted.")
    at: float = Field(description="Unix seconds.")
    route: str = Field(description="By which it was served: preempted, forked, hit, chunked, batched or plain.")
    cause: str | None = Field(description="Where the first difference is: logits, sampling or cache.")
    place: int | None = Field(description="Of the first token of the answer that differs, from 0.")
    num_tokens: int = Field(description="Of the answer, that were compared.")
    factor: float | None = Field(
        description="The largest distance of log probabilities as a share of its limit; null where bits must be equal."
    )
    detail: str | None
    spent_s: float
    traceparent: str | None = Field(description="Of the request.")
    request_id: str | None = Field(description="Of the request, in the engine.")


class Layers(Schema):
    """The check at the start: each layer held to the plain forward pass of the checkpoint's own tensors."""

    status: str = Field(description="proven, failed or not checked.")
    detail: str = Field(description="The first difference beyond its limit, or why nothing was checked.")
    num_layers: int
    at: float = Field(description="Unix seconds when they were checked; 0 where they were not.")
    num_numbers: int = Field(description="Numbers that were compared.")
    largest: float | None = Field(description="The largest difference as a share of its limit.")
    seconds: float = Field(description="Seconds that the check took.")
    is_cached: bool = Field(description="Whether an earlier start on this machine has made it.")


class StatesReport(Schema):
    """The memory of recurrent states: slots beside the pages, one for each sequence that runs."""

    num_slots: int
    num_for_snapshots: int = Field(description="Of them, beyond those of sequences that run at once.")
    slot_bytes: int = Field(description="On each rank.")


class DraftsReport(Schema):
    """Tokens that are drafted, and verified in one step."""

    method: str = Field(description="ngram, or mtp: the model's own head, by any of its names.")
    num_tokens: int = Field(description="Of each sequence and step.")
    max_seqs: int | None = Field(
        description="Decoding sequences, with more of which none are drafted, which a counter counts. Null: any number."
    )


class AttentionReport(Schema):
    model: str
    model_digests: dict[str, str | None]
    state: str
    on_unproven: str
    reproducible: bool = Field(description="Whether paths whose bits depend on the batch serve nothing.")
    fingerprint: dict[str, Any] | None
    matrix: MatrixName | None
    layers: Layers | None
    attention_layers: int | None
    states: StatesReport | None = Field(description="Of a model with recurrent layers.")
    drafts: DraftsReport | None = Field(description="Null where no tokens are drafted.")
    launches: dict[str, int] = Field(description="By path, since the start; a draft head's too.")
    attestation: Attestation | None = Field(description="The latest.")
    shadow_checks: list[ShadowCheck]
    replays: list[ReplayedAnswer]
    overridden: list[PathAndShape] = Field(description="Taken out of service by an operator.")
    num_fallbacks: int
    shapes: list[ShapeReport]


class FallbackReport(Schema):
    shape: str
    path: str | None
    wanted: str
    reasons: list[str]


class QuarantineReport(Schema):
    overridden: list[PathAndShape]
    fallbacks: list[FallbackReport]
