"""Requests as OpenAI's clients send them. A field that is not implemented is refused by its name, never ignored."""

from collections.abc import Mapping
from functools import cache
from typing import Annotated, Any, ClassVar, Literal

import msgspec
from pydantic import BeforeValidator, Discriminator, Field, ValidationError, WithJsonSchema, WrapValidator
from pydantic_core import PydanticCustomError

from server.errors import InvalidValue
from server.http.common.validation import RequestModel, Text, tag
from server.http.openai.tools import MAX_TOOLS, JsonObject, NamedChoice, Tool, ToolCall, ToolChoice
from server.text.sampling_defaults import LEAST_REPETITION_PENALTY

MAX_PROMPTS = 64  # also of answers: prompts times n
MAX_INPUTS = 2048  # texts to embed, OpenAI's limit
MAX_MESSAGES = 2048
MAX_CALLS = 256  # of one message
MAX_STOPS = 16
MAX_STOP_CHARS = 256
MAX_STOP_TOKEN_IDS = 128
MAX_LOGPROBS = 20  # likeliest tokens at each place, OpenAI's limit for chats
MAX_BIASES = 1024  # tokens, also of those allowed; each costs every step of the answer
MAX_BAD_WORDS = 128
_MAX_TOKENS = 2**31 - 1

# Fields that OpenAI or vLLM define and we do not implement, each with the values that ask for nothing.
_UNSUPPORTED: Mapping[str, tuple[object, ...]] = {
    "add_generation_prompt": (True,),
    "audio": (),
    "best_of": (1,),
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "continue_final_message": (False,),
    "documents": ([],),
    "echo": (False,),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "guided_decoding_backend": (),
    "guided_whitespace_pattern": (),
    "include_stop_str_in_output": (False,),
    "length_penalty": (1.0, 1),
    "modalities": (["text"],),
    "moderation": (),
    "parallel_tool_calls": (True, False),
    "prompt_cache_options": (),
    "prompt_cache_retention": ("in_memory", "in-memory"),
    "reasoning_effort": (),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "suffix": ("",),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "top_logprobs": (0,),
    "truncate_prompt_tokens": (),
    "use_beam_search": (False,),
    "verbosity": ("medium",),
    "web_search_options": (),
}
_FOR_WHOM = "Whom the request is for. Taken, and changes nothing."

_GUIDED = "vLLM's older name of what `structured_outputs` holds."


def _ids(value: Any, validate: Any) -> list[int]:
    try:
        ids: list[int] = validate(value)
    except ValidationError:
        raise PydanticCustomError("token_ids", "a list of token ids") from None
    return ids


def _biases(value: Any, validate: Any) -> dict[str, float]:
    try:
        biases: dict[str, float] = validate(value)
    except ValidationError:
        wanted = f"an object of at most {MAX_BIASES} token ids, each with a number of -100 to 100"
        raise PydanticCustomError("token_biases", wanted) from None  # a name may be any text: it is not repeated
    return biases


def _kind_of_item(value: Any) -> str | None:
    return "=text" if isinstance(value, str) else "=list" if isinstance(value, list) else None


def _kind_of_list(value: Any) -> str | None:
    if not isinstance(value, list):
        return "=text" if isinstance(value, str) else None
    if not value:
        return None
    return "=ids" if isinstance(value[0], int) else "=list"


def _kind_of_schema(value: Any) -> str | None:
    return "=text" if isinstance(value, str) else "=object" if isinstance(value, dict) else None


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
_LimitedId = Annotated[int, Field(ge=0, description="Below the size of the model's vocabulary.")]  # of a short list
TokenIds = Annotated[list[TokenId], Field(min_length=1, fail_fast=True), WrapValidator(_ids)]
_PROMPT = "a string, token ids or a list of either"
_OnePrompt = Annotated[Annotated[Text, tag("text")] | Annotated[TokenIds, tag("list")], _one_of(_kind_of_item, _PROMPT)]
_Prompts = Annotated[list[_OnePrompt], Field(min_length=1, max_length=MAX_PROMPTS, fail_fast=True)]
Prompt = Annotated[
    Annotated[Text, tag("text")] | Annotated[TokenIds, tag("ids")] | Annotated[_Prompts, tag("list")],
    _one_of(_kind_of_list, _PROMPT),
]
_Inputs = Annotated[list[_OnePrompt], Field(min_length=1, max_length=MAX_INPUTS, fail_fast=True)]
Inputs = Annotated[
    Annotated[Text, tag("text")] | Annotated[TokenIds, tag("ids")] | Annotated[_Inputs, tag("list")],
    _one_of(_kind_of_list, _PROMPT),
]
_StopString = Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARS)]
Stop = Annotated[
    Annotated[_StopString, tag("text")]
    | Annotated[Annotated[list[_StopString], Field(max_length=MAX_STOPS, fail_fast=True)], tag("list")],
    _one_of(_kind_of_item, "a string or a list of strings"),
]
_Object = Annotated[dict[str, Any], WithJsonSchema({"type": "object", "additionalProperties": {}}, mode="validation")]
_Schema = Annotated[
    Annotated[_Object, tag("object")] | Annotated[Text, tag("text")], _one_of(_kind_of_schema, "a JSON schema")
]
_Name = Annotated[str, Field(max_length=512)]
Biases = Annotated[
    dict[str, Annotated[float, Field(ge=-100, le=100)]], Field(max_length=MAX_BIASES), WrapValidator(_biases)
]


class StreamOptions(RequestModel):
    unsupported: ClassVar[Mapping[str, tuple[object, ...]]] = {"include_obfuscation": (False,)}

    include_usage: bool = Field(False, description="Whether a last chunk without choices has the usage.")
    continuous_usage_stats: bool = Field(False, description="Whether every chunk has the usage so far.")


class GenerationRequest(RequestModel):
    """The fields of both routes that generate.

    Limits that depend on the model are checked when its tokens are known.
    """

    unsupported: ClassVar[Mapping[str, tuple[object, ...]]] = _UNSUPPORTED
    without_effect: ClassVar[tuple[str, ...]] = (
        "cache_control",
        "metadata",
        "prediction",
        "prompt_cache_key",
        "safety_identifier",
        "service_tier",
        "store",
        "user",
    )
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
    stop_token_ids: Annotated[list[_LimitedId], Field(max_length=MAX_STOP_TOKEN_IDS, fail_fast=True)] = Field(
        [], description="Tokens that end an answer as the model's own end token does."
    )
    ignore_eos: bool = Field(False, description="Whether the model's end token does not end an answer.")
    response_format: _Object | None = Field(
        None,
        description='`{"type": "text"}`, `{"type": "json_object"}` or `{"type": "json_schema", "json_schema": '
        '{"name": ..., "schema": ...}}`. A schema binds the answer whether or not it is `strict`.',
    )
    structured_outputs: _Object | None = Field(
        None, description="vLLM's: one of `json`, `regex`, `choice`, `grammar` and `json_object`."
    )
    guided_json: _Schema | None = Field(None, description=_GUIDED)
    guided_regex: str | None = Field(None, description=_GUIDED)
    guided_choice: list[str] | None = Field(None, description=_GUIDED)
    guided_grammar: str | None = Field(None, description=_GUIDED)
    cache_salt: str | None = Field(
        None,
        min_length=1,
        max_length=512,
        description="Computed prompts are shared with requests of the same salt only.",
    )
    priority: int = Field(
        0,
        ge=-(2**31),
        le=2**31 - 1,
        description="vLLM's: what waits with a lower one is computed first, and what runs with a higher one gives way.",
    )
    timeout: float | None = Field(
        None,
        gt=0,
        description="Seconds from its arrival that the request may take; the server's own limit holds as well.",
    )
    hallmark: bool = Field(
        False, description="Whether the answer, or the last chunk of a stream, names the kernels that served it."
    )
    logit_bias: Biases = Field(
        {}, description=f"Token ids, and what is added to their logits; {MAX_BIASES} of them at most."
    )
    allowed_token_ids: Annotated[list[_LimitedId], Field(max_length=MAX_BIASES, fail_fast=True)] = Field(
        [], description="The only tokens that an answer may have; none given: any."
    )
    bad_words: Annotated[list[_StopString], Field(max_length=MAX_BAD_WORDS, fail_fast=True)] = Field(
        [], description="Texts whose tokens no answer has, alone or behind a space."
    )
    prompt_logprobs: int | None = Field(
        None,
        ge=0,
        le=MAX_LOGPROBS,
        description="Gives each token of the prompt with its log probability, and so many likeliest; not in streams.",
    )
    return_token_ids: bool = Field(False, description="Whether the ids of the prompt and of the answer are given.")
    return_tokens_as_token_ids: bool = Field(False, description="Whether `logprobs` names tokens by their ids.")
    metadata: _Object | None = Field(None, description="Taken, and changes nothing: no request is stored.")
    store: bool | None = Field(None, description="Taken, and changes nothing: no answer is stored.")
    service_tier: _Name | None = Field(None, description="Taken, and changes nothing: all are served alike.")
    prediction: _Object | None = Field(None, description="Taken, and changes nothing: an answer is not guessed ahead.")
    cache_control: _Object | None = Field(None, description="Taken, and changes nothing: prompts are cached anyway.")
    user: _Name | None = Field(None, description=f"{_FOR_WHOM} OpenAI's old name of the next two.")
    safety_identifier: _Name | None = Field(None, description=_FOR_WHOM)
    prompt_cache_key: _Name | None = Field(None, description=_FOR_WHOM)

    @property
    def num_likeliest(self) -> int | None:
        """Likeliest tokens that are given with each token of the answer; None where it has no log probabilities."""
        return None

    @property
    def num_prompt_likeliest(self) -> int | None:
        """Likeliest tokens that are computed for each token of the prompt."""
        return self.prompt_logprobs


class CompletionRequest(GenerationRequest):
    prompt: Prompt = Field(
        description=f"A text or token ids, or up to {MAX_PROMPTS} of them. A text may spell special tokens.",
        examples=["Once upon a time"],
    )
    max_tokens: int | None = Field(
        None, ge=0, le=_MAX_TOKENS, description="Tokens that each answer may have; 0 only with `echo`. Default: 16."
    )
    echo: bool = Field(False, description="Whether the answer begins with its prompt.")
    logprobs: int | None = Field(
        None,
        ge=0,
        le=MAX_LOGPROBS,
        description="Gives each token of the answer, with `echo` of the prompt too, with its log probability, "
        "and so many likeliest.",
    )

    @property
    def num_likeliest(self) -> int | None:
        return self.logprobs

    @property
    def num_prompt_likeliest(self) -> int | None:
        asked = [self.prompt_logprobs, self.logprobs if self.echo else None]
        return max([it for it in asked if it is not None], default=None)

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

    without_effect: ClassVar[tuple[str, ...]] = ("cache_control",)

    type: Annotated[Literal["text"], BeforeValidator(_only_text)]
    text: Text
    cache_control: _Object | None = Field(None, description="Taken, and changes nothing: prompts are cached anyway.")


_Content = Annotated[
    Annotated[Text, tag("text")] | Annotated[Annotated[list[TextPart], Field(fail_fast=True)], tag("list")],
    _one_of(_kind_of_item, "a string or a list of text parts"),
]


ToolList = Annotated[list[Tool], Field(max_length=MAX_TOOLS, fail_fast=True)]


class Message(RequestModel):
    unsupported: ClassVar[Mapping[str, tuple[object, ...]]] = {
        "annotations": ([],),
        "audio": (),
        "function_call": (),
        "refusal": ("",),
    }
    nested: ClassVar[Mapping[str, type[RequestModel]]] = {"content": TextPart, "tool_calls": ToolCall}
    without_effect: ClassVar[tuple[str, ...]] = ("cache_control",)

    role: Literal["assistant", "developer", "system", "tool", "user"] = Field(
        description="`developer` is the same as `system`."
    )
    content: _Content | None = Field(None, description="Parts are joined by newlines. Only an assistant may have none.")
    name: Annotated[Text, Field(max_length=64)] | None = Field(None, description="Given to the model's chat template.")
    tool_calls: Annotated[list[ToolCall], Field(max_length=MAX_CALLS, fail_fast=True)] = Field(
        [], description="What an assistant has called."
    )
    tool_call_id: Annotated[Text, Field(max_length=256)] | None = Field(
        None, description="The call that a tool's message answers."
    )
    reasoning_content: Text | None = Field(None, description="An assistant's reasoning, for the chat template.")
    reasoning: Text | None = Field(None, description="Another name of `reasoning_content`, which goes first.")
    cache_control: _Object | None = Field(None, description="Taken, and changes nothing: prompts are cached anyway.")


Messages = Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]


class ChatRequest(GenerationRequest):
    nested: ClassVar[Mapping[str, type[RequestModel]]] = {
        "messages": Message,
        "stream_options": StreamOptions,
        "tool_choice": NamedChoice,
        "tools": Tool,
    }

    messages: Messages = Field(
        description="The conversation, as the model's chat template takes it.",
        examples=[[{"role": "user", "content": "Tell me a story."}]],
    )
    max_completion_tokens: int | None = Field(
        None, ge=1, le=_MAX_TOKENS, description="The newer name of `max_tokens`; they must not differ."
    )
    tools: ToolList | None = Field(
        None,
        description="Functions that the model may call. Its chat template tells of them, or else the system's message.",
    )
    tool_choice: ToolChoice | None = Field(
        None, description="`none`: the model is told of no tools. `required` and a name bind the answer to a call."
    )
    parallel_tool_calls: bool = Field(True, description="Whether an answer may have more than one call.")
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = Field(
        None, description="Given to the chat template; `none` gives it `enable_thinking: false` as well."
    )
    include_reasoning: bool = Field(True, description="Whether the answer has the model's reasoning.")
    chat_template_kwargs: JsonObject | None = Field(
        None, description="Variables for the chat template, such as `enable_thinking`; others have no effect."
    )
    documents: Annotated[list[JsonObject], Field(fail_fast=True)] | None = Field(
        None, description="For the chat template; refused where it has no place for them."
    )
    logprobs: bool = Field(False, description="Whether each token of the answer is given with its log probability.")
    top_logprobs: int | None = Field(
        None, ge=0, le=MAX_LOGPROBS, description="Likeliest tokens given with each; above 0 only with `logprobs`."
    )

    @property
    def num_likeliest(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None


class TokenizeRequest(RequestModel):
    """Either a prompt or messages."""

    unsupported: ClassVar[Mapping[str, tuple[object, ...]]] = {
        name: _UNSUPPORTED[name] for name in ("chat_template", "continue_final_message")
    }
    nested: ClassVar[Mapping[str, type[RequestModel]]] = {"messages": Message, "tools": Tool}

    model: str | None = Field(None, description="The name of the served model.")
    prompt: Text | None = Field(None, description="A text.", examples=["Once upon a time"])
    add_special_tokens: bool = Field(True, description="Whether a prompt gets the tokens that the tokenizer adds.")
    messages: Messages | None = Field(None, description="A conversation.")
    add_generation_prompt: bool = Field(True, description="Whether messages end with the opening of an answer.")
    tools: ToolList | None = Field(None, description="Functions that the model is told of; only with messages.")
    chat_template_kwargs: JsonObject | None = Field(None, description="As in a chat; only with messages.")


class DetokenizeRequest(RequestModel):
    model: str | None = Field(None, description="The name of the served model.")
    tokens: TokenIds = Field(description="Token ids, at least one.", examples=[[1, 2]])


def stops_of(stop: str | list[str] | None) -> tuple[str, ...]:
    """The stop strings of a valid request."""
    return (stop,) if isinstance(stop, str) else tuple(stop or ())


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
