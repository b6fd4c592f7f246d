"""Fields that requests of texts and of chats share. One that is not implemented is refused by its name."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from server.errors import InvalidValue
from server.http.common.fields import (
    MAX_TOKENS,
    AllowedIds,
    AnyObject,
    BadWords,
    Biases,
    CacheSalt,
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
    StopTokenIds,
    Stream,
    Temperature,
    Timeout,
    TokenCount,
    TopK,
    TopP,
    one_of,
)
from server.http.common.inputs import MAX_PROMPTS
from server.http.common.validation import NO_EFFECT, RequestModel, Text, Variants, tag

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


def _kind_of_schema(value: Any) -> str | None:
    return "=text" if isinstance(value, str) else "=object" if isinstance(value, dict) else None


_Schema = Annotated[
    Annotated[AnyObject, tag("object")] | Annotated[Text, tag("text")], one_of(_kind_of_schema, "a JSON schema")
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
    nested: ClassVar[Mapping[str, type[RequestModel] | Variants]] = {"stream_options": StreamOptions}
    prompt_field: ClassVar[str] = "prompt"  # which an error of the prompt names

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
    response_format: AnyObject | None = Field(
        None,
        description='`{"type": "text"}`, `{"type": "json_object"}` or `{"type": "json_schema", "json_schema": '
        '{"name": ..., "schema": ...}}`. A schema binds the answer whether or not it is `strict`.',
    )
    structured_outputs: AnyObject | None = Field(
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
    receipt: ReceiptWanted = False
    metadata: AnyObject | None = Field(None, description=f"{NO_EFFECT}: no request is stored.")
    store: bool | None = Field(None, description=f"{NO_EFFECT}: no answer is stored.")
    service_tier: Label | None = Field(None, description=f"{NO_EFFECT}: all are served alike.")
    prediction: AnyObject | None = Field(None, description=f"{NO_EFFECT}: an answer is not guessed ahead.")
    cache_control: AnyObject | None = Field(None, description=f"{NO_EFFECT}: prompts are cached anyway.")
    prompt_cache_options: AnyObject | None = Field(None, description=f"{NO_EFFECT}: prompts are cached anyway.")
    prompt_cache_retention: Label | None = Field(None, description=f"{NO_EFFECT}: prompts are cached anyway.")
    request_id: RequestId = None
    user: ForWhom = None
    safety_identifier: ForWhom = None
    prompt_cache_key: ForWhom = None

    def check(self) -> None:
        """Raises InvalidValue where fields contradict each other."""
        if self.stream_options is not None and not self.stream:
            raise InvalidValue("stream_options needs stream to be true.", param="stream_options")
        if self.prompt_logprobs is not None and self.stream:
            raise InvalidValue("prompt_logprobs is not given in streams.", param="prompt_logprobs")

    @property
    def goes_on(self) -> bool:
        """True where the answer's text goes on from the prompt's; else it is a text of its own."""
        return True

    @property
    def may_call(self) -> bool:
        """True where the model has tools that it may call."""
        return False

    @property
    def stops(self) -> tuple[str, ...]:
        """The stop strings."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    @property
    def num_likeliest(self) -> int | None:
        """Likeliest tokens that are given with each token of the answer; None where it has no log probabilities."""
        return None

    @property
    def num_prompt_likeliest(self) -> int | None:
        """Likeliest tokens that are computed for each token of the prompt."""
        return self.prompt_logprobs
