"""Requests of OpenAI's Responses API. What is not implemented is refused by its name, never ignored."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Discriminator, Field

from server.http.chat.requests import DETAIL, MM_KWARGS, Detail, ImageBounds
from server.http.common.fields import (
    MAX_MESSAGES,
    MAX_TOOLS,
    ArgumentsSchema,
    Biases,
    CacheSalt,
    ChatTemplateKwargs,
    ForWhom,
    FrequencyPenalty,
    HallmarkWanted,
    IgnoreEos,
    IncludeStop,
    Label,
    MinP,
    ModelName,
    PresencePenalty,
    Priority,
    ReceiptWanted,
    RepetitionPenalty,
    RequestId,
    Seed,
    SkipSpecialTokens,
    Stop,
    Stream,
    Temperature,
    Timeout,
    TokenCount,
    TopK,
    TopP,
)
from server.http.common.validation import NO_EFFECT, JsonObject, RequestModel, Text, Variants, tag

_Name = Annotated[Text, Field(min_length=1, max_length=256)]
_Status = Literal["in_progress", "completed", "incomplete"]


class _AnyText(RequestModel):
    unsupported: ClassVar[Mapping[str, tuple[object, ...]]] = {"annotations": ([],), "logprobs": ([],)}

    text: Text
    prompt_cache_breakpoint: JsonObject | None = Field(None, description=f"{NO_EFFECT}: prompts are cached anyway.")


class TextPart(_AnyText):
    type: Literal["input_text", "output_text", "text"]


class ReasoningPart(_AnyText):
    type: Literal["reasoning_text", "summary_text"]


class InputImage(RequestModel):
    unsupported: ClassVar[Mapping[str, tuple[object, ...]]] = {"file_id": ()}

    type: Literal["input_image"]
    image_url: Text = Field(description="`data:image/...;base64,` or, of hosts that the server allows, http(s).")
    detail: Detail | None = Field(None, description=DETAIL)
    prompt_cache_breakpoint: JsonObject | None = Field(None, description=f"{NO_EFFECT}: prompts are cached anyway.")


_PARTS = Variants(
    dict.fromkeys(("input_text", "output_text", "text"), TextPart) | {"input_image": InputImage},
    refused=("input_audio", "input_file", "refusal"),
)


def _kind_of_part(value: object) -> str | None:
    found = _PARTS.tag_of(value)
    return found if found is None or found == "=input_image" else "=a_text"


_Part = Annotated[
    Annotated[TextPart, tag("a_text")] | Annotated[InputImage, tag("input_image")],
    Discriminator(_kind_of_part, custom_error_type="wrong_type", custom_error_message="a list of parts"),
]


def _kind(value: object) -> str | None:
    return "=a_text" if isinstance(value, str) else "=list" if isinstance(value, list) else None


_Content = Annotated[
    Annotated[Text, tag("a_text")] | Annotated[Annotated[list[_Part], Field(fail_fast=True)], tag("list")],
    Discriminator(_kind, custom_error_type="wrong_type", custom_error_message="a string or a list of parts"),
]


class MessageItem(RequestModel):
    unsupported: ClassVar[Mapping[str, tuple[object, ...]]] = {"phase": ("final_answer",)}
    nested: ClassVar[Mapping[str, type[RequestModel] | Variants]] = {"content": _PARTS}

    type: Literal["message"] = "message"
    role: Literal["assistant", "developer", "system", "user"]
    content: _Content
    id: Label | None = None
    status: _Status | None = None


class CallItem(RequestModel):
    unsupported: ClassVar[Mapping[str, tuple[object, ...]]] = {
        "async": (False,),
        "caller": ({"type": "direct"},),
    }

    type: Literal["function_call"]
    call_id: _Name
    name: _Name
    namespace: _Name | None = None
    arguments: Text
    id: Label | None = None
    status: _Status | None = None


class CallOutputItem(RequestModel):
    unsupported: ClassVar[Mapping[str, tuple[object, ...]]] = {
        "caller": ({"type": "direct"},),
    }
    nested: ClassVar[Mapping[str, type[RequestModel] | Variants]] = {"output": _PARTS}

    type: Literal["function_call_output", "custom_tool_call_output"]
    call_id: _Name
    output: _Content
    name: _Name | None = Field(None, description=f"{NO_EFFECT}: the call has it.")
    namespace: _Name | None = Field(None, description=f"{NO_EFFECT}: the call has it.")
    id: Label | None = None
    status: _Status | None = None


class CustomCallItem(RequestModel):
    unsupported: ClassVar[Mapping[str, tuple[object, ...]]] = {
        "async": (False,),
        "caller": ({"type": "direct"},),
    }

    type: Literal["custom_tool_call"]
    call_id: _Name
    name: _Name
    namespace: _Name | None = None
    input: Text
    id: Label | None = None
    status: _Status | None = None


class SearchCallItem(RequestModel):
    """A call of the client's search for tools."""

    unsupported: ClassVar[Mapping[str, tuple[object, ...]]] = {"execution": ("client",)}

    type: Literal["tool_search_call"]
    call_id: _Name
    arguments: JsonObject = Field(default_factory=dict)
    id: Label | None = None
    status: _Status | None = None


class ReasoningItem(RequestModel):
    unsupported: ClassVar[Mapping[str, tuple[object, ...]]] = {"encrypted_content": ("",)}
    nested: ClassVar[Mapping[str, type[RequestModel] | Variants]] = {"content": ReasoningPart, "summary": ReasoningPart}

    type: Literal["reasoning"]
    summary: Annotated[list[ReasoningPart], Field(fail_fast=True)] = Field(default_factory=list)
    content: Annotated[list[ReasoningPart], Field(fail_fast=True)] = Field(default_factory=list)
    id: Label | None = None
    status: _Status | None = None


_ToolName = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_-]{1,128}$")]
# The model sees all tools at once, so there is nothing to defer.
_OF_TOOLS: Mapping[str, tuple[object, ...]] = {
    "allowed_callers": (["direct"],),
    "async": (False,),
    "defer_loading": (False, True),
    "output_schema": (),
}


class FunctionTool(RequestModel):
    unsupported: ClassVar[Mapping[str, tuple[object, ...]]] = _OF_TOOLS

    type: Literal["function"]
    name: _ToolName
    description: Text = ""
    parameters: ArgumentsSchema | None = None
    strict: bool | None = None


class CustomFormat(RequestModel):
    type: Literal["text"]


class GrammarFormat(RequestModel):
    type: Literal["grammar"]
    syntax: Literal["lark", "regex"]
    definition: Text


_CUSTOM_FORMATS = Variants({"text": CustomFormat, "grammar": GrammarFormat})


class CustomTool(RequestModel):
    """A tool whose input is a text."""

    unsupported: ClassVar[Mapping[str, tuple[object, ...]]] = _OF_TOOLS
    nested: ClassVar[Mapping[str, type[RequestModel] | Variants]] = {"format": _CUSTOM_FORMATS}

    type: Literal["custom"]
    name: _ToolName
    description: Text = ""
    format: (
        Annotated[
            Annotated[CustomFormat, tag("text")] | Annotated[GrammarFormat, tag("grammar")],
            Discriminator(_CUSTOM_FORMATS.tag_of, custom_error_type="wrong_type", custom_error_message="an object"),
        ]
        | None
    ) = Field(None, description="The model reads a grammar, which does not bind it.")


_INNER_TOOLS = Variants({"function": FunctionTool, "custom": CustomTool})
_InnerTool = Annotated[
    Annotated[FunctionTool, tag("function")] | Annotated[CustomTool, tag("custom")],
    Discriminator(_INNER_TOOLS.tag_of, custom_error_type="wrong_type", custom_error_message="a list of tools"),
]


class SearchTool(RequestModel):
    """A search for more tools, by the client or by OpenAI's servers."""

    type: Literal["tool_search"]
    execution: Literal["client", "server"] = "server"
    description: Text = ""
    parameters: ArgumentsSchema | None = None


class NamespaceTool(RequestModel):
    """Tools that belong together; Codex has one for each MCP server."""

    nested: ClassVar[Mapping[str, type[RequestModel] | Variants]] = {"tools": _INNER_TOOLS}

    type: Literal["namespace"]
    name: _ToolName
    description: Text = ""
    tools: Annotated[list[_InnerTool], Field(max_length=MAX_TOOLS, fail_fast=True)] = Field(default_factory=list)


_HOSTED = (
    "code_interpreter",
    "file_search",
    "image_generation",
    "mcp",
    "programmatic_tool_calling",
    "web_search",
    "web_search_2025_08_26",
    "web_search_preview",
    "web_search_preview_2025_03_11",
)


class HostedTool(RequestModel):
    """A tool that OpenAI's servers run. The model does not see it, whatever its options are."""

    is_open: ClassVar[bool] = True

    type: Literal[_HOSTED]  # type: ignore[valid-type]  # mypy wants the strings themselves


_OWN_TOOLS: Mapping[str, type[RequestModel]] = {
    "function": FunctionTool,
    "custom": CustomTool,
    "namespace": NamespaceTool,
    "tool_search": SearchTool,
}
_TOOLS = Variants(
    {**_OWN_TOOLS, **dict.fromkeys(_HOSTED, HostedTool)},
    refused=("apply_patch", "computer", "computer_use_preview", "local_shell", "shell"),  # a client would run these
)
Tool = FunctionTool | CustomTool | NamespaceTool | SearchTool | HostedTool


def _kind_of_tool(value: object) -> str | None:
    found = _TOOLS.tag_of(value)
    return "=hosted" if found is not None and found.removeprefix("=") in _HOSTED else found


_Tool = Annotated[
    Annotated[FunctionTool, tag("function")]
    | Annotated[CustomTool, tag("custom")]
    | Annotated[NamespaceTool, tag("namespace")]
    | Annotated[SearchTool, tag("tool_search")]
    | Annotated[HostedTool, tag("hosted")],
    Discriminator(_kind_of_tool, custom_error_type="wrong_type", custom_error_message="a list of tools"),
]
ToolList = Annotated[list[_Tool], Field(max_length=MAX_TOOLS, fail_fast=True)]


class AdditionalToolsItem(RequestModel):
    """Tools that a client gives within its input, as Codex does."""

    nested: ClassVar[Mapping[str, type[RequestModel] | Variants]] = {"tools": _TOOLS}

    type: Literal["additional_tools"]
    role: Literal["developer"] = "developer"
    tools: ToolList = Field(default_factory=list)
    id: Label | None = None


class SearchOutputItem(RequestModel):
    """Tools that the client's search has found: the model may call them."""

    unsupported: ClassVar[Mapping[str, tuple[object, ...]]] = {"execution": ("client",)}
    nested: ClassVar[Mapping[str, type[RequestModel] | Variants]] = {"tools": _TOOLS}

    type: Literal["tool_search_output"]
    call_id: _Name
    tools: ToolList = Field(default_factory=list)
    id: Label | None = None
    status: _Status | None = None


_ITEMS = Variants(
    {
        "message": MessageItem,
        "function_call": CallItem,
        "function_call_output": CallOutputItem,
        "custom_tool_call": CustomCallItem,
        "custom_tool_call_output": CallOutputItem,
        "additional_tools": AdditionalToolsItem,
        "tool_search_call": SearchCallItem,
        "tool_search_output": SearchOutputItem,
        "reasoning": ReasoningItem,
    },
    default="message",
    refused=(
        "apply_patch_call",
        "apply_patch_call_output",
        "code_interpreter_call",
        "compaction",
        "compaction_trigger",
        "computer_call",
        "computer_call_output",
        "configuration_update",
        "file_search_call",
        "image_generation_call",
        "item_reference",
        "local_shell_call",
        "local_shell_call_output",
        "mcp_approval_request",
        "mcp_approval_response",
        "mcp_call",
        "mcp_list_tools",
        "program",
        "program_output",
        "shell_call",
        "shell_call_output",
        "web_search_call",
    ),
)
Item = (
    MessageItem
    | CallItem
    | CallOutputItem
    | CustomCallItem
    | SearchCallItem
    | SearchOutputItem
    | AdditionalToolsItem
    | ReasoningItem
)


def _kind_of_item(value: object) -> str | None:
    found = _ITEMS.tag_of(value)
    return "=function_call_output" if found == "=custom_tool_call_output" else found


_Item = Annotated[
    Annotated[MessageItem, tag("message")]
    | Annotated[CallItem, tag("function_call")]
    | Annotated[CallOutputItem, tag("function_call_output")]
    | Annotated[CustomCallItem, tag("custom_tool_call")]
    | Annotated[SearchCallItem, tag("tool_search_call")]
    | Annotated[SearchOutputItem, tag("tool_search_output")]
    | Annotated[AdditionalToolsItem, tag("additional_tools")]
    | Annotated[ReasoningItem, tag("reasoning")],
    Discriminator(_kind_of_item, custom_error_type="wrong_type", custom_error_message="a list of items"),
]
_Items = Annotated[list[_Item], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]
_Input = Annotated[
    Annotated[Text, tag("a_text")] | Annotated[_Items, tag("list")],
    Discriminator(_kind, custom_error_type="wrong_type", custom_error_message="a string or a list of items"),
]


class NamedToolChoice(RequestModel):
    type: Literal["function", "custom"]
    name: _Name


_NAMED_OR_HOSTED = Variants(
    {"function": NamedToolChoice, "custom": NamedToolChoice, **dict.fromkeys(_HOSTED, HostedTool)}
)


def _kind_of_allowed(value: object) -> str | None:
    found = _NAMED_OR_HOSTED.tag_of(value)
    return found if found is None else "=hosted" if found.removeprefix("=") in _HOSTED else "=named"


_Allowed = Annotated[
    Annotated[NamedToolChoice, tag("named")] | Annotated[HostedTool, tag("hosted")],
    Discriminator(_kind_of_allowed, custom_error_type="wrong_type", custom_error_message="a list of tools"),
]


class AllowedToolChoice(RequestModel):
    nested: ClassVar[Mapping[str, type[RequestModel] | Variants]] = {"tools": _NAMED_OR_HOSTED}

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"] = Field(description="Whether the model may call one of them, or must.")
    tools: Annotated[list[_Allowed], Field(min_length=1, max_length=MAX_TOOLS, fail_fast=True)] = Field(
        description="Tools of the request. The model sees no others."
    )


_TOOL_CHOICES = Variants(
    {"function": NamedToolChoice, "custom": NamedToolChoice, "allowed_tools": AllowedToolChoice},
    refused=(
        *_HOSTED,
        "tool_search",
        "apply_patch",
        "computer",
        "computer_use",
        "computer_use_preview",
        "shell",
    ),
)


def _kind_of_choice(value: object) -> str | None:
    found = "=a_text" if isinstance(value, str) else _TOOL_CHOICES.tag_of(value)
    return found if found in (None, "=a_text", "=allowed_tools") else "=named"


_ToolChoice = Annotated[
    Annotated[Literal["none", "auto", "required"], tag("a_text")]
    | Annotated[NamedToolChoice, tag("named")]
    | Annotated[AllowedToolChoice, tag("allowed_tools")],
    Discriminator(_kind_of_choice, custom_error_type="wrong_type", custom_error_message="a string or an object"),
]


class Reasoning(RequestModel):
    unsupported: ClassVar[Mapping[str, tuple[object, ...]]] = {
        "context": ("auto", "all_turns"),  # the chat template has all reasoning of the conversation
        "generate_summary": ("auto", "concise", "detailed"),
        "mode": ("standard",),
        "summary": ("auto", "concise", "detailed"),
    }

    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None


class ResponsesStreamOptions(RequestModel):
    unsupported: ClassVar[Mapping[str, tuple[object, ...]]] = {"include_obfuscation": (False,)}


class PlainFormat(RequestModel):
    type: Literal["json_object", "text"]


class SchemaFormat(RequestModel):
    type: Literal["json_schema"]
    name: Annotated[str, Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")]
    json_schema: JsonObject = Field(alias="schema")
    description: Text = ""
    strict: bool | None = None


_FORMATS = Variants({"json_object": PlainFormat, "text": PlainFormat, "json_schema": SchemaFormat})


def _kind_of_format(value: object) -> str | None:
    found = _FORMATS.tag_of(value)
    return found if found is None or found == "=json_schema" else "=plain"


class TextConfig(RequestModel):
    nested: ClassVar[Mapping[str, type[RequestModel] | Variants]] = {"format": _FORMATS}

    verbosity: Literal["low", "medium", "high"] | None = None

    format: (
        Annotated[
            Annotated[PlainFormat, tag("plain")] | Annotated[SchemaFormat, tag("json_schema")],
            Discriminator(_kind_of_format, custom_error_type="wrong_type", custom_error_message="an object"),
        ]
        | None
    ) = None


Includable = Literal[
    "code_interpreter_call.outputs",
    "computer_call_output.output.image_url",
    "file_search_call.results",
    "message.input_image.image_url",
    "reasoning.encrypted_content",
    "web_search_call.action.sources",
    "web_search_call.results",
]


class ResponsesRequest(RequestModel):
    unsupported: ClassVar[Mapping[str, tuple[object, ...]]] = {
        "access_programs": (),
        "background": (False,),
        "background_options": (),
        "context_management": ([],),
        "conversation": (),
        "ec_transfer_params": (),
        "enable_response_messages": (False,),
        "image": (),
        "kv_transfer_params": (),
        "max_tool_calls": (),
        "media_io_kwargs": ({},),
        "moderation": (),
        "previous_input_messages": ([],),
        "prompt": (),
        "top_logprobs": (0,),
        "truncation": ("disabled",),
        "vllm_xargs": ({},),
    }
    nested: ClassVar[Mapping[str, type[RequestModel] | Variants]] = {
        "input": _ITEMS,
        "reasoning": Reasoning,
        "stream_options": ResponsesStreamOptions,
        "text": TextConfig,
        "tool_choice": _TOOL_CHOICES,
        "tools": _TOOLS,
    }

    model: ModelName = None
    input: _Input = Field(
        description="A text of the user, or messages, calls of functions, their outputs and reasoning, in their order.",
        examples=["Tell me a story."],
    )
    instructions: Text | None = Field(None, description="Text before the conversation, as a system message, this time.")
    previous_response_id: _Name | None = Field(
        None, description="An answer that is stored: its conversation stands before the input."
    )
    store: bool = Field(True, description="Whether the answer is kept, to be read and continued, while there is room.")
    stream: Stream = False
    stream_options: ResponsesStreamOptions | None = Field(None, description="Only where `stream` is true.")
    max_output_tokens: TokenCount | None = Field(
        None,
        description="Tokens that the answer may have; fewer where the context holds no more, which is the default.",
    )
    temperature: Temperature = None
    top_p: TopP = None
    tools: ToolList = Field(
        default_factory=list,
        description="Functions that the model may ask the client to call, custom tools and namespaces of both. The "
        "model does not see tools that OpenAI's servers run; `metadata.left_out_tools` of the answer names them.",
    )
    tool_choice: _ToolChoice | None = Field(
        None,
        description="Whether the model may, must or must not call a function, or which. With `allowed_tools` it sees "
        "and calls those alone. Default: it may.",
    )
    parallel_tool_calls: bool = Field(True, description="Whether the model may call several functions at once.")
    text: TextConfig | None = Field(None, description="The form of the answer: any text, or JSON, perhaps by a schema.")
    reasoning: Reasoning | None = Field(None, description="How much the model reasons, where its template can say so.")
    include_reasoning: bool = Field(True, description="Whether the answer has the model's reasoning.")
    include: Annotated[list[Includable], Field(max_length=16, fail_fast=True)] | None = Field(
        None, description=f"{NO_EFFECT}: reasoning is given as it is, and no answer has the rest."
    )
    metadata: dict[str, Label] | None = Field(None, description="Given back with the answer.")
    client_metadata: dict[str, Any] | None = Field(None, description=f"{NO_EFFECT}: what Codex says of itself.")
    top_k: TopK = None
    min_p: MinP = None
    seed: Seed = None
    repetition_penalty: RepetitionPenalty = None
    presence_penalty: PresencePenalty = 0.0
    frequency_penalty: FrequencyPenalty = 0.0
    stop: Stop = None
    ignore_eos: IgnoreEos = False
    include_stop_str_in_output: IncludeStop = False
    skip_special_tokens: SkipSpecialTokens = True
    logit_bias: Biases = Field(default_factory=dict)
    mm_processor_kwargs: ImageBounds | None = Field(None, description=MM_KWARGS)
    structured_outputs: JsonObject | None = Field(
        None,
        description="vLLM's: one of `json`, `regex`, `choice`, `grammar` and `json_object`; not with `text.format`.",
    )
    chat_template_kwargs: ChatTemplateKwargs = None
    cache_salt: CacheSalt = None
    priority: Priority = 0
    timeout: Timeout = None
    hallmark: HallmarkWanted = False
    receipt: ReceiptWanted = False
    prompt_cache_options: JsonObject | None = Field(None, description=f"{NO_EFFECT}: prompts are cached anyway.")
    prompt_cache_retention: Label | None = Field(None, description=f"{NO_EFFECT}: prompts are cached anyway.")
    service_tier: Literal["auto", "default"] | None = Field(None, description=f"{NO_EFFECT}: all are served alike.")
    request_id: RequestId = None
    user: ForWhom = None
    safety_identifier: ForWhom = None
    prompt_cache_key: ForWhom = None
