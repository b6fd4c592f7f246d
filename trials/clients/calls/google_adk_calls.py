"""Google's Agent Development Kit through LiteLLM: a run, streamed events, an object, a tool."""

import os
from typing import Literal

from checks import BASE_URL, MODEL, call, end, expect

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"

from google.adk.agents import LlmAgent
from google.adk.agents.run_config import RunConfig, StreamingMode
from google.adk.events import Event
from google.adk.models.lite_llm import LiteLlm
from google.adk.runners import InMemoryRunner
from google.genai.types import Content, FunctionCallingConfig, GenerateContentConfig, Part, ToolConfig
from pydantic import BaseModel, ConfigDict

PROVIDERS = ("openai", "hosted_vllm")


class Weather(BaseModel):
    model_config = ConfigDict(extra="forbid")  # the demo would go on adding properties
    city: Literal["Paris", "Oslo", "Rome"]
    is_warm: bool


def get_weather(is_warm: bool) -> str:
    """The weather, if it is warm."""
    return f"18 degrees, {is_warm}"


async def events(
    provider: str, mode: StreamingMode = StreamingMode.NONE, *, until: str = "", **more: object
) -> list[Event]:
    """The events of a run, as far as the first one with a part of that kind."""
    model = LiteLlm(model=f"{provider}/{MODEL}", api_base=BASE_URL, api_key="none", num_retries=0)
    runner = InMemoryRunner(LlmAgent(name="forester", model=model, instruction="Be brief.", **more), app_name="trial")
    session = await runner.session_service.create_session(app_name="trial", user_id="anna")
    question = Content(role="user", parts=[Part(text="How is the weather?")])
    running = runner.run_async(
        user_id="anna", session_id=session.id, new_message=question, run_config=RunConfig(streaming_mode=mode)
    )
    found = []
    async for event in running:
        expect(event.error_code is None, f"an event without an error, not {event.error_code}: {event.error_message}")
        found.append(event)
        if until and any(getattr(part, until) for part in event.content.parts):
            break
    return found


def text_of(event: Event) -> str:
    return "".join(part.text or "" for part in event.content.parts)


async def run(provider: str) -> None:
    last = (await events(provider, tools=[get_weather]))[-1]
    expect(last.is_final_response() and text_of(last).strip(), "a run ends with text")
    expect(last.usage_metadata.candidates_token_count > 0, "and its tokens are counted")


async def streamed(provider: str) -> None:
    found = await events(provider, StreamingMode.SSE)
    parts = [text_of(event) for event in found if event.partial]
    expect(len(parts) > 1 and "".join(parts).strip() == text_of(found[-1]).strip(), "parts of the text, then the text")


async def structured(provider: str) -> None:
    Weather.model_validate_json(text_of((await events(provider, output_schema=Weather))[-1]))


async def forced(provider: str) -> None:
    choice = ToolConfig(function_calling_config=FunctionCallingConfig(mode="ANY"))
    config = GenerateContentConfig(tool_config=choice, max_output_tokens=512)
    found = await events(provider, tools=[get_weather], generate_content_config=config, until="function_response")
    results = [part.function_response for part in found[-1].content.parts if part.function_response]
    expect(results and results[0].name == "get_weather", "the tool is called, and has a result")


for name in PROVIDERS:
    call(f"run ({name})", lambda name=name: run(name))
    call(f"streamed run ({name})", lambda name=name: streamed(name))
    call(f"structured output ({name})", lambda name=name: structured(name))
    call(f"forced tool ({name})", lambda name=name: forced(name))
end()
