"""llama-index's OpenAILike: chat, completion, both streamed, tools, structured output."""

from typing import Literal

from checks import BASE_URL, MODEL, call, end, expect
from llama_index.core.llms import ChatMessage
from llama_index.core.prompts import PromptTemplate
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike
from pydantic import BaseModel, ConfigDict

ASK = [ChatMessage(role="user", content="Tell me about the forest.")]


class Weather(BaseModel):
    """The weather of a city."""

    model_config = ConfigDict(extra="forbid")  # the demo would go on adding properties
    city: Literal["Paris", "Oslo", "Rome"]
    is_warm: bool


def model(max_tokens: int = 16, **more: object) -> OpenAILike:
    fixed = {"api_base": BASE_URL, "api_key": "none", "context_window": 4096, "max_retries": 0}
    return OpenAILike(model=MODEL, max_tokens=max_tokens, **(fixed | {"is_chat_model": True} | more))


def chat() -> None:
    expect(model().chat(ASK).message.content, "an answer has text")


def streamed_chat() -> None:
    expect("".join(part.delta or "" for part in model().stream_chat(ASK)), "there is text")


def complete() -> None:
    expect(model(is_chat_model=False).complete("Once upon").text, "there is text")


def streamed_complete() -> None:
    expect("".join(part.delta or "" for part in model(is_chat_model=False).stream_complete("Once")), "there is text")


def tools() -> None:
    def get_weather(city: str, is_warm: bool) -> str:
        """The weather of a city, if it is warm."""
        return f"{city}, {is_warm}"

    caller = model(512, is_function_calling_model=True)
    answer = caller.chat_with_tools(
        [FunctionTool.from_defaults(get_weather, fn_schema=Weather)], user_msg="How is the weather?", tool_required=True
    )
    (called, *_) = caller.get_tool_calls_from_response(answer)
    expect(called.tool_name == "get_weather", "the tool is called by its name")
    expect(isinstance(called.tool_kwargs["is_warm"], bool), "with an argument of its type")


def structured(**how: bool) -> None:
    found = model(512, **how).structured_predict(Weather, PromptTemplate("How is the weather?"))
    expect(isinstance(found, Weather), "an object of the schema")


call("chat", chat)
call("streamed chat", streamed_chat)
call("complete", complete)
call("streamed complete", streamed_complete)
call("tools", tools)
call("structured output by a tool", lambda: structured(is_function_calling_model=True))
call("structured output by a schema", lambda: structured(should_use_structured_outputs=True))
end()
