"""A receipt as the document shows it; `qualification/receipt/content.py` is what is written."""

from pydantic import Field

from server.http.common.schemas import Schema

_SHA256 = "SHA-256, in hexadecimal digits"
_LEFT_OUT = "null where the server leaves token ids out (--no-receipt-token-ids)"


class ReceiptGrammar(Schema):
    """Grammar that an answer was bound to, as the engine took it."""

    kind: str = Field(description="json_schema, regex or lark.")
    text: str
    tokens: list[int] = Field(description="Special tokens that a text in Lark names token_0, token_1, ...")
    before: "ReceiptGrammar | None" = Field(description="In Lark: what stands before the answer.")


class ReceiptBindings(Schema):
    """Sampling parameters that may repeat texts of the request."""

    stop: list[str]
    logit_bias: list[tuple[int, str]]
    allowed_token_ids: list[int]
    bad_words: list[list[int]] = Field(description="As token ids.")
    grammar: ReceiptGrammar | None


class ReceiptSampling(Schema):
    """Sampling parameters of one answer, after all defaults. Fractions are strings, as the seed is."""

    max_tokens: int
    min_tokens: int
    temperature: str = Field(description="0.0 takes the likeliest token.")
    top_k: int | None
    top_p: str
    min_p: str
    repetition_penalty: str
    presence_penalty: str
    frequency_penalty: str
    stop_token_ids: list[int]
    ignore_eos: bool
    seed: str | None = Field(description=f"null where nothing was drawn; {_LEFT_OUT}.")
    bindings: ReceiptBindings | None = Field(description=f"{_LEFT_OUT}.")
    bindings_digest: str = Field(description=f"{_SHA256}, of the canonical JSON of `bindings`.")


class ReceiptPrompt(Schema):
    num_tokens: int
    token_ids_digest: str = Field(description=f"{_SHA256}, of the ids as 4 bytes each, little endian.")
    token_ids: list[int] | None = Field(description=f"{_LEFT_OUT}.")
    text_digest: str | None = Field(
        description=f"{_SHA256}, of the rendered text; null where token ids were sent or a text was cut, "
        "unless `echo` gives their text."
    )


class ReceiptAnswer(Schema):
    index: int = Field(description="Of the choice.")
    prompt: int = Field(description="Its place among `prompts`.")
    sampling: ReceiptSampling
    num_tokens: int
    token_ids_digest: str = Field(description=f"{_SHA256}, of the ids as 4 bytes each, little endian.")
    token_ids: list[int] | None = Field(description=f"The end token included; {_LEFT_OUT}.")
    text_digest: str = Field(description=f"{_SHA256}, of the content.")
    reasoning_digest: str | None = Field(description=f"{_SHA256}, of the reasoning; null without any.")
    calls_digest: str | None = Field(
        description=f"{_SHA256}, of the canonical JSON of `[[name, arguments], ...]`; null where nothing was called."
    )
    logprobs: str | None = Field(description="Where asked for: base64 of fp32, little endian, one for each token.")
    finish_reason: str
    is_cut: bool = Field(description="Whether a stop string ended it.")


class ReceiptDecision(Schema):
    phase: str = Field(description="prefill, extend or decode, or the name of another operator than attention.")
    path: str
    status: str
    fallback_reasons: list[str]
    order: str | None = Field(
        description="The order in which the path sums; null where its bits may depend on the batch."
    )
    source_digest: str | None = Field(description="Of what the path's sources compute.")


class ReceiptCheck(Schema):
    result: str
    at: int = Field(description="Unix seconds.")
    id: str | None


class ReceiptContent(Schema):
    """The signed part: as JSON with sorted keys, without spaces, in UTF-8 (RFC 8785)."""

    version: int
    id: str
    created: int = Field(description="Unix seconds.")
    route: str
    model: str
    server_version: str
    weights_digest: str | None
    tokenizer_digest: str | None
    matrix_digest: str | None
    fingerprint: dict[str, str | int | None] = Field(description="GPU, driver and libraries.")
    settings: dict[str, str | int] = Field(description="Those that decide which numbers compute, where they are set.")
    reproducible: bool = Field(description="Whether bits depend on the request alone on this machine.")
    decisions: list[ReceiptDecision]
    attestation: ReceiptCheck | None = Field(description="The latest; null before the first.")
    layers: ReceiptCheck | None = Field(description="Of the layers against their reference; null where not checked.")
    prompts: list[ReceiptPrompt]
    answers: list[ReceiptAnswer]


class SignedReceipt(Schema):
    content: ReceiptContent
    key_id: str = Field(description="Of the key at GET /version.")
    signature: str = Field(description="Ed25519, of the canonical content; base64.")


RECEIPT = Field(
    None, description="Only where it was asked for, or the server always gives one; of a stream at its end."
)
