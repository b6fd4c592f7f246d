"""Requests as OpenAI's clients send them. A field that is not implemented is refused by its name, never ignored."""

from collections.abc import Mapping
from functools import cache
from typing import Annotated, Any, ClassVar, Literal

import msgspec
from pydantic import BeforeValidator, Field, ValidationError, WithJsonSchema, WrapValidator
from pydantic_core import PydanticCustomError

from server.errors import InvalidValue
from server.http.chat.tools import MAX_TOOLS, NamedChoice, Tool, ToolCall, ToolChoice
from server.http.common.fields import (
    MAX_MESSAGES,
    MAX_TOKENS,
    AllowedIds,
    BadWords,
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
    RepetitionPenalty,
    RequestId,
    Seed,
    SkipSpecialTokens,
    Stop,
    StopTokenIds,
    Stream,
    Temperature,
    Timeout,
    TokenCount,
    TopK,
    TopP,
    kind_of_item,
    one_of,
)
from server.http.common.validation import NO_EFFECT, JsonObject, RequestModel, Text, tag

MAX_PROMPTS = 64  # also of answers: prompts times n
MAX_INPUTS = 2048  # texts to embed, OpenAI's limit
MAX_CALLS = 256  # of one message
MAX_LOGPROBS = 20  # likeliest tokens at each place, OpenAI's limit for chats

# Fields that OpenAI or vLLM define and we do not implement, each with the values that ask for nothing.
_UNSUPPORTED: Mapping[str, tuple[object, ...]] = {
    "add_generation_prompt": (True,),
    "audio": (),
    "best_of": (1,),
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "continue_final_message": (False,),
    "documents": ([],),
    "ec_transfer_params": (),
    "echo": (False,),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "guided_decoding_backend": ("auto", "guidance", "llguidance"),  # the one that is used, by vLLM's names
    "guided_whitespace_pattern": (),
    "kv_transfer_params": (),
    "length_penalty": (1.0, 1),
    "logits_processors": ([],),
    "logprob_token_ids": ([],),
    "media_io_kwargs": ({},),
    "mm_processor_kwargs": ({},),
    "modalities": (["text"],),
    "moderation": (),
    "no_stop_trim": (False,),  # this one and the others without a name at vLLM or OpenAI are what routers add
    "parallel_tool_calls": (True, False),
    "prompt_embeds": (),
    "reasoning_effort": (),
    "repetition_detection": (),
    "return_assistant_tokens_mask": (False,),
    "return_hidden_states": (False,),
    "return_prompt_text": (False,),
    "return_token_offsets": (False,),
    "separate_reasoning": (True,),
    "stream_reasoning": (True,),
    "suffix": ("",),
    "thinking_token_budget": (-1,),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "top_logprobs": (0,),
    "use_beam_search": (False,),
    "verbosity": ("medium",),
    "vllm_xargs": ({},),
    "web_search_options": (),
}
_GUIDED = "vLLM's older name of what `structured_outputs` holds."


def _ids(value: Any, validate: Any) -> list[int]:
    try:
        ids: list[int] = validate(value)
    except ValidationError:
        raise PydanticCustomError("token_ids", "a list of token ids") from None
    return ids


def _kind_of_list(value: Any) -> str | None:
    if not isinstance(value, list):
        return "=text" if isinstance(value, str) else None
    if not value:
        return None
    return "=ids" if isinstance(value[0], int) else "=list"


def _kind_of_schema(value: Any) -> str | None:
    return "=text" if isinstance(value, str) else "=object" if isinstance(value, dict) else None


# The bounds of an id depend on the model: see `checked_ids`. Here they would take three times as long.
TokenId = Annotated[
    int,
    WithJsonSchema(
        {"type": "integer", "minimum": 0, "description": "Below the size of the model's vocabulary."}, mode="validation"
    ),
]
TokenIds = Annotated[list[TokenId], Field(min_length=1, fail_fast=True), WrapValidator(_ids)]
_PROMPT = "a string, token ids or a list of either"
ContinueFinalMessage = Annotated[
    bool, Field(description="Whether the answer goes on with the text of the last message, which stays open.")
]
_OnePrompt = Annotated[Annotated[Text, tag("text")] | Annotated[TokenIds, tag("list")], one_of(kind_of_item, _PROMPT)]
_Prompts = Annotated[list[_OnePrompt], Field(min_length=1, max_length=MAX_PROMPTS, fail_fast=True)]
Prompt = Annotated[
    Annotated[Text, tag("text")] | Annotated[TokenIds, tag("ids")] | Annotated[_Prompts, tag("list")],
    one_of(_kind_of_list, _PROMPT),
]
_InputText = Annotated[Text, Field(min_length=1)]  # the embedding of nothing is one of the end token
_OneInput = Annotated[
    Annotated[_InputText, tag("text")] | Annotated[TokenIds, tag("list")], one_of(kind_of_item, _PROMPT)
]
_Inputs = Annotated[list[_OneInput], Field(min_length=1, max_length=MAX_INPUTS, fail_fast=True)]
Inputs = Annotated[
    Annotated[_InputText, tag("text")] | Annotated[TokenIds, tag("ids")] | Annotated[_Inputs, tag("list")],
    one_of(_kind_of_list, _PROMPT),
]
_Object = Annotated[dict[str, Any], WithJsonSchema({"type": "object", "additionalProperties": {}}, mode="validation")]
_Schema = Annotated[
    Annotated[_Object, tag("object")] | Annotated[Text, tag("text")], one_of(_kind_of_schema, "a JSON schema")
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
    nested: ClassVar[Mapping[str, type[RequestModel]]] = {"stream_options": StreamOptions}

    model: ModelName = None
    stream: Stream = False
    stream_options: StreamOptions | None = Field(None, description="Only where `stream` is true.")
    n: int = Field(
        1, ge=1, le=MAX_PROMPTS, description=f"Answers for each prompt, {MAX_PROMPTS} in the whole request at most."
    )
    max_tokens: TokenCount | None = Field(
        None,
        description="Tokens that each answer may have; the context must hold them. Default: what it holds.",
    )
    min_tokens: int = Field(
        0, ge=0, le=MAX_TOKENS, description="Tokens before which nothing stops an answer; not above `max_tokens`."
    )
    temperature: Temperature = None
    top_p: TopP = None
    top_k: TopK = None
    min_p: MinP = None
    seed: Seed = None
    repetition_penalty: RepetitionPenalty = None
    presence_penalty: PresencePenalty = 0.0
    frequency_penalty: FrequencyPenalty = 0.0
    stop: Stop = None
    stop_token_ids: StopTokenIds = Field(default_factory=list)
    ignore_eos: IgnoreEos = False
    include_stop_str_in_output: IncludeStop = False
    skip_special_tokens: SkipSpecialTokens = True
    spaces_between_special_tokens: bool = Field(
        True, description=f"{NO_EFFECT}: no space is added between special tokens."
    )
    truncate_prompt_tokens: int | None = Field(
        None,
        ge=-1,
        le=MAX_TOKENS,
        description="How many tokens of a longer prompt are kept; -1: as many as leave room for `max_tokens`.",
    )
    truncation_side: Literal["left", "right"] | None = Field(
        None, description="Where a longer prompt is cut: `left`, the default, keeps its end."
    )
    logit_bias: Biases = Field(default_factory=dict)
    allowed_token_ids: AllowedIds = Field(default_factory=list)
    bad_words: BadWords = Field(default_factory=list)
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
    regex: str | None = Field(None, description="SGLang's name of `structured_outputs.regex`.")
    ebnf: str | None = Field(None, description="SGLang's name of `structured_outputs.grammar`.")
    prompt_logprobs: int | None = Field(
        None,
        ge=0,
        le=MAX_LOGPROBS,
        description="Gives each token of the prompt with its log probability, and so many likeliest, as vLLM does; "
        "not in streams.",
    )
    return_token_ids: bool = Field(
        False, description="Whether `token_ids` of each choice and chunk are given, and `prompt_token_ids` once."
    )
    return_tokens_as_token_ids: bool = Field(False, description="Whether `logprobs` names tokens by their ids.")
    cache_salt: CacheSalt = None
    priority: Priority = 0
    timeout: Timeout = None
    hallmark: HallmarkWanted = False
    metadata: _Object | None = Field(None, description=f"{NO_EFFECT}: no request is stored.")
    store: bool | None = Field(None, description=f"{NO_EFFECT}: no answer is stored.")
    service_tier: Label | None = Field(None, description=f"{NO_EFFECT}: all are served alike.")
    prediction: _Object | None = Field(None, description=f"{NO_EFFECT}: an answer is not guessed ahead.")
    cache_control: _Object | None = Field(None, description=f"{NO_EFFECT}: prompts are cached anyway.")
    prompt_cache_options: _Object | None = Field(None, description=f"{NO_EFFECT}: prompts are cached anyway.")
    prompt_cache_retention: Label | None = Field(None, description=f"{NO_EFFECT}: prompts are cached anyway.")
    request_id: RequestId = None
    user: ForWhom = None
    safety_identifier: ForWhom = None
    prompt_cache_key: ForWhom = None

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
        None, ge=0, le=MAX_TOKENS, description="Tokens that each answer may have; 0 only with `echo`. Default: 16."
    )
    add_special_tokens: bool = Field(True, description="Whether a text gets the tokens that the tokenizer adds.")
    echo: bool = Field(False, description="Whether the answer begins with its prompt, a text as it was sent.")
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
        """Return each prompt, a text or token ids."""
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
    cache_control: _Object | None = Field(None, description=f"{NO_EFFECT}: prompts are cached anyway.")
    prompt_cache_breakpoint: _Object | None = Field(None, description=f"{NO_EFFECT}: prompts are cached anyway.")


_Content = Annotated[
    Annotated[Text, tag("text")] | Annotated[Annotated[list[TextPart], Field(fail_fast=True)], tag("list")],
    one_of(kind_of_item, "a string or a list of text parts"),
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

    role: Literal["assistant", "developer", "system", "tool", "user"] = Field(
        description="`developer` is the same as `system`."
    )
    content: _Content | None = Field(None, description="Parts are joined by newlines. Only an assistant may have none.")
    name: Annotated[Text, Field(max_length=64)] | None = Field(None, description="Given to the model's chat template.")
    tool_calls: Annotated[list[ToolCall], Field(max_length=MAX_CALLS, fail_fast=True)] = Field(
        default_factory=list, description="What an assistant has called."
    )
    tool_call_id: Annotated[Text, Field(max_length=256)] | None = Field(
        None, description="The call that a tool's message answers."
    )
    reasoning_content: Text | None = Field(None, description="An assistant's reasoning, for the chat template.")
    reasoning: Text | None = Field(None, description="Another name of `reasoning_content`, which goes first.")
    cache_control: _Object | None = Field(None, description=f"{NO_EFFECT}: prompts are cached anyway.")


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
    max_completion_tokens: TokenCount | None = Field(
        None, description="The newer name of `max_tokens`; they must not differ."
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

    unsupported: ClassVar[Mapping[str, tuple[object, ...]]] = {"chat_template": ()}
    nested: ClassVar[Mapping[str, type[RequestModel]]] = {"messages": Message, "tools": Tool}

    model: ModelName = None
    prompt: Text | None = Field(None, description="A text.", examples=["Once upon a time"])
    add_special_tokens: bool = Field(True, description="Whether a prompt gets the tokens that the tokenizer adds.")
    messages: Messages | None = Field(None, description="A conversation.")
    add_generation_prompt: bool | None = Field(
        None, description="Whether messages end with the opening of an answer; not with `continue_final_message`."
    )
    continue_final_message: ContinueFinalMessage = False
    tools: ToolList | None = Field(None, description="Functions that the model is told of; only with messages.")
    chat_template_kwargs: JsonObject | None = Field(None, description="As in a chat; only with messages.")


class DetokenizeRequest(RequestModel):
    model: ModelName = None
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
