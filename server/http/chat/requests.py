"""A chat's request. A field that is not implemented is refused by its name, never ignored."""

from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal

from pydantic import Discriminator, Field

from server.errors import InvalidValue
from server.http.chat.tools import TOOL_CHOICES, TOOLS, ChatTool, ToolCall, ToolChoice
from server.http.common.fields import (
    MAX_MESSAGES,
    MAX_TOOLS,
    AnyObject,
    ChatTemplateKwargs,
    TokenCount,
    kind_of_item,
    one_of,
)
from server.http.common.validation import NO_EFFECT, JsonObject, RequestModel, Text, Variants, tag
from server.http.generation.requests import MAX_LOGPROBS, GenerationRequest, StreamOptions

MAX_CALLS = 256  # of one message

ContinueFinalMessage = Annotated[
    bool, Field(description="Whether the answer goes on with the text of the last message, which stays open.")
]


Detail = Literal["auto", "low", "high", "original"]
DETAIL = "`low`: 512 x 512 pixels at most where the model's size of images may vary. The others: as the model has it."


class ChatTextPart(RequestModel):
    type: Literal["text"]
    text: Text
    cache_control: AnyObject | None = Field(None, description=f"{NO_EFFECT}: prompts are cached anyway.")
    prompt_cache_breakpoint: AnyObject | None = Field(None, description=f"{NO_EFFECT}: prompts are cached anyway.")


class ImageUrl(RequestModel):
    url: Text = Field(description="`data:image/...;base64,` or, of hosts that the server allows, http(s).")
    detail: Detail | None = Field(None, description=DETAIL)


class ChatImagePart(RequestModel):
    nested: ClassVar[Mapping[str, type[RequestModel]]] = {"image_url": ImageUrl}

    type: Literal["image_url"]
    image_url: ImageUrl
    uuid: Annotated[Text, Field(max_length=256)] | None = Field(
        None, description=f"{NO_EFFECT}: images are known by their content."
    )
    cache_control: AnyObject | None = Field(None, description=f"{NO_EFFECT}: prompts are cached anyway.")
    prompt_cache_breakpoint: AnyObject | None = Field(None, description=f"{NO_EFFECT}: prompts are cached anyway.")


_PARTS = Variants(
    {"text": ChatTextPart, "image_url": ChatImagePart}, refused=("file", "input_audio", "refusal", "video_url")
)
_Part = Annotated[
    Annotated[ChatTextPart, tag("text")] | Annotated[ChatImagePart, tag("image_url")],
    Discriminator(_PARTS.tag_of, custom_error_type="wrong_type", custom_error_message="a list of parts"),
]
_Content = Annotated[
    Annotated[Text, tag("text")] | Annotated[Annotated[list[_Part], Field(fail_fast=True)], tag("list")],
    one_of(kind_of_item, "a string or a list of parts"),
]


MM_KWARGS = "Pixels of each image after resizing: at most the model's own `max_pixels`."


class ImageBounds(RequestModel):
    """Sizes of images after resizing, as vLLM takes them."""

    min_pixels: int | None = Field(None, ge=1, le=2**31 - 1)
    max_pixels: int | None = Field(None, ge=1, le=2**31 - 1)


ToolList = Annotated[list[ChatTool], Field(max_length=MAX_TOOLS, fail_fast=True)]


class Message(RequestModel):
    unsupported: ClassVar[Mapping[str, tuple[object, ...]]] = {
        "annotations": ([],),
        "audio": (),
        "function_call": (),
        "refusal": ("",),
    }
    nested: ClassVar[Mapping[str, type[RequestModel] | Variants]] = {"content": _PARTS, "tool_calls": ToolCall}

    role: Literal["assistant", "developer", "system", "tool", "user"] = Field(
        description="`developer` is the same as `system`."
    )
    content: _Content | None = Field(
        None,
        description="Texts of a message without images are joined by newlines. Images are in a user's or a tool's "
        "message, of models that see them. Only an assistant may have no content.",
    )
    name: Annotated[Text, Field(max_length=64)] | None = Field(None, description="Given to the model's chat template.")
    tool_calls: Annotated[list[ToolCall], Field(max_length=MAX_CALLS, fail_fast=True)] = Field(
        default_factory=list, description="What an assistant has called."
    )
    tool_call_id: Annotated[Text, Field(max_length=256)] | None = Field(
        None, description="The call that a tool's message answers."
    )
    reasoning_content: Text | None = Field(None, description="An assistant's reasoning, for the chat template.")
    reasoning: Text | None = Field(None, description="Another name of `reasoning_content`, which goes first.")
    cache_control: AnyObject | None = Field(None, description=f"{NO_EFFECT}: prompts are cached anyway.")


Messages = Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]


class ChatRequest(GenerationRequest):
    nested: ClassVar[Mapping[str, type[RequestModel] | Variants]] = {
        "messages": Message,
        "mm_processor_kwargs": ImageBounds,
        "stream_options": StreamOptions,
        "tool_choice": TOOL_CHOICES,
        "tools": TOOLS,
    }
    prompt_field: ClassVar[str] = "messages"

    messages: Messages = Field(
        description="The conversation, as the model's chat template takes it.",
        examples=[[{"role": "user", "content": "Tell me a story."}]],
    )
    max_completion_tokens: TokenCount | None = Field(
        None, description="The newer name of `max_tokens`; they must not differ."
    )
    tools: ToolList | None = Field(
        None,
        description="Functions that the model may call. Its chat template tells of them, or else the system's message.",
    )
    tool_choice: ToolChoice | None = Field(
        None,
        description="`none`: the model sees no tools. `required` and a name bind the answer to a call. With "
        "`allowed_tools` the model sees and calls those alone.",
    )
    parallel_tool_calls: bool = Field(True, description="Whether an answer may have more than one call.")
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = Field(
        None, description="Given to the chat template; `none` gives it `enable_thinking: false` as well."
    )
    verbosity: Literal["low", "medium", "high"] | None = Field(None, description="Given to the chat template.")
    include_reasoning: bool = Field(True, description="Whether the answer has the model's reasoning.")
    chat_template_kwargs: ChatTemplateKwargs = None
    add_generation_prompt: bool | None = Field(
        None, description="Whether the prompt ends with the opening of an answer; not with `continue_final_message`."
    )
    continue_final_message: ContinueFinalMessage = False
    add_special_tokens: bool = Field(
        False, description="Whether the prompt gets the tokens that the tokenizer adds, beside those of the template."
    )
    mm_processor_kwargs: ImageBounds | None = Field(None, description=MM_KWARGS)
    documents: Annotated[list[JsonObject], Field(fail_fast=True)] | None = Field(
        None, description="For the chat template; refused where it has no place for them."
    )
    logprobs: bool = Field(False, description="Whether each token of the answer is given with its log probability.")
    top_logprobs: int | None = Field(
        None, ge=0, le=MAX_LOGPROBS, description="Likeliest tokens given with each; above 0 only with `logprobs`."
    )

    def check(self) -> None:
        super().check()
        if self.top_logprobs and not self.logprobs:
            raise InvalidValue("top_logprobs needs logprobs to be true.", param="top_logprobs")

    @property
    def goes_on(self) -> bool:
        return self.continue_final_message

    @property
    def may_call(self) -> bool:
        return bool(self.tools) and self.tool_choice != "none"

    @property
    def num_likeliest(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None
