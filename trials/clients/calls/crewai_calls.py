"""CrewAI: its model for OpenAI-compatible servers, an agent with a tool, a crew, and a task with an object."""

import os
from pathlib import Path
from typing import Literal

from checks import BASE_URL, FOLDER, MODEL, call, end, expect

# Nothing to its makers, nothing into the user's home.
os.environ |= {"CREWAI_DISABLE_TELEMETRY": "true", "OTEL_SDK_DISABLED": "true", "CREWAI_TRACING_ENABLED": "false"}
os.environ |= {"CREWAI_STORAGE_DIR": FOLDER, "HOME": FOLDER, "XDG_DATA_HOME": str(Path(FOLDER, "data"))}

from crewai import LLM, Agent, Crew, Task
from crewai.tools import tool
from pydantic import BaseModel, ConfigDict

QUESTION = "How is the weather?"


class Weather(BaseModel):
    model_config = ConfigDict(extra="forbid")  # the demo would go on adding properties
    city: Literal["Paris", "Oslo", "Rome"]
    is_warm: bool


@tool("get_weather")
def get_weather(is_warm: bool) -> str:
    """The weather, if it is warm."""
    return f"18 degrees, {is_warm}"


def llm(provider: str, **more: object) -> LLM:
    return LLM(model=f"{provider}/{MODEL}", base_url=BASE_URL, api_key="none", max_retries=0, **more)


def crew(provider: str, task: dict[str, object] | None = None, **more: object) -> Crew:
    agent = Agent(
        role="Forester", goal="Answer.", backstory="Lives in the forest.", llm=llm(provider), max_iter=2, **more
    )
    asked = Task(description=QUESTION, expected_output="One sentence.", agent=agent, **(task or {}))
    return Crew(agents=[agent], tasks=[asked], verbose=False)


def chat(provider: str) -> None:
    expect(llm(provider, max_tokens=16).call(QUESTION), "an answer has text")


def streamed(provider: str) -> None:
    expect(llm(provider, max_tokens=16, stream=True).call(QUESTION), "a streamed answer has text")


def structured(provider: str) -> None:
    found = llm(provider, response_format=Weather).call(QUESTION)
    expect(isinstance(found, Weather) or Weather.model_validate_json(found), "an object of the schema")


def run(provider: str) -> None:
    done = crew(provider, tools=[get_weather]).kickoff()
    expect(done.raw.strip() and done.token_usage.completion_tokens > 0, "a run ends with text whose tokens are counted")


def structured_run(provider: str) -> None:
    done = crew(provider, {"output_pydantic": Weather}).kickoff()
    expect(isinstance(done.pydantic, Weather), f"a task ends with an object, not {done.pydantic!r}")


for name in ("openai", "hosted_vllm"):
    call(f"chat ({name})", lambda name=name: chat(name))
    call(f"streaming ({name})", lambda name=name: streamed(name))
    call(f"structured output ({name})", lambda name=name: structured(name))
    call(f"crew with a tool ({name})", lambda name=name: run(name))
    call(f"task with an object ({name})", lambda name=name: structured_run(name))
end()
