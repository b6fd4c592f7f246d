"""Requests that OpenAI's and vLLM's clients send beside chats."""

from collections.abc import Mapping
from typing import ClassVar

from pydantic import Field

from server.errors import InvalidValue
from server.http.chat.requests import ContinueFinalMessage, Message, Messages, ToolList
from server.http.chat.tools import ChatTool
from server.http.common.fields import MAX_TOKENS, ModelName
from server.http.common.inputs import MAX_PROMPTS, Prompt, TokenIds, listed
from server.http.common.validation import JsonObject, RequestModel, Text
from server.http.generation.requests import MAX_LOGPROBS, GenerationRequest


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

    def check(self) -> None:
        super().check()
        if self.max_tokens == 0 and not self.echo:
            raise InvalidValue("max_tokens must be at least 1 without echo, got 0.", param="max_tokens")

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
    nested: ClassVar[Mapping[str, type[RequestModel]]] = {"messages": Message, "tools": ChatTool}

    model: ModelName = None
    prompt: Text | None = Field(None, description="A text.", examples=["Once upon a time"])
    add_special_tokens: bool = Field(True, description="Whether a prompt gets the tokens that the tokenizer adds.")
    messages: Messages | None = Field(None, description="A conversation.")
    add_generation_prompt: bool | None = Field(
        None, description="Whether messages end with the opening of an answer; not with `continue_final_message`."
    )
    continue_final_message: ContinueFinalMessage = False
    tools: ToolList | None = Field(None, description="Functions that the model sees; only with messages.")
    chat_template_kwargs: JsonObject | None = Field(None, description="As in a chat; only with messages.")


class DetokenizeRequest(RequestModel):
    model: ModelName = None
    tokens: TokenIds = Field(description="Token ids, at least one.", examples=[[1, 2]])
