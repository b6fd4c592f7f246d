"""Requests of OpenAI's Responses API. What is not implemented is refused by its name, never ignored."""

from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal

from pydantic import Discriminator, Field

from server.http.common.validation import NO_EFFECT, RequestModel, Text, Variants, tag
from server.http.openai.requests import MAX_MESSAGES, Stop
from server.http.openai.tools import MAX_TOOLS, JsonObject
from server.text.sampling_defaults import LEAST_REPETITION_PENALTY

_MAX_TOKENS = 2**31 - 1
_Name = Annotated[Text, Field(min_length=1, max_length=256)]
_Label = Annotated[Text, Field(max_length=512)]
_Status = Literal["in_progress", "completed", "incomplete"]


class _Part(RequestModel):
    unsupported: ClassVar[Mapping[str, tuple[object, ...]]] = {"annotations": ([],), "logprobs": ([],)}

    text: Text


class TextPart(_Part):
    type: Literal["input_text", "output_text", "text"]


class ReasoningPart(_Part):
    type: Literal["reasoning_text", "summary_text"]


_PARTS = Variants(
    dict.fromkeys(("input_text", "output_text", "text"), TextPart),
    refused=("input_audio", "input_file", "input_image", "refusal"),
)


def _kind(value: object) -> str | None:
    return "=a_text" if isinstance(value, str) else "=list" if isinstance(value, list) else None


_Content = Annotated[
    Annotated[Text, tag("a_text")] | Annotated[Annotated[list[TextPart], Field(fail_fast=True)], tag("list")],
    Discriminator(_kind, custom_error_type="wrong_type", custom_error_message="a string or a list of parts"),
]


class MessageItem(RequestModel):
    unsupported: ClassVar[Mapping[str, tuple[object, ...]]] = {"phase": ("final_answer",)}
    nested: ClassVar[Mapping[str, type[RequestModel] | Variants]] = {"content": _PARTS}

    type: Literal["message"] = "message"
    role: Literal["assistant", "developer", "system", "user"]
    content: _Content
    id: _Label | None = None
    status: _Status | None = None


class CallItem(RequestModel):
    unsupported: ClassVar[Mapping[str, tuple[object, ...]]] = {
        "async": (False,),
        "caller": ({"type": "direct"},),
        "namespace": (),
    }

    type: Literal["function_call"]
    call_id: _Name
    name: _Name
    arguments: Text
    id: _Label | None = None
    status: _Status | None = None


class CallOutputItem(RequestModel):
    unsupported: ClassVar[Mapping[str, tuple[object, ...]]] = {
        "caller": ({"type": "direct"},),
        "name": (),
        "namespace": (),
    }
    nested: ClassVar[Mapping[str, type[RequestModel] | Variants]] = {"output": _PARTS}

    type: Literal["function_call_output"]
    call_id: _Name
    output: _Content
    id: _Label | None = None
    status: _Status | None = None


class ReasoningItem(RequestModel):
    unsupported: ClassVar[Mapping[str, tuple[object, ...]]] = {"encrypted_content": ("",)}
    nested: ClassVar[Mapping[str, type[RequestModel] | Variants]] = {"content": ReasoningPart, "summary": ReasoningPart}

    type: Literal["reasoning"]
    summary: Annotated[list[ReasoningPart], Field(fail_fast=True)] = Field([])
    content: Annotated[list[ReasoningPart], Field(fail_fast=True)] = Field([])
    id: _Label | None = None
    status: _Status | None = None


_ITEMS = Variants(
    {
        "message": MessageItem,
        "function_call": CallItem,
        "function_call_output": CallOutputItem,
        "reasoning": ReasoningItem,
    },
    default="message",
    refused=(
        "additional_tools",
        "apply_patch_call",
        "apply_patch_call_output",
        "code_interpreter_call",
        "compaction",
        "compaction_trigger",
        "computer_call",
        "computer_call_output",
        "configuration_update",
        "custom_tool_call",
        "custom_tool_call_output",
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
        "tool_search_call",
        "tool_search_output",
        "web_search_call",
    ),
)
Item = MessageItem | CallItem | CallOutputItem | ReasoningItem
_Item = Annotated[
    Annotated[MessageItem, tag("message")]
    | Annotated[CallItem, tag("function_call")]
    | Annotated[CallOutputItem, tag("function_call_output")]
    | Annotated[ReasoningItem, tag("reasoning")],
    Discriminator(_ITEMS.tag_of, custom_error_type="wrong_type", custom_error_message="a list of items"),
]
_Items = Annotated[list[_Item], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]
_Input = Annotated[
    Annotated[Text, tag("a_text")] | Annotated[_Items, tag("list")],
    Discriminator(_kind, custom_error_type="wrong_type", custom_error_message="a string or a list of items"),
]


class FunctionTool(RequestModel):
    unsupported: ClassVar[Mapping[str, tuple[object, ...]]] = {
        "allowed_callers": (["direct"],),
        "async": (False,),
        "defer_loading": (False,),
        "output_schema": (),
    }

    type: Literal["function"]
    name: Annotated[str, Field(pattern=r"^[a-zA-Z0-9_-]{1,128}$")]
    description: Text = ""
    parameters: JsonObject | None = None
    strict: bool | None = None


_TOOLS = Variants(
    {"function": FunctionTool},
    refused=(
        "apply_patch",
        "code_interpreter",
        "computer",
        "computer_use_preview",
        "custom",
        "file_search",
        "image_generation",
        "local_shell",
        "mcp",
        "namespace",
        "programmatic_tool_calling",
        "shell",
        "tool_search",
        "web_search",
        "web_search_2025_08_26",
        "web_search_preview",
        "web_search_preview_2025_03_11",
    ),
)


class NamedToolChoice(RequestModel):
    type: Literal["function"]
    name: _Name


_TOOL_CHOICES = Variants({"function": NamedToolChoice}, refused=("allowed_tools", "custom", "mcp", "apply_patch"))


def _kind_of_choice(value: object) -> str | None:
    return "=a_text" if isinstance(value, str) else "=named" if isinstance(value, dict) else None


_ToolChoice = Annotated[
    Annotated[Literal["none", "auto", "required"], tag("a_text")] | Annotated[NamedToolChoice, tag("named")],
    Discriminator(_kind_of_choice, custom_error_type="wrong_type", custom_error_message="a string or an object"),
]


class Reasoning(RequestModel):
    unsupported: ClassVar[Mapping[str, tuple[object, ...]]] = {
        "context": ("auto",),
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
    unsupported: ClassVar[Mapping[str, tuple[object, ...]]] = {"verbosity": ("medium",)}
    nested: ClassVar[Mapping[str, type[RequestModel] | Variants]] = {"format": _FORMATS}

    format: (
        Annotated[
            Annotated[PlainFormat, tag("plain")] | Annotated[SchemaFormat, tag("json_schema")],
            Discriminator(_kind_of_format, custom_error_type="wrong_type", custom_error_message="an object"),
        ]
        | None
    ) = None


class ResponsesRequest(RequestModel):
    unsupported: ClassVar[Mapping[str, tuple[object, ...]]] = {
        "access_programs": (),
        "background": (False,),
        "background_options": (),
        "context_management": ([],),
        "conversation": (),
        "image": (),
        "include": ([], ["reasoning.encrypted_content"]),  # reasoning is given as it is
        "max_tool_calls": (),
        "moderation": (),
        "prompt": (),
        "prompt_cache_options": (),
        "prompt_cache_retention": ("in_memory",),
        "top_logprobs": (0,),
        "truncation": ("disabled",),
    }
    nested: ClassVar[Mapping[str, type[RequestModel] | Variants]] = {
        "input": _ITEMS,
        "reasoning": Reasoning,
        "stream_options": ResponsesStreamOptions,
        "text": TextConfig,
        "tool_choice": _TOOL_CHOICES,
        "tools": _TOOLS,
    }

    model: str | None = Field(None, description="The name of the served model; another one is refused with 404.")
    input: _Input = Field(
        description="A text of the user, or messages, calls of functions, their outputs and reasoning, in their order.",
        examples=["Tell me a story."],
    )
    instructions: Text | None = Field(None, description="What the model is told before the conversation, this time.")
    previous_response_id: _Name | None = Field(
        None, description="An answer that is stored: its conversation stands before the input."
    )
    store: bool = Field(True, description="Whether the answer is kept, to be read and continued, while there is room.")
    stream: bool = Field(False, description="Whether the answer comes as server-sent events.")
    stream_options: ResponsesStreamOptions | None = Field(None, description="Only where `stream` is true.")
    max_output_tokens: int | None = Field(
        None,
        ge=1,
        le=_MAX_TOKENS,
        description="Tokens that the answer may have. Default: what the context holds.",
    )
    temperature: float | None = Field(
        None,
        ge=0,
        le=2,
        description="0 takes the likeliest token. Default: the model's generation_config.json, else 1.",
    )
    top_p: float | None = Field(None, gt=0, le=1, description="Default: the model's generation_config.json, else 1.")
    tools: Annotated[list[FunctionTool], Field(max_length=MAX_TOOLS, fail_fast=True)] = Field(
        [], description="Functions that the model may ask the client to call. OpenAI's own tools are refused."
    )
    tool_choice: _ToolChoice | None = Field(
        None, description="Whether the model may, must or must not call a function, or which. Default: it may."
    )
    parallel_tool_calls: bool = Field(True, description="Whether the model may call several functions at once.")
    text: TextConfig | None = Field(None, description="The form of the answer: any text, or JSON, perhaps by a schema.")
    reasoning: Reasoning | None = Field(None, description="How much the model reasons, where it can be told.")
    metadata: dict[str, _Label] | None = Field(None, description="Given back with the answer.")
    top_k: int | None = Field(None, ge=-1, le=_MAX_TOKENS, description="vLLM's. -1 and 0: no limit.")
    min_p: float | None = Field(None, ge=0, le=1, description="vLLM's. 0: no limit.")
    seed: int | None = Field(None, ge=-(2**63), le=2**63 - 1, description="vLLM's. Default: a random one.")
    repetition_penalty: float | None = Field(
        None, ge=LEAST_REPETITION_PENALTY, le=10, description="vLLM's. Above 1: tokens that were there are less likely."
    )
    presence_penalty: float = Field(0.0, ge=-2, le=2, description="Taken once from tokens that the answer has.")
    frequency_penalty: float = Field(0.0, ge=-2, le=2, description="Taken for each time that the answer has a token.")
    stop: Stop | None = Field(None, description="vLLM's. Strings that end an answer; they are not part of it.")
    ignore_eos: bool = Field(False, description="vLLM's. Whether the model's end token does not end an answer.")
    cache_salt: str | None = Field(
        None, min_length=1, max_length=512, description="vLLM's. Computed prompts are shared within a salt only."
    )
    hallmark: bool = Field(
        False, description="Whether the answer names the kernels that served it, as the header `X-Hallmark: 1` asks."
    )
    service_tier: Literal["auto", "default"] | None = Field(None, description=NO_EFFECT)
    user: _Label | None = Field(None, description=NO_EFFECT)
    safety_identifier: _Label | None = Field(None, description=NO_EFFECT)
    prompt_cache_key: _Label | None = Field(None, description=NO_EFFECT)
