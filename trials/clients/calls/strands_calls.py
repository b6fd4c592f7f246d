"""Strands Agents: a run, streamed events, a tool, an object; by its models for chat and for responses."""

from typing import Literal

from checks import BASE_URL, MODEL, call, end, expect, is_streamed
from pydantic import BaseModel, ConfigDict
from strands import Agent, tool
from strands.models import Model
from strands.models.openai import OpenAIModel
from strands.models.openai_responses import OpenAIResponsesModel

QUESTION = "How is the weather?"
SETTINGS = {"base_url": BASE_URL, "api_key": "none", "max_retries": 0}


class Weather(BaseModel):
    """The weather of a city."""

    model_config = ConfigDict(extra="forbid")  # the demo would go on adding properties
    city: Literal["Paris", "Oslo", "Rome"]
    is_warm: bool


@tool
def get_weather(is_warm: bool) -> str:
    """The weather, if it is warm.

    Args:
        is_warm: whether it is
    """
    return f"18 degrees, {is_warm}"


def model(kind: str, **params: object) -> Model:
    if kind == "responses":
        return OpenAIResponsesModel(client_args=SETTINGS, model_id=MODEL, params=params)
    return OpenAIModel(client_args=SETTINGS, model_id=MODEL, params=params)


def agent(kind: str, **params: object) -> Agent:
    return Agent(model(kind, **params), system_prompt="Be brief.", tools=[get_weather], callback_handler=None)


def run(kind: str) -> None:
    done = agent(kind)(QUESTION)
    expect(done.stop_reason == "end_turn" and str(done).strip(), f"a turn ends with text, not by {done.stop_reason}")
    expect(done.metrics.accumulated_usage["outputTokens"] > 0, "and its tokens are counted")


async def streamed(kind: str) -> None:
    for _ in range(3):
        if is_streamed([event["data"] async for event in agent(kind).stream_async(QUESTION) if "data" in event]):
            return
    expect(False, "text is streamed")


def structured(kind: str) -> None:
    """Strands forces a tool of the schema once the model has ended its turn without it."""
    done = agent(kind, parallel_tool_calls=False)(QUESTION, structured_output_model=Weather)
    expect(isinstance(done.structured_output, Weather), "a run ends with an object of the schema")


for name in ("chat", "responses"):
    call(f"run ({name})", lambda name=name: run(name))
    call(f"streamed run ({name})", lambda name=name: streamed(name))
    call(f"structured output ({name})", lambda name=name: structured(name))
end()
