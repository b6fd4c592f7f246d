"""The content of a receipt: what was asked, what was answered, and what computed it.

It holds integers, strings, booleans, nulls, arrays and objects, and no fractions: those are strings, as are seeds,
which JavaScript's numbers cannot hold. So its canonical form (RFC 8785) is JSON with sorted keys and without spaces.
"""

import hashlib
import struct
from collections.abc import Sequence
from typing import Any

import msgspec

VERSION = 2
READ_VERSIONS = (1, VERSION)  # the first says no settings
# Settings that decide which numbers compute; of others an answer depends by its batch alone, if at all.
SETTINGS = (
    "dtype", "quantization", "kv_cache_dtype", "kv_cache_dtype_skip_layers", "mamba_ssm_cache_dtype",
    "speculative_config", "speculative_tokens", "tensor_parallel_size", "page_size", "max_model_len", "load_format",
)  # fmt: skip


class ReceiptGrammar(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Grammar that an answer was bound to, as the engine took it."""

    kind: str  # json_schema, regex or lark
    text: str
    tokens: list[int]  # special tokens that a text in Lark names token_0, token_1, ...
    before: "ReceiptGrammar | None"  # in Lark: what stands before the answer


class Bindings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Sampling parameters that may repeat texts of the request."""

    stop: list[str]  # stop strings
    logit_bias: list[tuple[int, str]]
    allowed_token_ids: list[int]
    bad_words: list[list[int]]
    grammar: ReceiptGrammar | None


class ReceiptSampling(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Sampling parameters of one answer, after all defaults."""

    max_tokens: int
    min_tokens: int
    temperature: str
    top_k: int | None  # None: no limit
    top_p: str
    min_p: str
    repetition_penalty: str
    presence_penalty: str
    frequency_penalty: str
    stop_token_ids: list[int]
    ignore_eos: bool
    seed: str | None  # None: greedy, or token ids are left out
    bindings: Bindings | None  # None: token ids are left out
    bindings_digest: str  # of the canonical JSON of `bindings`


class ReceiptPrompt(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One prompt. Digests of ids are `digest_of_ids`, those of texts SHA-256 of their UTF-8."""

    num_tokens: int
    token_ids_digest: str
    token_ids: list[int] | None  # None: left out by a setting
    text_digest: str | None  # of the rendered text; None where token ids were sent or it was cut, without echo


class ReceiptAnswer(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One answer."""

    index: int  # of the choice
    prompt: int  # its place among the prompts
    sampling: ReceiptSampling
    num_tokens: int
    token_ids_digest: str
    token_ids: list[int] | None  # the end token included; None: left out by a setting
    text_digest: str  # of the content that was given out
    reasoning_digest: str | None  # of the reasoning; None where there is none
    calls_digest: str | None  # of the canonical JSON of [[name, arguments], ...]; None where nothing was called
    logprobs: str | None  # where asked for: base64 of fp32, little endian, one for each token
    finish_reason: str  # as OpenAI names it
    is_cut: bool  # a stop string ended it: the model might have gone on


class UsedDecision(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A distinct decision that served the request."""

    phase: str  # of attention, or the name of another operator, whose calls all phases share
    path: str
    status: str
    fallback_reasons: list[str]
    order: str | None  # in which the path sums; None: its bits may depend on the batch
    source_digest: str | None  # of what the path's sources compute


class CheckResult(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The latest result of a check of the whole server before the answer ended."""

    result: str
    at: int  # Unix seconds
    id: str | None = None


class Content(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """All that a receipt says. The signature is of `canonical(content)`."""

    version: int
    id: str  # of the request, as the ids of its answer end
    created: int  # Unix seconds
    route: str
    model: str
    server_version: str
    weights_digest: str | None
    tokenizer_digest: str | None
    matrix_digest: str | None
    fingerprint: dict[str, str | int | None]
    reproducible: bool
    decisions: list[UsedDecision]
    attestation: CheckResult | None  # None before the first
    layers: CheckResult | None  # None where no layer was checked
    prompts: list[ReceiptPrompt]
    answers: list[ReceiptAnswer]
    settings: dict[str, str | int] = {}  # those of `SETTINGS` that the server was given


def canonical(content: object) -> bytes:
    """Return the JSON that is signed: keys sorted, no spaces, UTF-8, as RFC 8785 has it for integers and strings."""
    return msgspec.json.encode(content, order="sorted")


def digest(data: bytes) -> str:
    """Return SHA-256 in hexadecimal digits."""
    return hashlib.sha256(data).hexdigest()


def digest_of_ids(token_ids: Sequence[int]) -> str:
    """Return SHA-256 of token ids, four bytes each, little endian."""
    return digest(struct.pack(f"<{len(token_ids)}I", *token_ids))


def digest_of_text(text: str) -> str:
    """Return SHA-256 of a text's UTF-8."""
    return digest(text.encode("utf-8", "surrogatepass"))


def as_json(content: Content) -> Any:
    """Return the content as plain objects, as clients have it."""
    return msgspec.to_builtins(content)
