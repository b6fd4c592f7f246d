"""outlines: text, choices, JSON, regular expressions and grammars, whole and streamed, by its model for each server."""

import json
import re
from collections.abc import Callable
from typing import Literal

import openai
import outlines
from checks import BASE_URL, MODEL, call, end, expect
from outlines.inputs import Chat
from outlines.models.base import Model
from outlines.types import CFG, Regex
from pydantic import BaseModel, ConfigDict

DEGREES = r"[0-9]{2} degrees"
SUM = 'start: NUMBER "+" NUMBER\nNUMBER: /[0-9]{1,3}/'
QUESTION = "How is the weather?"
KINDS = {"vllm": outlines.from_vllm, "sglang": outlines.from_sglang, "openai": outlines.from_openai}


class Weather(BaseModel):
    model_config = ConfigDict(extra="forbid")  # the demo would go on adding properties
    city: Literal["Paris", "Oslo", "Rome"]
    is_warm: bool


def model(kind: str) -> Model:
    make: Callable[..., Model] = KINDS[kind]
    return make(openai.OpenAI(base_url=BASE_URL, api_key="none", max_retries=0), MODEL)


def chat(kind: str) -> None:
    asked = Chat([{"role": "system", "content": "Be brief."}, {"role": "user", "content": QUESTION}])
    expect(model(kind)(asked, max_tokens=16), "an answer has text")


def choice(kind: str) -> None:
    found = model(kind)(QUESTION, Literal["Paris", "Oslo"], max_tokens=16)
    expect(found in ("Paris", "Oslo"), f"one of the choices, not {found!r}")


def schema(kind: str) -> None:
    Weather.model_validate_json(model(kind)(QUESTION, Weather, max_tokens=512))


def streamed_schema(kind: str) -> None:
    parts = list(model(kind).stream(QUESTION, Weather, max_tokens=512))
    expect(len(parts) > 1 and json.loads("".join(parts)), "the object grows until it is whole")


def regex(kind: str) -> None:
    found = model(kind)(QUESTION, Regex(DEGREES), max_tokens=32)
    expect(re.fullmatch(DEGREES, found), f"an answer of the expression, not {found!r}")


def grammar(kind: str) -> None:
    found = model(kind)(QUESTION, CFG(SUM), max_tokens=32)
    expect(re.fullmatch(r"\d{1,3}\+\d{1,3}", found), f"an answer of the grammar, not {found!r}")


for name in KINDS:
    call(f"chat ({name})", lambda name=name: chat(name))
    call(f"JSON ({name})", lambda name=name: schema(name))
    call(f"streamed JSON ({name})", lambda name=name: streamed_schema(name))
    if name != "openai":
        call(f"choice ({name})", lambda name=name: choice(name))
        call(f"regex ({name})", lambda name=name: regex(name))
    if name == "vllm":
        call(f"grammar ({name})", lambda name=name: grammar(name))
end()
