"""Answers and events as the document shows them; `message` writes them without pydantic."""

from typing import Annotated, Any, Literal

from pydantic import Field, RootModel

from server.http.anthropic.errors import ERROR_TYPES
from server.http.common.provenance import Provenance
from server.http.common.receipt_schema import RECEIPT, SignedReceipt
from server.http.common.schemas import PROVENANCE, Schema


class AnswerText(Schema):
    type: Literal["text"]
    text: str


class AnswerThinking(Schema):
    type: Literal["thinking"]
    thinking: str
    signature: str = Field(description="Empty: nothing is signed.")


class AnswerToolUse(Schema):
    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any] = Field(description="`malformed_arguments` alone where the model has written no JSON object.")


AnswerBlock = AnswerText | AnswerThinking | AnswerToolUse
StopReason = Literal["end_turn", "max_tokens", "model_context_window_exceeded", "stop_sequence", "tool_use"]


class ThinkingCount(Schema):
    thinking_tokens: int


class MessageUsage(Schema):
    input_tokens: int = Field(description="Of the prompt, without those of `cache_read_input_tokens`.")
    cache_creation_input_tokens: int = 0
    cache_read_input_tokens: int = Field(0, description="Of the prompt, not computed again.")
    output_tokens: int
    output_tokens_details: ThinkingCount | None = None


class ClearedThinking(Schema):
    type: Literal["clear_thinking_20251015"]
    cleared_thinking_turns: int
    cleared_input_tokens: int


class ClearedToolUses(Schema):
    type: Literal["clear_tool_uses_20250919"]
    cleared_tool_uses: int
    cleared_input_tokens: int


class EditsApplied(Schema):
    applied_edits: list[ClearedThinking | ClearedToolUses] = Field(description="Those that changed the conversation.")


_EDITS = Field(None, description="Where the request has `context_management`.")


class MessageAnswer(Schema):
    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[AnswerBlock]
    stop_reason: StopReason | None = Field(description="null in `message_start` alone.")
    stop_sequence: str | None
    usage: MessageUsage
    context_management: EditsApplied | None = _EDITS
    left_out_tools: list[str] | None = Field(None, description="Types of tools that the model did not see.")
    hallmark: Provenance | None = PROVENANCE
    receipt: SignedReceipt | None = RECEIPT


class MessageStart(Schema):
    type: Literal["message_start"]
    message: MessageAnswer


class Ping(Schema):
    type: Literal["ping"]


class BlockStart(Schema):
    type: Literal["content_block_start"]
    index: int
    content_block: AnswerBlock


class BlockTextDelta(Schema):
    type: Literal["text_delta"]
    text: str


class BlockThinkingDelta(Schema):
    type: Literal["thinking_delta"]
    thinking: str


class BlockSignatureDelta(Schema):
    type: Literal["signature_delta"]
    signature: str


class BlockJsonDelta(Schema):
    type: Literal["input_json_delta"]
    partial_json: str


class BlockDelta(Schema):
    type: Literal["content_block_delta"]
    index: int
    delta: BlockTextDelta | BlockThinkingDelta | BlockSignatureDelta | BlockJsonDelta


class BlockStop(Schema):
    type: Literal["content_block_stop"]
    index: int


class StopDelta(Schema):
    stop_reason: StopReason
    stop_sequence: str | None


class MessageDelta(Schema):
    type: Literal["message_delta"]
    delta: StopDelta
    usage: MessageUsage
    context_management: EditsApplied | None = _EDITS


class MessageStop(Schema):
    type: Literal["message_stop"]
    hallmark: Provenance | None = PROVENANCE
    receipt: SignedReceipt | None = RECEIPT


class MessageErrorBody(Schema):
    type: Literal[ERROR_TYPES]  # type: ignore[valid-type]  # mypy wants the strings themselves
    message: str = Field(description="What is wrong, for people.")
    param: str | None = Field(description="The field that is to blame.")
    code: str = Field(description="What is wrong, for programs.")


class MessageError(Schema):
    type: Literal["error"]
    error: MessageErrorBody
    request_id: str | None = Field(None, description="As in the headers Request-Id and X-Request-Id.")
    trace_id: str | None = Field(None, description="Of a request that generates.")
    hallmark: Provenance | None = PROVENANCE


_Event = Annotated[
    MessageStart | Ping | BlockStart | BlockDelta | BlockStop | MessageDelta | MessageStop | MessageError,
    Field(discriminator="type"),
]


class MessageEvent(RootModel[_Event]):
    """One of the events of a stream, named by its `type`."""


class TokensBefore(Schema):
    original_input_tokens: int


class TokenCount(Schema):
    input_tokens: int
    context_management: TokensBefore | None = Field(
        None, description="Where the request has it: the tokens before its edits."
    )


class AnthropicModel(Schema):
    type: Literal["model"]
    id: str
    display_name: str
    created_at: str = Field(description="RFC 3339, of the server's start.")
    lifecycle: Literal["active"]
    max_input_tokens: int | None = Field(
        description="Tokens of prompt and answer together; null before the engine has started."
    )
    max_tokens: int | None = Field(description="The same: what the prompt leaves of them, an answer may have.")


class AnthropicModelList(Schema):
    data: list[AnthropicModel] = Field(description="The served model, under each of its names.")
    has_more: bool
    first_id: str | None = Field(description="null where nothing is listed.")
    last_id: str | None
