"""Requests as Anthropic's clients send them. What is not implemented is refused by its name, never ignored."""

from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal

from pydantic import Discriminator, Field

from server.http.common.fields import (
    MAX_MESSAGES,
    MAX_TOKENS,
    MAX_TOOLS,
    ArgumentsSchema,
    ChatTemplateKwargs,
    HallmarkWanted,
    ModelName,
    Priority,
    ReceiptWanted,
    StopStrings,
    Stream,
    Temperature,
    Timeout,
    TokenCount,
    TopK,
    TopP,
)
from server.http.common.validation import NO_EFFECT, JsonObject, RequestModel, Text, Variants, tag

_Name = Annotated[Text, Field(min_length=1, max_length=256)]


class CacheControl(RequestModel):
    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] | None = None
    scope: Annotated[Text, Field(max_length=64)] | None = None


class CachedModel(RequestModel):
    """Part that may have a `cache_control`, without effect: the beginning of every prompt is kept."""

    nested: ClassVar[Mapping[str, type[RequestModel] | Variants]] = {"cache_control": CacheControl}

    cache_control: CacheControl | None = Field(None, description=NO_EFFECT)


class TextBlock(CachedModel):
    unsupported: ClassVar[Mapping[str, tuple[object, ...]]] = {"citations": ([],)}

    type: Literal["text"]
    text: Text


class ToolReferenceBlock(CachedModel):
    """A deferred tool that the client's search has found: from here on the model sees it."""

    type: Literal["tool_reference"]
    tool_name: _Name


class Base64Source(RequestModel):
    type: Literal["base64"]
    media_type: Literal["image/gif", "image/jpeg", "image/png", "image/webp"]
    data: Text


class UrlSource(RequestModel):
    type: Literal["url"]
    url: Text


_SOURCES = Variants({"base64": Base64Source, "url": UrlSource}, refused=("file",))


class ImageBlock(CachedModel):
    nested: ClassVar[Mapping[str, type[RequestModel] | Variants]] = {
        "cache_control": CacheControl,
        "source": _SOURCES,
    }

    type: Literal["image"]
    source: Annotated[
        Annotated[Base64Source, tag("base64")] | Annotated[UrlSource, tag("url")],
        Discriminator(_SOURCES.tag_of, custom_error_type="wrong_type", custom_error_message="an object"),
    ]


_RESULT_BLOCKS = Variants(
    {"text": TextBlock, "image": ImageBlock, "tool_reference": ToolReferenceBlock},
    refused=("browser_state", "document", "search_result"),
)
_ResultBlock = Annotated[
    Annotated[TextBlock, tag("text")]
    | Annotated[ImageBlock, tag("image")]
    | Annotated[ToolReferenceBlock, tag("tool_reference")],
    Discriminator(_RESULT_BLOCKS.tag_of, custom_error_type="wrong_type", custom_error_message="a list of blocks"),
]


def _kind(value: object) -> str | None:
    return "=a_text" if isinstance(value, str) else "=list" if isinstance(value, list) else None


_TEXT_OR_BLOCKS = Discriminator(
    _kind, custom_error_type="wrong_type", custom_error_message="a string or a list of blocks"
)
_Texts = Annotated[
    Annotated[Text, tag("a_text")] | Annotated[Annotated[list[TextBlock], Field(fail_fast=True)], tag("list")],
    _TEXT_OR_BLOCKS,
]


_Result = Annotated[
    Annotated[Text, tag("a_text")] | Annotated[Annotated[list[_ResultBlock], Field(fail_fast=True)], tag("list")],
    _TEXT_OR_BLOCKS,
]


class ThinkingBlock(RequestModel):
    type: Literal["thinking"]
    thinking: Text
    signature: Text = Field("", description="Of a block without a text, the text that this server has put there.")


class RedactedThinkingBlock(RequestModel):
    """Reasoning of another model: it is left out."""

    type: Literal["redacted_thinking"]
    data: Text


class ToolUseBlock(CachedModel):
    unsupported: ClassVar[Mapping[str, tuple[object, ...]]] = {"caller": ({"type": "direct"},), "toolset_name": ()}

    type: Literal["tool_use"]
    id: _Name
    name: _Name
    input: JsonObject


class ToolResultBlock(CachedModel):
    unsupported: ClassVar[Mapping[str, tuple[object, ...]]] = {"toolset_name": ()}
    nested: ClassVar[Mapping[str, type[RequestModel] | Variants]] = {
        "cache_control": CacheControl,
        "content": _RESULT_BLOCKS,
    }

    type: Literal["tool_result"]
    tool_use_id: _Name
    content: _Result = ""
    is_error: bool = Field(False, description="The model reads the text behind 'Error: '.")


_BLOCKS = Variants(
    {
        "text": TextBlock,
        "image": ImageBlock,
        "thinking": ThinkingBlock,
        "redacted_thinking": RedactedThinkingBlock,
        "tool_use": ToolUseBlock,
        "tool_result": ToolResultBlock,
    },
    refused=(
        "advisor_tool_result",
        "bash_code_execution_tool_result",
        "code_execution_tool_result",
        "compaction",
        "container_upload",
        "document",
        "fallback",
        "mcp_tool_listing",
        "mcp_tool_result",
        "mcp_tool_use",
        "search_result",
        "server_tool_use",
        "text_editor_code_execution_tool_result",
        "tool_addition",
        "tool_removal",
        "tool_search_tool_result",
        "web_fetch_tool_result",
        "web_search_tool_result",
    ),
)
Block = TextBlock | ImageBlock | ThinkingBlock | RedactedThinkingBlock | ToolUseBlock | ToolResultBlock
_Block = Annotated[
    Annotated[TextBlock, tag("text")]
    | Annotated[ImageBlock, tag("image")]
    | Annotated[ThinkingBlock, tag("thinking")]
    | Annotated[RedactedThinkingBlock, tag("redacted_thinking")]
    | Annotated[ToolUseBlock, tag("tool_use")]
    | Annotated[ToolResultBlock, tag("tool_result")],
    Discriminator(_BLOCKS.tag_of, custom_error_type="wrong_type", custom_error_message="a list of blocks"),
]
_Content = Annotated[
    Annotated[Text, tag("a_text")] | Annotated[Annotated[list[_Block], Field(fail_fast=True)], tag("list")],
    _TEXT_OR_BLOCKS,
]


class Turn(RequestModel):
    unsupported: ClassVar[Mapping[str, tuple[object, ...]]] = {"clear_at": (), "output_config": ()}
    nested: ClassVar[Mapping[str, type[RequestModel] | Variants]] = {"content": _BLOCKS}

    role: Literal["assistant", "system", "user"]
    content: _Content


class ClientTool(CachedModel):
    unsupported: ClassVar[Mapping[str, tuple[object, ...]]] = {
        "allowed_callers": (["direct"],),
        "eager_input_streaming": (True, False),  # arguments are streamed as they come either way
        "input_examples": ([],),
    }

    type: Literal["custom"] = "custom"
    name: Annotated[str, Field(pattern=r"^[a-zA-Z0-9_-]{1,128}$")]
    description: Text = ""
    input_schema: ArgumentsSchema
    strict: bool = False
    defer_loading: bool = Field(
        False, description="Whether the model sees the tool only behind a `tool_reference` to it."
    )


_SERVER_TOOLS = (
    "advisor_20260301",
    "code_execution_20250522",
    "code_execution_20250825",
    "code_execution_20260120",
    "code_execution_20260521",
    "mcp_toolset",
    "tool_search_tool_bm25",
    "tool_search_tool_bm25_20251119",
    "tool_search_tool_regex",
    "tool_search_tool_regex_20251119",
    "web_fetch_20250910",
    "web_fetch_20260209",
    "web_fetch_20260309",
    "web_fetch_20260318",
    "web_search_20250305",
    "web_search_20260209",
    "web_search_20260318",
)


class ServerTool(RequestModel):
    """A tool that Anthropic's servers run. The model does not see it, whatever its options are."""

    is_open: ClassVar[bool] = True

    type: Literal[_SERVER_TOOLS]  # type: ignore[valid-type]  # mypy wants the strings themselves
    name: Text = ""


_TOOLS = Variants(
    {"custom": ClientTool} | dict.fromkeys(_SERVER_TOOLS, ServerTool),
    default="custom",
    refused=(  # a client would run these
        "bash_20241022",
        "bash_20250124",
        "browser_toolset_20260801",
        "computer_20241022",
        "computer_20250124",
        "computer_20251124",
        "computer_toolset_20260801",
        "memory_20250818",
        "text_editor_20241022",
        "text_editor_20250124",
        "text_editor_20250429",
        "text_editor_20250728",
    ),
)


def _kind_of_tool(value: object) -> str | None:
    found = _TOOLS.tag_of(value)
    return found if found is None or found == "=custom" else "=server"


_AnyTool = Annotated[
    Annotated[ClientTool, tag("custom")] | Annotated[ServerTool, tag("server")],
    Discriminator(_kind_of_tool, custom_error_type="wrong_type", custom_error_message="a list of tools"),
]


class FreeToolChoice(RequestModel):
    type: Literal["any", "auto", "none"]
    disable_parallel_tool_use: bool = False


class FixedToolChoice(RequestModel):
    type: Literal["tool"]
    name: _Name
    disable_parallel_tool_use: bool = False


_TOOL_CHOICES = Variants(dict.fromkeys(("any", "auto", "none"), FreeToolChoice) | {"tool": FixedToolChoice})


def _kind_of_choice(value: object) -> str | None:
    found = _TOOL_CHOICES.tag_of(value)
    return found if found is None or found == "=tool" else "=free"


_ToolChoice = Annotated[
    Annotated[FreeToolChoice, tag("free")] | Annotated[FixedToolChoice, tag("tool")],
    Discriminator(_kind_of_choice, custom_error_type="wrong_type", custom_error_message="an object"),
]


class Thinking(RequestModel):
    unsupported: ClassVar[Mapping[str, tuple[object, ...]]] = {"block_binding": ()}

    type: Literal["adaptive", "disabled", "enabled"]
    display: Literal["summarized", "omitted", "updates"] | None = Field(
        None, description="Unless `summarized`, the thinking of the answer is empty and its signature holds it."
    )
    budget_tokens: int | None = Field(None, ge=1, le=MAX_TOKENS, description=NO_EFFECT)


class OutputFormat(RequestModel):
    type: Literal["json_schema"]
    json_schema: JsonObject = Field(alias="schema")


class OutputConfig(RequestModel):
    unsupported: ClassVar[Mapping[str, tuple[object, ...]]] = {"task_budget": ()}
    nested: ClassVar[Mapping[str, type[RequestModel] | Variants]] = {"format": OutputFormat}

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: OutputFormat | None = None


class ThinkingTurns(RequestModel):
    type: Literal["thinking_turns"]
    value: int = Field(ge=1, le=MAX_MESSAGES)


class AllThinking(RequestModel):
    type: Literal["all"]


_KEPT_THINKING = Variants({"thinking_turns": ThinkingTurns, "all": AllThinking})


def _kind_of_kept(value: object) -> str | None:
    return "=a_text" if isinstance(value, str) else _KEPT_THINKING.tag_of(value)


class ClearThinking(RequestModel):
    nested: ClassVar[Mapping[str, type[RequestModel] | Variants]] = {"keep": _KEPT_THINKING}

    type: Literal["clear_thinking_20251015"]
    keep: Annotated[
        Annotated[Literal["all"], tag("a_text")]
        | Annotated[ThinkingTurns, tag("thinking_turns")]
        | Annotated[AllThinking, tag("all")],
        Discriminator(_kind_of_kept, custom_error_type="wrong_type", custom_error_message="all or an object"),
    ] = Field(default_factory=lambda: ThinkingTurns(type="thinking_turns", value=1))


class Trigger(RequestModel):
    type: Literal["input_tokens", "tool_uses"]
    value: int = Field(ge=0, le=MAX_TOKENS)


class TokenTrigger(RequestModel):
    type: Literal["input_tokens"]
    value: int = Field(ge=0, le=MAX_TOKENS)


class KeptToolUses(RequestModel):
    type: Literal["tool_uses"]
    value: int = Field(ge=0, le=MAX_TOKENS)


def _kind_of_inputs(value: object) -> str | None:
    return "=flag" if isinstance(value, bool) else "=list" if isinstance(value, list) else None


_ToolNames = Annotated[list[_Name], Field(max_length=MAX_TOOLS, fail_fast=True)]


class ClearToolUses(RequestModel):
    nested: ClassVar[Mapping[str, type[RequestModel] | Variants]] = {
        "clear_at_least": TokenTrigger,
        "keep": KeptToolUses,
        "trigger": Trigger,
    }

    type: Literal["clear_tool_uses_20250919"]
    trigger: Trigger = Field(default_factory=lambda: Trigger(type="input_tokens", value=100_000))
    keep: KeptToolUses = Field(default_factory=lambda: KeptToolUses(type="tool_uses", value=3))
    clear_at_least: TokenTrigger | None = None
    clear_tool_inputs: Annotated[
        Annotated[bool, tag("flag")] | Annotated[_ToolNames, tag("list")],
        Discriminator(_kind_of_inputs, custom_error_type="wrong_type", custom_error_message="true, false or names"),
    ] = False
    exclude_tools: _ToolNames = Field(default_factory=list)


class Compact(RequestModel):
    is_open: ClassVar[bool] = True
    nested: ClassVar[Mapping[str, type[RequestModel] | Variants]] = {"trigger": TokenTrigger}

    type: Literal["compact_20260112"]
    trigger: TokenTrigger = Field(
        default_factory=lambda: TokenTrigger(type="input_tokens", value=150_000),
        description="A longer prompt is refused: compaction is not implemented.",
    )


_EDITS = Variants(
    {"clear_thinking_20251015": ClearThinking, "clear_tool_uses_20250919": ClearToolUses, "compact_20260112": Compact}
)
_Edit = Annotated[
    Annotated[ClearThinking, tag("clear_thinking_20251015")]
    | Annotated[ClearToolUses, tag("clear_tool_uses_20250919")]
    | Annotated[Compact, tag("compact_20260112")],
    Discriminator(_EDITS.tag_of, custom_error_type="wrong_type", custom_error_message="a list of edits"),
]


class ContextManagement(RequestModel):
    nested: ClassVar[Mapping[str, type[RequestModel] | Variants]] = {"edits": _EDITS}

    edits: Annotated[list[_Edit], Field(max_length=16, fail_fast=True)] = Field(default_factory=list)


class Metadata(RequestModel):
    user_id: Annotated[Text, Field(max_length=512)] | None = None


class CountTokensRequest(RequestModel):
    """The fields that make the prompt."""

    unsupported: ClassVar[Mapping[str, tuple[object, ...]]] = {
        "billing_policy": (),
        "compaction": (),
        "ec_transfer_params": (),
        "fallback_credit_token": (),
        "fallbacks": ([],),
        "kv_transfer_params": (),
        "mcp_servers": ([],),
        "speed": ("standard",),
        "thread": (),
        "user_profile_id": (),
        "workspace_id": (),
    }
    nested: ClassVar[Mapping[str, type[RequestModel] | Variants]] = {
        "cache_control": CacheControl,
        "context_management": ContextManagement,
        "messages": Turn,
        "output_config": OutputConfig,
        "system": Variants({"text": TextBlock}),
        "thinking": Thinking,
        "tool_choice": _TOOL_CHOICES,
        "tools": _TOOLS,
    }

    model: ModelName = None
    messages: Annotated[list[Turn], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)] = Field(
        description="The conversation. The answer goes on with a last turn of the assistant. Texts of a turn are "
        "joined by newlines.",
        examples=[[{"role": "user", "content": "Tell me a story."}]],
    )
    system: _Texts | None = Field(None, description="Text before the conversation, as a system message.")
    tools: Annotated[list[_AnyTool], Field(max_length=MAX_TOOLS, fail_fast=True)] = Field(
        default_factory=list,
        description="Tools that the model may ask the client to call. The model does not see tools that Anthropic's "
        "servers run; `left_out_tools` of the answer names them.",
    )
    tool_choice: _ToolChoice | None = Field(None, description="Whether the model may, must or must not call a tool.")
    thinking: Thinking | None = Field(
        None, description="Whether the model reasons before it answers, where it can do both. Default: `disabled`."
    )
    output_config: OutputConfig | None = Field(
        None,
        description="How much the model reasons, where its template can say so, and a schema that binds the answer.",
    )
    chat_template_kwargs: ChatTemplateKwargs = None
    cache_control: CacheControl | None = Field(None, description=f"{NO_EFFECT}: prompts are cached anyway.")
    context_management: ContextManagement | None = Field(
        None,
        description="Which thinking and which results of tools are left out of the prompt; a compaction is refused "
        "once its trigger is reached.",
    )


class MessagesRequest(CountTokensRequest):
    unsupported: ClassVar[Mapping[str, tuple[object, ...]]] = {
        **CountTokensRequest.unsupported,
        "container": (),
        "diagnostics": (),
        "inference_geo": (),
    }
    nested: ClassVar[Mapping[str, type[RequestModel] | Variants]] = {
        **CountTokensRequest.nested,
        "metadata": Metadata,
    }

    max_tokens: TokenCount = Field(
        description="Tokens that the answer may have; fewer where the context holds no more, and the answer then ends "
        "with `model_context_window_exceeded`.",
        examples=[32],
    )
    stream: Stream = False
    stop_sequences: StopStrings = Field(
        default_factory=list, description="Strings that end an answer; they are not part of it."
    )
    temperature: Temperature = None
    top_p: TopP = None
    top_k: TopK = None
    priority: Priority = 0
    timeout: Timeout = None
    hallmark: HallmarkWanted = False
    receipt: ReceiptWanted = False
    metadata: Metadata | None = Field(None, description=f"{NO_EFFECT}: an identifier of your end user, not stored.")
    service_tier: Literal["auto", "standard_only"] | None = Field(
        None, description=f"{NO_EFFECT}: all are served alike."
    )
