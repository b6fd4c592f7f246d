"""guidance: choices, expressions, JSON and grammars by its model for vLLM, chat and JSON by its model for OpenAI."""

import re
from collections.abc import Callable
from typing import Literal

import guidance
from checks import BASE_URL, MODEL, call, end, expect
from guidance import assistant, gen, select, system, user
from guidance.models import Model, OpenAI
from guidance.models.experimental import VLLMModel
from pydantic import BaseModel, ConfigDict

CITIES = ["Paris", "Oslo", "Rome"]


class Weather(BaseModel):
    model_config = ConfigDict(extra="forbid")
    city: Literal["Paris", "Oslo", "Rome"]
    is_warm: bool


def asked(kind: Callable[..., Model]) -> Model:
    """A conversation up to its question."""
    talk = kind(MODEL, base_url=BASE_URL, api_key="none", echo=False)
    with system():
        talk += "Be brief."
    with user():
        talk += "How is the weather?"
    return talk


def answer(kind: Callable[..., Model], node: object) -> str:
    talk = asked(kind)
    with assistant():
        return str((talk + node)["answer"])


def choice() -> None:
    found = answer(VLLMModel, select(CITIES, name="answer"))
    expect(found in CITIES, f"one of the choices, not {found!r}")


def regex() -> None:
    found = answer(VLLMModel, gen("answer", regex=r"[0-9]{2} degrees"))
    expect(re.fullmatch(r"[0-9]{2} degrees", found), f"an answer of the expression, not {found!r}")


def schema(kind: Callable[..., Model]) -> None:
    found = answer(kind, guidance.json("answer", schema=Weather))
    Weather.model_validate_json(found)


def several() -> None:
    """One grammar with two captures and text between them."""
    talk = asked(VLLMModel)
    with assistant():
        found = talk + (select(CITIES, name="city") + ": " + gen("degrees", regex="[1-9][0-9]"))
    expect(found["city"] in CITIES and 10 <= int(found["degrees"]) <= 99, "both captures are as asked")


def chat() -> None:
    found = answer(OpenAI, gen("answer", max_tokens=16))
    expect(found, "an answer has text")


call("choice (VLLMModel)", choice)
call("regex (VLLMModel)", regex)
call("JSON (VLLMModel)", lambda: schema(VLLMModel))
call("grammar of several captures (VLLMModel)", several)
call("chat (OpenAI)", chat)
call("JSON (OpenAI)", lambda: schema(OpenAI))
end()
