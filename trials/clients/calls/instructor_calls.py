"""instructor: objects by tools of a chat and of responses and by a JSON schema, whole and streamed in parts."""

from typing import Literal

import instructor
import openai
from checks import ASK, BASE_URL, MODEL, call, end, expect
from pydantic import BaseModel, ConfigDict


class Weather(BaseModel):
    model_config = ConfigDict(extra="forbid")  # the demo would go on adding properties
    city: Literal["Paris", "Oslo", "Rome"]
    is_warm: bool


def client(mode: instructor.Mode) -> instructor.Instructor:
    return instructor.from_openai(openai.OpenAI(base_url=BASE_URL, api_key="none", max_retries=0), mode=mode)


def create(mode: instructor.Mode) -> None:
    found = client(mode).chat.completions.create(
        model=MODEL, messages=ASK, response_model=Weather, max_tokens=512, max_retries=0
    )
    expect(isinstance(found, Weather), f"an object of the schema, not {type(found).__name__}")


def partial(mode: instructor.Mode) -> None:
    parts = list(
        client(mode).chat.completions.create_partial(
            model=MODEL, messages=ASK, response_model=Weather, max_tokens=512, max_retries=0
        )
    )
    expect(len(parts) > 1 and isinstance(parts[-1].is_warm, bool), "the object grows until it is whole")


call("tools", lambda: create(instructor.Mode.TOOLS))
call("strict tools", lambda: create(instructor.Mode.TOOLS_STRICT))
call("json_schema", lambda: create(instructor.Mode.JSON_SCHEMA))
call("streamed tools", lambda: partial(instructor.Mode.TOOLS))
call("streamed json_schema", lambda: partial(instructor.Mode.JSON_SCHEMA))
call("tools of responses", lambda: create(instructor.Mode.RESPONSES_TOOLS))
call("streamed tools of responses", lambda: partial(instructor.Mode.RESPONSES_TOOLS))
end()
