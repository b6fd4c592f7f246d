"""Requests as OpenAI's clients send them. A field that is not implemented is refused by its name, never ignored."""

from collections.abc import Mapping
from functools import cache
from typing import Annotated, Any, ClassVar, Literal

import msgspec
from pydantic import BeforeValidator, Discriminator, Field, ValidationError, WithJsonSchema, WrapValidator
from pydantic_core import PydanticCustomError

from server.errors import InvalidValue
from server.http.common.validation import RequestModel, Text, tag
from server.text.sampling_defaults import LEAST_REPETITION_PENALTY

MAX_PROMPTS = 64  # also of answers: prompts times n
MAX_MESSAGES = 2048
MAX_STOPS = 16
MAX_STOP_CHARS = 256
MAX_STOP_TOKEN_IDS = 128
MAX_LOGPROBS = 5  # likeliest tokens at each place, OpenAI's limit
_MAX_TOKENS = 2**31 - 1

# Fields that OpenAI or vLLM define and we do not implement, each with the values that ask for nothing.
_UNSUPPORTED: Mapping[str, tuple[object, ...]] = {
    "add_generation_prompt": (True,),
    "allowed_token_ids": ([],),
    "audio": (),
    "bad_words": ([],),
    "best_of": (1,),
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "continue_final_message": (False,),
    "documents": ([],),
    "echo": (False,),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "guided_json": (),
    "include_stop_str_in_output": (False,),
    "length_penalty": (1.0, 1),
    "logit_bias": ({},),
    "logprobs": (False,),
    "metadata": ({},),
    "modalities": (["text"],),
    "moderation": (),
    "parallel_tool_calls": (True, False),
    "prediction": (),
    "priority": (0,),
    "prompt_cache_options": (),
    "prompt_cache_retention": ("in_memory", "in-memory"),
    "prompt_logprobs": (),
    "reasoning_effort": (),
    "response_format": ({"type": "text"},),
    "return_token_ids": (False,),
    "service_tier": ("auto", "default"),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "store": (False,),
    "structured_outputs": (),
    "suffix": ("",),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "top_logprobs": (0,),
    "truncate_prompt_tokens": (),
    "use_beam_search": (False,),
    "verbosity": (),
    "web_search_options": (),
}
_NO_EFFECT = "Whom the request is for. Taken, and changes nothing."


def _ids(value: Any, validate: Any) -> list[int]:
    try:
        ids: list[int] = validate(value)
    except ValidationError:
        raise PydanticCustomError("token_ids", "a list of token ids") from None
    return ids


def _kind_of_item(value: Any) -> str | None:
    return "=text" if isinstance(value, str) else "=list" if isinstance(value, list) else None


def _kind_of_list(value: Any) -> str | None:
    if not isinstance(value, list):
        return "=text" if isinstance(value, str) else None
    if not value:
        return None
    return "=ids" if isinstance(value[0], int) else "=list"


def _one_of(choose: Any, wanted: str) -> Discriminator:
    """The type of a union's value is chosen by `choose`, before anything is validated."""
    return Discriminator(choose, custom_error_type="wrong_type", custom_error_message=wanted)


# The bounds of an id depend on the model: see `checked_ids`. Here they would take three times as long.
TokenId = Annotated[
    int,
    WithJsonSchema(
        {"type": "integer", "minimum": 0, "description": "Below the size of the model's vocabulary."}, mode="validation"
    ),
]
TokenIds = Annotated[list[TokenId], Field(min_length=1, fail_fast=True), WrapValidator(_ids)]
_PROMPT = "a string, token ids or a list of either"
_OnePrompt = Annotated[Annotated[Text, tag("text")] | Annotated[TokenIds, tag("list")], _one_of(_kind_of_item, _PROMPT)]
_Prompts = Annotated[list[_OnePrompt], Field(min_length=1, max_length=MAX_PROMPTS, fail_fast=True)]
Prompt = Annotated[
    Annotated[Text, tag("text")] | Annotated[TokenIds, tag("ids")] | Annotated[_Prompts, tag("list")],
    _one_of(_kind_of_list, _PROMPT),
]
_StopString = Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARS)]
Stop = Annotated[
    Annotated[_StopString, tag("text")]
    | Annotated[Annotated[list[_StopString], Field(max_length=MAX_STOPS, fail_fast=True)], tag("list")],
    _one_of(_kind_of_item, "a string or a list of strings"),
]
_Name = Annotated[str, Field(max_length=512)]


class StreamOptions(RequestModel):
    unsupported: ClassVar[Mapping[str, tuple[object, ...]]] = {"include_obfuscation": (False,)}

    include_usage: bool = Field(False, description="Whether a last chunk without choices has the usage.")


class GenerationRequest(RequestModel):
    """The fields of both routes that generate.

    Limits that depend on the model are checked when its tokens are known.
    """

    unsupported: ClassVar[Mapping[str, tuple[object, ...]]] = _UNSUPPORTED
    nested: ClassVar[Mapping[str, type[RequestModel]]] = {"stream_options": StreamOptions}

    model: str | None = Field(None, description="The name of the served model; another one is refused with 404.")
    stream: bool = Field(False, description="Whether the answer comes as server-sent events.")
    stream_options: StreamOptions | None = Field(None, description="Only where `stream` is true.")
    n: int = Field(
        1, ge=1, le=MAX_PROMPTS, description=f"Answers for each prompt, {MAX_PROMPTS} in the whole request at most."
    )
    max_tokens: int | None = Field(
        None, ge=1, le=_MAX_TOKENS, description="Tokens that each answer may have, as far as the context holds them."
    )
    min_tokens: int = Field(
        0, ge=0, le=_MAX_TOKENS, description="Tokens before which nothing stops an answer; not above `max_tokens`."
    )
    temperature: float | None = Field(
        None,
        ge=0,
        le=2,
        description="0 takes the likeliest token. Default: the model's generation_config.json, else 1.",
    )
    top_p: float | None = Field(
        None, gt=0, le=1, description="Default: the model's generation_config.json, else 1: no limit."
    )
    top_k: int | None = Field(
        None, ge=-1, le=_MAX_TOKENS, description="-1 and 0: no limit. Default: the model's generation_config.json."
    )
    min_p: float | None = Field(
        None, ge=0, le=1, description="Default: the model's generation_config.json, else 0: no limit."
    )
    seed: int | None = Field(
        None, ge=-(2**63), le=2**63 - 1, description="Choice i of a prompt has the seed plus i. Default: a random one."
    )
    repetition_penalty: float | None = Field(
        None,
        ge=LEAST_REPETITION_PENALTY,
        le=10,
        description="Above 1: tokens of the prompt and the answer are less likely. "
        "Default: the model's generation_config.json, else 1.",
    )
    presence_penalty: float = Field(0.0, ge=-2, le=2, description="Taken once from tokens that the answer has.")
    frequency_penalty: float = Field(0.0, ge=-2, le=2, description="Taken for each time that the answer has a token.")
    stop: Stop | None = Field(None, description="Strings that end an answer; they are not part of it.")
    stop_token_ids: Annotated[list[TokenId], Field(max_length=MAX_STOP_TOKEN_IDS, fail_fast=True)] = Field(
        [], description="Tokens that end an answer as the model's own end token does."
    )
    ignore_eos: bool = Field(False, description="Whether the model's end token does not end an answer.")
    cache_salt: str | None = Field(
        None,
        min_length=1,
        max_length=512,
        description="Computed prompts are shared with requests of the same salt only.",
    )
    user: _Name | None = Field(None, description=f"{_NO_EFFECT} OpenAI's old name of the next two.")
    safety_identifier: _Name | None = Field(None, description=_NO_EFFECT)
    prompt_cache_key: _Name | None = Field(None, description=_NO_EFFECT)


class CompletionRequest(GenerationRequest):
    prompt: Prompt = Field(
        description=f"A text or token ids, or up to {MAX_PROMPTS} of them. A text may spell special tokens.",
        examples=["Once upon a time"],
    )
    max_tokens: int | None = Field(
        None, ge=0, le=_MAX_TOKENS, description="Tokens that each answer may have; 0 only with `echo`. Default: 16."
    )
    echo: bool = Field(False, description="Whether the answer begins with its prompt; not for streams.")
    logprobs: int | None = Field(
        None,
        ge=0,
        le=MAX_LOGPROBS,
        description="Likeliest tokens given for each token of the prompt; only with `echo` and `max_tokens` of 0 or 1.",
    )
    return_tokens_as_token_ids: bool = Field(False, description="Whether `logprobs` names tokens by their ids.")

    def prompts(self) -> list[str | list[int]]:
        """Each prompt, a text or token ids."""
        prompt = self.prompt
        if isinstance(prompt, str):
            return [prompt]
        if isinstance(prompt[0], int):
            return [prompt]
        return prompt


def _only_text(value: Any) -> Any:
    if isinstance(value, str) and value != "text":
        raise PydanticCustomError("unsupported", "must be 'text', the only type that is implemented")
    return value


class TextPart(RequestModel):
    unsupported: ClassVar[Mapping[str, tuple[object, ...]]] = {
        "file": (),
        "image_url": (),
        "input_audio": (),
        "video_url": (),
    }

    type: Annotated[Literal["text"], BeforeValidator(_only_text)]
    text: Text


_Content = Annotated[
    Annotated[Text, tag("text")] | Annotated[Annotated[list[TextPart], Field(fail_fast=True)], tag("list")],
    _one_of(_kind_of_item, "a string or a list of text parts"),
]


class Message(RequestModel):
    unsupported: ClassVar[Mapping[str, tuple[object, ...]]] = {
        "audio": (),
        "function_call": (),
        "tool_call_id": (),
        "tool_calls": ([],),
    }
    nested: ClassVar[Mapping[str, type[RequestModel]]] = {"content": TextPart}

    role: Literal["assistant", "developer", "system", "user"] = Field(
        description="`developer` is the same as `system`."
    )
    content: _Content | None = Field(None, description="Parts are joined by newlines. Only an assistant may have none.")
    name: Annotated[str, Field(max_length=64)] | None = Field(None, description="Given to the model's chat template.")


Messages = Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]


class ChatRequest(GenerationRequest):
    nested: ClassVar[Mapping[str, type[RequestModel]]] = {"messages": Message, "stream_options": StreamOptions}

    messages: Messages = Field(
        description="The conversation, as the model's chat template takes it.",
        examples=[[{"role": "user", "content": "Tell me a story."}]],
    )
    max_completion_tokens: int | None = Field(
        None, ge=1, le=_MAX_TOKENS, description="The newer name of `max_tokens`; they must not differ."
    )


class TokenizeRequest(RequestModel):
    """Either a prompt or messages."""

    unsupported: ClassVar[Mapping[str, tuple[object, ...]]] = {
        name: _UNSUPPORTED[name]
        for name in ("chat_template", "chat_template_kwargs", "continue_final_message", "tools")
    }
    nested: ClassVar[Mapping[str, type[RequestModel]]] = {"messages": Message}

    model: str | None = Field(None, description="The name of the served model.")
    prompt: Text | None = Field(None, description="A text.", examples=["Once upon a time"])
    add_special_tokens: bool = Field(True, description="Whether a prompt gets the tokens that the tokenizer adds.")
    messages: Messages | None = Field(None, description="A conversation.")
    add_generation_prompt: bool = Field(True, description="Whether messages end with the opening of an answer.")


class DetokenizeRequest(RequestModel):
    model: str | None = Field(None, description="The name of the served model.")
    tokens: TokenIds = Field(description="Token ids, at least one.", examples=[[1, 2]])


def stops_of(stop: str | list[str] | None) -> tuple[str, ...]:
    """The stop strings of a valid request."""
    return (stop,) if isinstance(stop, str) else tuple(stop or ())


def plain_messages(messages: list[Message]) -> list[dict[str, str]]:
    """Messages for the chat template: a role, a text and perhaps a name. Raises InvalidValue."""
    found = []
    for i, message in enumerate(messages):
        content = message.content
        if content is None and message.role != "assistant":
            where = f"messages[{i}].content"
            raise InvalidValue(f"The field {where!r} is missing.", param=where)
        role = "system" if message.role == "developer" else message.role  # OpenAI's newer name of it
        text = content if isinstance(content, str) else "\n".join(part.text for part in content or ())
        plain = {"role": role, "content": text}
        found.append(plain if message.name is None else plain | {"name": message.name})
    return found


def checked_ids(ids: list[int], vocab_size: int, param: str) -> list[int]:
    """Token ids of a valid request, within the vocabulary: 8 ns each. Raises InvalidValue."""
    try:
        msgspec.convert(ids, _ids_below(vocab_size))
    except msgspec.ValidationError:
        wrong = min(ids) if min(ids) < 0 else max(ids)
        raise InvalidValue(
            f"{param}: token ids are 0 to {vocab_size - 1}, got {str(wrong)[:24]}.", param=param
        ) from None
    return ids


@cache
def _ids_below(vocab_size: int) -> Any:
    return list[Annotated[int, msgspec.Meta(ge=0, lt=vocab_size)]]
