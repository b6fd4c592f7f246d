"""inspect-ai: evaluations by its providers for vLLM, chat and responses: text, a tool, an object, log probabilities."""

from typing import Literal

from checks import BASE_URL, MODEL, call, end, expect
from inspect_ai import Task, eval
from inspect_ai.dataset import Sample
from inspect_ai.log import EvalSample
from inspect_ai.model import ResponseSchema, get_model
from inspect_ai.scorer import includes
from inspect_ai.solver import generate, system_message, use_tools
from inspect_ai.tool import Tool, ToolChoice, ToolFunction, tool
from inspect_ai.util import json_schema
from pydantic import BaseModel, ConfigDict

QUESTION = "How is the weather?"
KINDS = {"vllm": f"vllm/{MODEL}", "chat": f"openai-api/hallmark/{MODEL}", "responses": f"openai-api/hallmark/{MODEL}"}


class Weather(BaseModel):
    model_config = ConfigDict(extra="forbid")
    city: Literal["Paris", "Oslo", "Rome"]
    is_warm: bool


@tool
def get_weather() -> Tool:
    async def execute(is_warm: bool) -> str:
        """The weather, if it is warm.

        Args:
            is_warm: whether it is
        """
        return f"18 degrees, {is_warm}"

    return execute


def evaluated(kind: str, *, choice: ToolChoice = "none", calls: str = "none", **config: object) -> EvalSample:
    """The sample of an evaluation that has ended well."""
    more = {"responses_api": True} if kind == "responses" else {}
    model = get_model(KINDS[kind], base_url=BASE_URL, api_key="none", memoize=False, **more)
    solver = [system_message("Be brief."), use_tools(get_weather(), tool_choice=choice), generate(tool_calls=calls)]
    task = Task(dataset=[Sample(input=QUESTION, target="a")], solver=solver, scorer=includes())
    settings = {"max_tokens": 64, "max_retries": 0} | config
    (log,) = eval(task, model=model, display="none", log_dir=".", log_level="error", **settings)
    expect(log.status == "success", f"the evaluation succeeds, not {log.status}: {log.error and log.error.message}")
    return log.samples[0]


def text(kind: str) -> None:
    sample = evaluated(kind, choice="auto")
    expect(sample.output.completion and sample.output.usage.output_tokens <= 64, "an answer has text")
    expect(sample.scores["includes"].value in ("C", "I"), "and a score")


def forced(kind: str) -> None:
    sample = evaluated(
        kind, choice=ToolFunction("get_weather"), calls="single", parallel_tool_calls=False, max_tokens=512
    )
    results = [each for each in sample.messages if each.role == "tool"]
    expect(results and results[0].text.startswith("18 degrees"), "the tool is called and its result comes next")


def structured(kind: str) -> None:
    schema = ResponseSchema(name="weather", json_schema=json_schema(Weather), strict=True)
    Weather.model_validate_json(evaluated(kind, response_schema=schema, max_tokens=512).output.completion)


def logprobs(kind: str) -> None:
    found = evaluated(kind, logprobs=True, top_logprobs=2).output.choices[0].logprobs
    expect(found and all(len(each.top_logprobs) == 2 for each in found.content), "two tokens at each place")


for name in KINDS:
    call(f"evaluation ({name})", lambda name=name: text(name))
    call(f"forced tool ({name})", lambda name=name: forced(name))
    call(f"structured output ({name})", lambda name=name: structured(name))
call("log probabilities (vllm)", lambda: logprobs("vllm"))
end()
