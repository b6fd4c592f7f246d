"""agno: agents that chat, stream, call a tool, and answer with objects; by its models for vLLM, chat and responses."""

from typing import Literal

from agno.agent import Agent, RunOutput
from agno.knowledge.embedder.openai import OpenAIEmbedder
from agno.models.base import Model
from agno.models.openai import OpenAIResponses
from agno.models.openai.like import OpenAILike
from agno.models.vllm import VLLM
from agno.tools import tool
from checks import BASE_URL, EMBED_URL, MODEL, call, end, expect, is_streamed
from pydantic import BaseModel, ConfigDict

QUESTION = "How is the weather?"
KINDS = {"vllm": VLLM, "chat": OpenAILike, "responses": OpenAIResponses}


class Weather(BaseModel):
    model_config = ConfigDict(extra="forbid")  # the demo would go on adding properties
    city: Literal["Paris", "Oslo", "Rome"]
    is_warm: bool


@tool(stop_after_tool_call=True)  # a forced choice stays forced: the demo would go on calling
def get_weather(is_warm: bool) -> str:
    """The weather, if it is warm."""
    return f"18 degrees, {is_warm}"


def agent(kind: str, **more: object) -> Agent:
    model: Model = KINDS[kind](id=MODEL, base_url=BASE_URL, api_key="none", max_retries=0)
    return Agent(model=model, instructions="Be brief.", telemetry=False, **more)


def text_of(done: RunOutput) -> str:
    expect(done.status == "COMPLETED", f"the run is completed, not {done.status}: {done.content}")
    return str(done.content)


def run(kind: str) -> None:
    expect(text_of(agent(kind, tools=[get_weather]).run(QUESTION)).strip(), "a run ends with text")


def streamed(kind: str) -> None:
    def parts() -> list[str]:
        events = [*agent(kind).run(QUESTION, stream=True)]
        errors = [event.content for event in events if event.event == "RunError"]
        expect(not errors, f"no error is streamed: {errors}")
        return [event.content for event in events if event.event == "RunContent" and event.content]

    expect(any(is_streamed(parts()) for _ in range(3)), "text is streamed")


def structured(kind: str) -> None:
    done = agent(kind, output_schema=Weather).run(QUESTION)
    expect(isinstance(done.content, Weather), f"an object of the schema, not {done.content!r}")


def forced(kind: str) -> None:
    caller = agent(kind, tools=[get_weather], tool_choice="required")
    done = caller.run(QUESTION)
    names = [each.tool_name for each in done.tools or []]
    expect("get_weather" in names, f"the tool is called, not {names} and {done.content!r}")


def embeddings() -> None:
    embedder = OpenAIEmbedder(id=MODEL, dimensions=256, base_url=EMBED_URL, api_key="none")
    expect(len(embedder.get_embedding("a forest")) == 256, "a vector of 256")


for name in KINDS:
    call(f"run ({name})", lambda name=name: run(name))
    call(f"streamed run ({name})", lambda name=name: streamed(name))
    call(f"structured output ({name})", lambda name=name: structured(name))
    call(f"forced tool ({name})", lambda name=name: forced(name))
call("embeddings", embeddings)
end()
