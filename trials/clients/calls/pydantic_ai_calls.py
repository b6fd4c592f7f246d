"""pydantic-ai: an agent that chats, streams, calls tools, and answers with objects; over chat and over responses."""

from typing import Literal

from checks import BASE_URL, MODEL, call, end, expect
from pydantic import BaseModel, ConfigDict
from pydantic_ai import Agent, NativeOutput, ToolOutput
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider

PROVIDER = OpenAIProvider(base_url=BASE_URL, api_key="none")

ONE_CALL = {"parallel_tool_calls": False}  # a turn: the demo would go on calling


class Weather(BaseModel):
    model_config = ConfigDict(extra="forbid")  # the demo would go on adding properties
    city: Literal["Paris", "Oslo", "Rome"]
    is_warm: bool


def agent(kind: type = OpenAIChatModel, *, max_tokens: int = 16, **more: object) -> Agent:
    return Agent(
        kind(MODEL, provider=PROVIDER), model_settings=ONE_CALL | {"max_tokens": max_tokens}, retries=0, **more
    )


def chat(kind: type) -> None:
    done = agent(kind, instructions="Be brief.").run_sync("Tell me about the forest.")
    expect(done.output and done.usage.output_tokens <= 16, "an answer has text and counted tokens")


async def streaming() -> None:
    async with agent().run_stream("Tell me about the forest.") as stream:
        parts = [part async for part in stream.stream_text(delta=True)]
    expect("".join(parts), "there is text")


def structured(output: object, kind: type = OpenAIChatModel) -> None:
    done = agent(kind, max_tokens=512, output_type=output).run_sync("How is the weather?")
    expect(isinstance(done.output, Weather), f"an object of the schema, not {type(done.output).__name__}")


def tools() -> None:
    """The output is a tool, and so is the weather: the model must call one of them in each turn."""
    asked = []
    weather = agent(max_tokens=512, output_type=ToolOutput(Weather))

    @weather.tool_plain
    def get_weather(is_warm: bool) -> str:
        """The weather, if it is warm."""
        asked.append(is_warm)
        return "18 degrees"

    done = weather.run_sync("How is the weather?")
    expect(isinstance(done.output, Weather), "it ends with an object of the schema")


call("chat", lambda: chat(OpenAIChatModel))
call("streaming", streaming)
call("structured output by a tool", lambda: structured(ToolOutput(Weather)))
call("structured output by a schema", lambda: structured(NativeOutput(Weather)))
call("tools", tools)
call("responses", lambda: chat(OpenAIResponsesModel))
call("structured responses", lambda: structured(NativeOutput(Weather), OpenAIResponsesModel))
end()
