"""langchain-openai: chat, streaming, tools, structured output by both methods, log probabilities, an agent."""

from typing import Literal

from checks import BASE_URL, EMBED_URL, MODEL, call, end, expect, expect_weather
from langchain.agents import create_agent
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAI, OpenAIEmbeddings
from pydantic import BaseModel, ConfigDict


class Weather(BaseModel):
    """The weather of a city."""

    model_config = ConfigDict(extra="forbid")  # the demo would go on adding properties
    city: Literal["Paris", "Oslo", "Rome"]
    is_warm: bool


@tool(args_schema=Weather)
def get_weather(city: str, is_warm: bool) -> str:
    """The weather of a city, if it is warm."""
    return f"18 degrees in {city}, {is_warm}"


def model(max_tokens: int = 16, **more: object) -> ChatOpenAI:
    return ChatOpenAI(model=MODEL, base_url=BASE_URL, api_key="none", max_tokens=max_tokens, max_retries=0, **more)


def chat() -> None:
    answer = model().invoke("Tell me about the forest.")
    expect(answer.content and answer.usage_metadata["output_tokens"] <= 16, "an answer has text and counted tokens")


def streaming() -> None:
    chunks = list(model(stream_usage=True).stream("Tell me about the forest."))
    expect("".join(str(chunk.content) for chunk in chunks), "there is text")
    expect(any(chunk.usage_metadata for chunk in chunks), "and its tokens are counted")


def completions() -> None:
    expect(OpenAI(model=MODEL, base_url=BASE_URL, api_key="none", max_tokens=8).invoke("Once upon"), "there is text")


def tools() -> None:
    from checks import WEATHER_TOOL

    asked = [HumanMessage("How is the weather?")]
    answer = model(512).bind_tools([WEATHER_TOOL], tool_choice="any", parallel_tool_calls=False).invoke(asked)
    expect(answer.tool_calls and answer.tool_calls[0]["name"] == "get_weather", "the tool is called by its name")
    expect_weather(answer.tool_calls[0]["args"])
    results = [ToolMessage("18 degrees", tool_call_id=each["id"]) for each in answer.tool_calls]
    after = model().bind_tools([WEATHER_TOOL]).invoke([*asked, answer, *results])
    expect(after.response_metadata["finish_reason"], "the conversation goes on after the tool's result")


def streamed_tools() -> None:
    from checks import WEATHER_TOOL

    whole = None
    for chunk in model(512).bind_tools([WEATHER_TOOL], tool_choice="get_weather").stream("How is the weather?"):
        whole = chunk if whole is None else whole + chunk
    expect_weather(whole.tool_calls[0]["args"])


def structured(method: str) -> None:
    found = model(512).with_structured_output(Weather, method=method).invoke("How is the weather?")
    expect(isinstance(found, Weather), f"an object of the schema, not {type(found).__name__}")


def logprobs() -> None:
    answer = model(4, logprobs=True, top_logprobs=2).invoke("Hello")
    expect(len(answer.response_metadata["logprobs"]["content"][0]["top_logprobs"]) == 2, "two likeliest tokens")


def agent() -> None:
    """The demo never calls a tool by itself: the first turn is made to, the second answers."""
    forced = (
        model(512).bind_tools([get_weather], tool_choice="any", parallel_tool_calls=False).invoke("How is the weather?")
    )
    begun = [HumanMessage("How is the weather?"), forced]
    begun += [ToolMessage(get_weather.invoke(each["args"]), tool_call_id=each["id"]) for each in forced.tool_calls]
    done = create_agent(model(), tools=[get_weather]).invoke({"messages": begun})
    expect(len(done["messages"]) > len(begun), "the agent answers after its tool")


def embeddings() -> None:
    client = OpenAIEmbeddings(model=MODEL, base_url=EMBED_URL, api_key="none", check_embedding_ctx_length=False)
    expect(len(client.embed_documents(["a forest"])[0]) == 256, "a vector of 256")


call("chat", chat)
call("streaming", streaming)
call("completions", completions)
call("tools", tools)
call("streamed tools", streamed_tools)
call("structured output (json_schema)", lambda: structured("json_schema"))
call("structured output (function_calling)", lambda: structured("function_calling"))
call("logprobs", logprobs)
call("agent", agent)
call("embeddings", embeddings)
end()
