"""OpenAI's Python client: chat, completions, tools, structured output, log probabilities, responses, embeddings."""

from typing import Literal

import openai
from checks import ASK, BASE_URL, EMBED_URL, MODEL, WEATHER, WEATHER_TOOL, call, end, expect, expect_weather
from pydantic import BaseModel

client = openai.OpenAI(base_url=BASE_URL, api_key="none", max_retries=0, timeout=60)


class Weather(BaseModel):
    city: Literal["Paris", "Oslo", "Rome"]
    is_warm: bool


def models() -> None:
    expect(MODEL in [model.id for model in client.models.list()], "the demo is listed")


def chat() -> None:
    answer = client.chat.completions.create(model=MODEL, messages=ASK, max_completion_tokens=16, user="someone")
    expect(answer.choices[0].message.content, "an answer has text")
    expect(answer.choices[0].finish_reason in ("stop", "length"), "it has stopped or is long enough")
    expect(answer.usage and answer.usage.completion_tokens <= 16, "its tokens are counted")


def streaming() -> None:
    chunks = list(
        client.chat.completions.create(
            model=MODEL, messages=ASK, max_tokens=16, stream=True, stream_options={"include_usage": True}
        )
    )
    expect(chunks[0].choices[0].delta.role == "assistant", "the first chunk has the role")
    expect("".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices), "there is text")
    expect(chunks[-1].usage and not chunks[-1].choices, "the last chunk has the usage alone")


def completions() -> None:
    answer = client.completions.create(model=MODEL, prompt=["Once upon", "It was"], max_tokens=8, n=2, logprobs=2)
    expect([choice.index for choice in answer.choices] == [0, 1, 2, 3], "two prompts give four choices")
    expect(len(answer.choices[0].logprobs.tokens) <= 8, "each token has a log probability")


def tools() -> None:
    answer = client.chat.completions.create(
        model=MODEL,
        messages=ASK,
        tools=[WEATHER_TOOL],
        tool_choice="required",
        parallel_tool_calls=False,
        max_tokens=512,
    )
    message = answer.choices[0].message
    expect(answer.choices[0].finish_reason == "tool_calls", f"finish reason, not {answer.choices[0].finish_reason}")
    expect(message.tool_calls[0].function.name == "get_weather", "the tool is called by its name")
    expect_weather(message.tool_calls[0].function.arguments)
    results = [{"role": "tool", "tool_call_id": each.id, "content": "18 degrees"} for each in message.tool_calls]
    history = [*ASK, message.model_dump(exclude_none=True), *results]
    after = client.chat.completions.create(model=MODEL, messages=history, tools=[WEATHER_TOOL], max_tokens=16)
    expect(after.choices[0].finish_reason, "the conversation goes on after the tool's result")


def streamed_tools() -> None:
    named = {"type": "function", "function": {"name": "get_weather"}}
    with client.chat.completions.stream(
        model=MODEL, messages=ASK, tools=[WEATHER_TOOL], tool_choice=named, max_tokens=512
    ) as stream:
        kinds = {event.type for event in stream}
        final = stream.get_final_completion()
    expect("tool_calls.function.arguments.delta" in kinds, f"arguments are streamed, among {sorted(kinds)}")
    expect_weather(final.choices[0].message.tool_calls[0].function.arguments)


def parse() -> None:
    answer = client.chat.completions.parse(model=MODEL, messages=ASK, response_format=Weather, max_tokens=512)
    expect(isinstance(answer.choices[0].message.parsed, Weather), "the answer is an object of the schema")


def json_object() -> None:
    kind = {"type": "json_schema", "json_schema": {"name": "weather", "schema": WEATHER, "strict": True}}
    answer = client.chat.completions.create(model=MODEL, messages=ASK, response_format=kind, max_tokens=512)
    expect_weather(answer.choices[0].message.content)


def logprobs() -> None:
    answer = client.chat.completions.create(
        model=MODEL, messages=ASK, max_tokens=4, temperature=0, logprobs=True, top_logprobs=3, logit_bias={"100": -100}
    )
    content = answer.choices[0].logprobs.content
    expect(content and all(len(each.top_logprobs) == 3 for each in content), "three likeliest tokens at each place")
    expect(all(each.logprob == each.top_logprobs[0].logprob for each in content), "the greedy token is the likeliest")


def responses() -> None:
    answer = client.responses.create(model=MODEL, input="Tell me about the sea.", max_output_tokens=16)
    expect(answer.output_text and answer.object == "response", "a response has text")
    after = client.responses.create(
        model=MODEL, input="And then?", previous_response_id=answer.id, max_output_tokens=16
    )
    expect(after.previous_response_id == answer.id, "a response goes on from another")


def stored_responses() -> None:
    answer = client.responses.create(model=MODEL, input="Tell me about the sea.", max_output_tokens=4)
    after = client.responses.create(model=MODEL, input="And then?", previous_response_id=answer.id, max_output_tokens=4)
    expect(client.responses.retrieve(after.id).output_text == after.output_text, "a stored response is given back")
    items = [*client.responses.input_items.list(after.id, order="asc", limit=1)]
    texts = [item.content[0].text for item in items]
    expect(
        texts == ["Tell me about the sea.", answer.output_text, "And then?"], f"it was made of its input, not {texts}"
    )
    client.responses.delete(after.id)
    try:
        client.responses.retrieve(after.id)
    except openai.NotFoundError as error:
        expect(error.code == "response_not_found", f"code, not {error.code}")
    else:
        raise AssertionError("a deleted response is a 404")


def streamed_responses() -> None:
    with client.responses.stream(
        model=MODEL, input="Tell me about the sea.", text_format=Weather, max_output_tokens=512
    ) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_response()
    expect(kinds[0] == "response.created", f"the first event, not {kinds[0]}")
    expect("response.output_text.delta" in kinds, f"text is streamed, among {sorted(set(kinds))}")
    expect(final.status == "completed", f"status, not {final.status}")


def response_tools() -> None:
    tool = {"type": "function", "strict": True} | WEATHER_TOOL["function"]
    answer = client.responses.create(
        model=MODEL,
        input="How is the weather?",
        tools=[tool],
        tool_choice="required",
        parallel_tool_calls=False,
        max_output_tokens=512,
    )
    calls = [item for item in answer.output if item.type == "function_call"]
    expect(calls and calls[0].name == "get_weather", "the tool is called")
    expect_weather(calls[0].arguments)


def response_parse() -> None:
    answer = client.responses.parse(model=MODEL, input="The weather?", text_format=Weather, max_output_tokens=512)
    expect(isinstance(answer.output_parsed, Weather), "the response is an object of the schema")


def embeddings() -> None:
    answer = client.with_options(base_url=EMBED_URL).embeddings.create(model=MODEL, input=["a forest", "a king"])
    expect(len(answer.data) == 2 and len(answer.data[0].embedding) == 256, "a vector of 256 for each text")


def errors() -> None:
    try:
        client.chat.completions.create(model="other", messages=ASK)
    except openai.NotFoundError as error:
        expect(error.code == "model_not_found", f"code, not {error.code}")
    else:
        raise AssertionError("another model's name is a 404")


call("models", models)
call("chat", chat)
call("streaming", streaming)
call("completions", completions)
call("tools", tools)
call("streamed tools", streamed_tools)
call("parse", parse)
call("json_schema", json_object)
call("logprobs", logprobs)
call("responses", responses)
call("stored responses", stored_responses)
call("streamed responses", streamed_responses)
call("tools of responses", response_tools)
call("parse of responses", response_parse)
call("embeddings", embeddings)
call("errors", errors)
end()
