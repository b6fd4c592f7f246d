"""Answers as the document shows them. For speed `answers` writes those of the routes that generate without pydantic."""

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field


class Answer(BaseModel):
    model_config = ConfigDict(extra="forbid")


class PromptTokensDetails(Answer):
    cached_tokens: int = Field(description="Tokens of the prompt that were not computed again.")


class UsageCounts(Answer):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class PromptLogprobs(Answer):
    """Log probabilities of the prompt, with `echo`. Nothing precedes the first token, so it has none."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


FinishReason = Literal["stop", "length"]


class CompletionChoice(Answer):
    index: int
    text: str
    logprobs: PromptLogprobs | None
    finish_reason: FinishReason | None = Field(description="null in all chunks of a stream but a choice's last.")


class Completion(Answer):
    id: str
    object: Literal["text_completion"]
    created: int = Field(description="Unix seconds.")
    model: str
    choices: list[CompletionChoice]
    usage: UsageCounts


class CompletionChunk(Answer):
    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice] = Field(description="One, or none in the last chunk with the usage.")
    usage: UsageCounts | None = Field(None, description="With `stream_options.include_usage`: null but in the last.")


class AnswerMessage(Answer):
    role: Literal["assistant"]
    content: str
    refusal: None


class ChatChoice(Answer):
    index: int
    message: AnswerMessage
    logprobs: None
    finish_reason: FinishReason


class ChatCompletion(Answer):
    id: str
    object: Literal["chat.completion"]
    created: int = Field(description="Unix seconds.")
    model: str
    choices: list[ChatChoice]
    usage: UsageCounts


class ChatDelta(Answer):
    role: Literal["assistant"] = Field("assistant", description="In a choice's first chunk.")
    content: str = Field("", description="New text.")


class ChatChunkChoice(Answer):
    index: int
    delta: ChatDelta
    logprobs: None
    finish_reason: FinishReason | None


class ChatChunk(Answer):
    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    choices: list[ChatChunkChoice] = Field(description="One, or none in the last chunk with the usage.")
    usage: UsageCounts | None = Field(None, description="With `stream_options.include_usage`: null but in the last.")


class ModelCard(Answer):
    id: str
    object: Literal["model"]
    created: int = Field(description="Unix seconds of the server's start.")
    owned_by: Literal["hallmark"]
    max_model_len: int | None = Field(
        description="Tokens of prompt and completion; null before the engine has started."
    )


class ModelList(Answer):
    object: Literal["list"]
    data: list[ModelCard]


class Tokenized(Answer):
    count: int
    max_model_len: int
    tokens: list[int]


class Detokenized(Answer):
    prompt: str
