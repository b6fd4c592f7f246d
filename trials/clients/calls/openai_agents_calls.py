"""OpenAI's agents: a run, streamed and whole, a tool, an object; over responses, its default, and over chat."""

from typing import Literal

from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from checks import BASE_URL, MODEL, call, end, expect
from openai import AsyncOpenAI
from pydantic import BaseModel

set_tracing_disabled(True)
# A text that is cut is an error to this library, and a small model's may not end by itself: its first sentence does.
LONG = 1500
SENTENCE = {"stop": ["."]}
KINDS = {"chat": OpenAIChatCompletionsModel, "responses": OpenAIResponsesModel}


class Weather(BaseModel):
    city: Literal["Paris", "Oslo", "Rome"]
    is_warm: bool


@function_tool
def get_weather(is_warm: bool) -> str:
    """The weather, if it is warm."""
    return f"18 degrees, {is_warm}"


def agent(kind: str, *, max_tokens: int = 16, tool_choice: str | None = None, **more: object) -> Agent:
    client = AsyncOpenAI(base_url=BASE_URL, api_key="none", max_retries=0)
    settings = ModelSettings(
        max_tokens=max_tokens,
        tool_choice=tool_choice,
        parallel_tool_calls=None if tool_choice is None else False,
        extra_body=SENTENCE,
    )
    model = KINDS[kind](model=MODEL, openai_client=client)
    return Agent(name="Forester", instructions="Be brief.", model=model, model_settings=settings, **more)


async def run(kind: str) -> None:
    done = await Runner.run(agent(kind, max_tokens=LONG), "Hello!")
    expect(done.final_output, "a run ends with text")


async def streamed(kind: str) -> None:
    running = Runner.run_streamed(agent(kind, max_tokens=LONG), "Hello!")
    kinds = {event.data.type async for event in running.stream_events() if event.type == "raw_response_event"}
    expect("response.output_text.delta" in kinds, f"text is streamed, among {sorted(kinds)}")


async def tool(kind: str) -> None:
    caller = agent(kind, max_tokens=LONG, tool_choice="required", tools=[get_weather])
    done = await Runner.run(caller, "How is the weather?", max_turns=3)
    names = [type(item).__name__ for item in done.new_items]
    expect("ToolCallOutputItem" in names, f"the tool is called, among {names}")
    expect(done.final_output is not None, "and the run ends with an answer")


async def structured(kind: str) -> None:
    done = await Runner.run(agent(kind, max_tokens=512, output_type=Weather), "How is the weather?")
    expect(isinstance(done.final_output, Weather), "a run ends with an object of the schema")


for name in KINDS:
    call(f"run ({name})", lambda name=name: run(name))
    call(f"streamed run ({name})", lambda name=name: streamed(name))
    call(f"tool ({name})", lambda name=name: tool(name))
    call(f"structured output ({name})", lambda name=name: structured(name))
end()
