"""AutoGen: its client for OpenAI's chat, and agents: a run, streamed, a tool, an object, a team of two."""

from typing import Literal

from autogen_agentchat.agents import AssistantAgent
from autogen_agentchat.base import TaskResult
from autogen_agentchat.conditions import MaxMessageTermination
from autogen_agentchat.messages import ModelClientStreamingChunkEvent, StructuredMessage
from autogen_agentchat.teams import RoundRobinGroupChat
from autogen_core import CancellationToken
from autogen_core.models import CreateResult, SystemMessage, UserMessage
from autogen_core.tools import FunctionTool
from autogen_ext.models.openai import OpenAIChatCompletionClient
from checks import BASE_URL, MODEL, call, end, expect, expect_weather
from pydantic import BaseModel, ConfigDict

QUESTION = "How is the weather?"
ASKED = [SystemMessage(content="Be brief."), UserMessage(content=QUESTION, source="anna")]
ABILITIES = {
    "vision": False,
    "function_calling": True,
    "json_output": True,
    "family": "unknown",
    "structured_output": True,
    "multiple_system_messages": False,
}


class Weather(BaseModel):
    model_config = ConfigDict(extra="forbid")  # the demo would go on adding properties
    city: Literal["Paris", "Oslo", "Rome"]
    is_warm: bool


async def get_weather(city: Literal["Paris", "Oslo", "Rome"], unit: Literal["celsius", "fahrenheit"]) -> str:
    """The weather of a city."""
    return f"18 degrees {unit} in {city}"


TOOL = FunctionTool(get_weather, description="The weather of a city.", strict=True)


def client(**more: object) -> OpenAIChatCompletionClient:
    return OpenAIChatCompletionClient(
        model=MODEL, base_url=BASE_URL, api_key="none", max_retries=0, model_info=ABILITIES, **more
    )


def agent(name: str = "forester", **more: object) -> AssistantAgent:
    return AssistantAgent(name, client(), system_message="Be brief.", **more)


async def create() -> None:
    answer = await client().create(ASKED)
    expect(isinstance(answer.content, str) and answer.content, "an answer has text")
    expect(answer.finish_reason == "stop" and answer.usage.completion_tokens > 0, "it has stopped, and is counted")


async def streamed() -> None:
    parts = [
        part
        async for part in client().create_stream(ASKED, extra_create_args={"stream_options": {"include_usage": True}})
    ]
    whole = parts.pop()
    expect(isinstance(whole, CreateResult) and whole.content == "".join(parts), "parts of the text, then the text")
    expect(whole.usage.completion_tokens > 0, "its tokens are counted")


async def forced() -> None:
    answer = await client(parallel_tool_calls=False).create(ASKED, tools=[TOOL], tool_choice=TOOL)
    expect(answer.finish_reason == "function_calls", f"it calls a function, not {answer.finish_reason}")
    expect_weather(answer.content[0].arguments)
    expect("18 degrees" in await TOOL.run_json({"city": "Oslo", "unit": "celsius"}, CancellationToken()), "it runs")


async def structured() -> None:
    answer = await client().create(ASKED, json_output=Weather)
    Weather.model_validate_json(answer.content)


async def run() -> None:
    done = await agent(tools=[TOOL]).run(task=QUESTION)
    expect(done.messages[-1].to_text().strip(), "a run ends with text")


async def streamed_run() -> None:
    running = agent(tools=[TOOL], model_client_stream=True).run_stream(task=QUESTION)
    found = [event async for event in running]
    expect(isinstance(found[-1], TaskResult), "a run ends with its result")
    expect(any(isinstance(event, ModelClientStreamingChunkEvent) for event in found), "text is streamed")


async def structured_run() -> None:
    done = await agent(output_content_type=Weather).run(task=QUESTION)
    last = done.messages[-1]
    expect(isinstance(last, StructuredMessage) and isinstance(last.content, Weather), "a run ends with an object")


async def team() -> None:
    two = RoundRobinGroupChat([agent("forester"), agent("sailor")], termination_condition=MaxMessageTermination(3))
    done = await two.run(task=QUESTION)
    expect([each.source for each in done.messages] == ["user", "forester", "sailor"], "each agent has its turn")


call("chat", create)
call("streaming", streamed)
call("forced tool", forced)
call("structured output", structured)
call("agent's run with tools", run)
call("agent's streamed run", streamed_run)
call("agent's structured output", structured_run)
call("team of two agents", team)
end()
