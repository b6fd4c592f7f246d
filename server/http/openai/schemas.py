"""Answers as the document shows them. For speed `answers` writes those of the routes that generate without pydantic."""

from typing import Literal

from pydantic import Field

from server.http.common.provenance import Provenance
from server.http.common.receipt_schema import RECEIPT, SignedReceipt
from server.http.common.schemas import PROVENANCE, Schema


class PromptTokensDetails(Schema):
    cached_tokens: int = Field(description="Tokens of the prompt that were not computed again.")


class CompletionTokensDetails(Schema):
    reasoning_tokens: int = Field(description="Tokens of the answers that are reasoning.")


class UsageCounts(Schema):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails | None = Field(
        None, description="Of a chat whose model reasons or has tools."
    )


class Logprobs(Schema):
    """Log probabilities of an answer's tokens, with `echo` of its prompt's before them.

    Nothing precedes a prompt's first token, so it has none.
    """

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int] = Field(description="Where each token begins in `text`, in characters.")


class PromptToken(Schema):
    logprob: float
    rank: int = Field(description="Among all tokens there; 1 is the likeliest.")
    decoded_token: str


class NamedLogprob(Schema):
    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(NamedLogprob):
    top_logprobs: list[NamedLogprob] = Field(description="The likeliest tokens at this place.")


class ChatLogprobs(Schema):
    content: list[TokenLogprob] = Field(description="One for each token that the usage counts.")
    refusal: None


FinishReason = Literal["stop", "length"]
PromptLogprobs = list[dict[str, PromptToken] | None]
_TOKEN_IDS = Field(None, description="With `return_token_ids`; in a stream those since the chunk before.")
_PROMPT_TOKEN_IDS = Field(None, description="With `return_token_ids`; in a stream in the first chunk.")
_PROMPT_LOGPROBS = Field(None, description="With `prompt_logprobs`: of each token of the prompt but the first, by id.")
ChatFinishReason = Literal["stop", "length", "tool_calls"]
_SYSTEM_FINGERPRINT = Field(
    description="`hallmark-VERSION-FINGERPRINT`, the last as the metric build_info has it: it changes with the "
    "server's version, the machine or its software."
)


class CompletionChoice(Schema):
    index: int
    text: str
    logprobs: Logprobs | None
    finish_reason: FinishReason | None = Field(description="null in all chunks of a stream but a choice's last.")
    token_ids: list[int] | None = _TOKEN_IDS
    prompt_token_ids: list[int] | None = _PROMPT_TOKEN_IDS
    prompt_logprobs: PromptLogprobs | None = _PROMPT_LOGPROBS


class Completion(Schema):
    id: str
    object: Literal["text_completion"]
    created: int = Field(description="Unix seconds.")
    model: str
    system_fingerprint: str | None = _SYSTEM_FINGERPRINT
    choices: list[CompletionChoice]
    usage: UsageCounts
    hallmark: Provenance | None = PROVENANCE
    receipt: SignedReceipt | None = RECEIPT


class CompletionChunk(Schema):
    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    system_fingerprint: str | None = _SYSTEM_FINGERPRINT
    choices: list[CompletionChoice] = Field(description="One, or none in the last chunk with the usage.")
    usage: UsageCounts | None = Field(None, description="With `stream_options.include_usage`: null but in the last.")
    hallmark: Provenance | None = PROVENANCE
    receipt: SignedReceipt | None = RECEIPT


class AnsweredFunction(Schema):
    name: str
    arguments: str = Field(description="JSON, if the model has written JSON.")


class AnsweredCall(Schema):
    id: str
    type: Literal["function"]
    function: AnsweredFunction


class AnswerMessage(Schema):
    role: Literal["assistant"]
    content: str | None = Field(description="null where the answer is calls and nothing else.")
    refusal: None
    reasoning_content: str | None = Field(None, description="What the model thought before it answered.")
    reasoning: str | None = Field(None, description="The same.")
    tool_calls: list[AnsweredCall] | None = None


class ChatChoice(Schema):
    index: int
    message: AnswerMessage
    logprobs: ChatLogprobs | None
    finish_reason: ChatFinishReason
    token_ids: list[int] | None = _TOKEN_IDS


class ChatCompletion(Schema):
    id: str
    object: Literal["chat.completion"]
    created: int = Field(description="Unix seconds.")
    model: str
    system_fingerprint: str | None = _SYSTEM_FINGERPRINT
    choices: list[ChatChoice]
    usage: UsageCounts
    prompt_token_ids: list[int] | None = _PROMPT_TOKEN_IDS
    prompt_logprobs: PromptLogprobs | None = _PROMPT_LOGPROBS
    hallmark: Provenance | None = PROVENANCE
    receipt: SignedReceipt | None = RECEIPT


class FunctionDelta(Schema):
    name: str | None = Field(None, description="In a call's first chunk.")
    arguments: str = Field(description="New text of the arguments.")


class CallDelta(Schema):
    index: int
    id: str | None = Field(None, description="In a call's first chunk.")
    type: Literal["function"] | None = Field(None, description="In a call's first chunk.")
    function: FunctionDelta


class ChatDelta(Schema):
    role: Literal["assistant"] = Field("assistant", description="In a choice's first chunk.")
    content: str | None = Field("", description="New text; null in the first chunk of an answer that may be a call.")
    reasoning_content: str = Field("", description="New text of the reasoning.")
    reasoning: str = Field("", description="The same.")
    tool_calls: list[CallDelta] | None = None


class ChatChunkChoice(Schema):
    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None
    finish_reason: ChatFinishReason | None
    token_ids: list[int] | None = _TOKEN_IDS


class ChatChunk(Schema):
    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    system_fingerprint: str | None = _SYSTEM_FINGERPRINT
    choices: list[ChatChunkChoice] = Field(description="One, or none in the last chunk with the usage.")
    usage: UsageCounts | None = Field(None, description="With `stream_options.include_usage`: null but in the last.")
    prompt_token_ids: list[int] | None = _PROMPT_TOKEN_IDS
    hallmark: Provenance | None = PROVENANCE
    receipt: SignedReceipt | None = RECEIPT


class ModelCard(Schema):
    id: str
    object: Literal["model"]
    created: int = Field(description="Unix seconds of the server's start.")
    owned_by: Literal["hallmark"]
    root: str = Field(description="Folder or hub id of the model (--model).")
    task: Literal["generate", "embed", "score"] = Field(description="What the model is served for (--task).")
    input_modalities: list[Literal["text", "image"]] = Field(description="What its messages may hold.")
    max_model_len: int | None = Field(
        description="Tokens of prompt and completion; null before the engine has started."
    )


class ModelList(Schema):
    object: Literal["list"]
    data: list[ModelCard]


class Tokenized(Schema):
    count: int
    max_model_len: int
    tokens: list[int]


class Detokenized(Schema):
    prompt: str
