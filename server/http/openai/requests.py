"""Requests that OpenAI's and vLLM's clients send beside chats."""

from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from server.errors import InvalidValue
from server.http.chat.requests import ContinueFinalMessage, ImageBounds, Message, Messages, ToolList
from server.http.chat.tools import TOOLS
from server.http.common.fields import MAX_BAD_WORDS, MAX_TOKENS, LimitedId, ModelName
from server.http.common.inputs import MAX_PROMPTS, Prompt, TokenIds, listed
from server.http.common.validation import JsonObject, RequestModel, Text, Variants
from server.http.generation.requests import MAX_LOGPROBS, GenerationRequest

MAX_WORD_IDS = 1024  # of one word
MAX_MARKS = 32  # special tokens of a grammar, as its check knows them

_OF_MESSAGES = ("continue_final_message", "tools", "chat_template_kwargs", "mm_processor_kwargs")  # of TokenizeRequest

_Ids = Annotated[list[LimitedId], Field(min_length=1, max_length=MAX_WORD_IDS, fail_fast=True)]
_MarkIds = Annotated[list[LimitedId], Field(max_length=MAX_MARKS, fail_fast=True)]


class GrammarBefore(RequestModel):
    """Text that stands before an answer, as a grammar in Lark whose rule is `before`."""

    text: Text
    tokens: _MarkIds = Field(default_factory=list, description="Tokens that it names token_0, token_1, ...")


class ExactGrammar(RequestModel):
    """A grammar as the engine takes it."""

    nested: ClassVar[Mapping[str, type[RequestModel]]] = {"before": GrammarBefore}

    kind: Literal["json_schema", "regex", "lark"]
    text: Text
    tokens: _MarkIds = Field(default_factory=list, description="Tokens that a text in Lark names token_0, token_1, ...")
    before: GrammarBefore | None = None


class ExactSampling(RequestModel):
    """Sampling parameters that no other field can say exactly."""

    nested: ClassVar[Mapping[str, type[RequestModel]]] = {"grammar": ExactGrammar}

    bad_words: Annotated[list[_Ids], Field(max_length=2 * MAX_BAD_WORDS, fail_fast=True)] = Field(
        default_factory=list, description="Sequences of token ids that no answer has; not with `bad_words`."
    )
    grammar: ExactGrammar | None = Field(
        None, description="What the answer must match; not with another field that binds it."
    )


class CompletionRequest(GenerationRequest):
    nested: ClassVar[Mapping[str, type[RequestModel] | Variants]] = {
        **GenerationRequest.nested,
        "exact_sampling": ExactSampling,
    }

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

    def check(self) -> None:
        super().check()
        if self.max_tokens == 0 and not self.echo:
            raise InvalidValue("max_tokens must be at least 1 without echo, got 0.", param="max_tokens")
        if self.max_tokens == 0 and self.receipt:
            raise InvalidValue("A receipt is of an answer, and max_tokens of 0 asks for none.", param="receipt")
        if self.exact_sampling is not None and self.exact_sampling.bad_words and self.bad_words:
            message = "bad_words and exact_sampling.bad_words both name words; send one."
            raise InvalidValue(message, param="exact_sampling.bad_words")

    exact_sampling: ExactSampling | None = Field(
        None, description="Words and a grammar as a receipt holds them, to compute its answer again."
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
        return listed(self.prompt)


class TokenizeRequest(RequestModel):
    """Either a prompt or messages."""

    unsupported: ClassVar[Mapping[str, tuple[object, ...]]] = {"chat_template": ()}
    nested: ClassVar[Mapping[str, type[RequestModel] | Variants]] = {
        "messages": Message,
        "mm_processor_kwargs": ImageBounds,
        "tools": TOOLS,
    }

    model: ModelName = None
    prompt: Text | None = Field(None, description="A text.", examples=["Once upon a time"])
    add_special_tokens: bool | None = Field(
        None,
        description="Whether the tokens that the tokenizer adds are there. Default: true of a prompt, false of "
        "messages, whose template has written its own.",
    )
    messages: Messages | None = Field(None, description="A conversation.")
    add_generation_prompt: bool | None = Field(
        None, description="Whether messages end with the opening of an answer; not with `continue_final_message`."
    )
    continue_final_message: ContinueFinalMessage = False
    tools: ToolList | None = Field(None, description="Functions that the model sees; only with messages.")
    chat_template_kwargs: JsonObject | None = Field(None, description="As in a chat; only with messages.")
    mm_processor_kwargs: ImageBounds | None = Field(None, description="As in a chat; only with messages.")

    def check(self) -> None:
        """Raises InvalidValue where it has not just one of both, or a prompt beside fields of messages."""
        if (self.prompt is None) == (self.messages is None):
            raise InvalidValue("Send either prompt or messages.", param="prompt")
        beside = () if self.prompt is None else _OF_MESSAGES
        field = next((name for name in beside if getattr(self, name)), None)
        if field is not None:
            raise InvalidValue(f"{field} is of messages, and changes nothing of a prompt; leave it out.", param=field)


class DetokenizeRequest(RequestModel):
    model: ModelName = None
    tokens: TokenIds = Field(description="Token ids, at least one.", examples=[[1, 2]])
