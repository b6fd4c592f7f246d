"""Anthropic's client: messages, streamed and whole, tools, structured output, counted tokens."""

import anthropic
from checks import MODEL, URL, WEATHER, call, end, expect, expect_weather

client = anthropic.Anthropic(base_url=URL, api_key="none", max_retries=0, timeout=60)
ASK = [{"role": "user", "content": "Tell me about the forest."}]
TOOL = {"name": "get_weather", "description": "The weather of a city.", "input_schema": WEATHER}


def messages() -> None:
    system = [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}]
    answer = client.messages.create(model=MODEL, max_tokens=16, system=system, messages=ASK, metadata={"user_id": "a"})
    expect(answer.content[0].type == "text" and answer.content[0].text, "an answer has text")
    expect(answer.stop_reason in ("end_turn", "max_tokens"), f"stop reason, not {answer.stop_reason}")
    expect(answer.usage.output_tokens <= 16, "its tokens are counted")


def streaming() -> None:
    with client.messages.stream(model=MODEL, max_tokens=16, messages=ASK) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    expect(text and final.content[0].text == text, "the streamed text is the message's")
    expect(final.usage.output_tokens > 0, "its tokens are counted")


def tools() -> None:
    answer = client.messages.create(
        model=MODEL,
        max_tokens=512,
        messages=ASK,
        tools=[TOOL],
        tool_choice={"type": "any", "disable_parallel_tool_use": True},
    )
    (used, *_) = [block for block in answer.content if block.type == "tool_use"]
    expect(answer.stop_reason == "tool_use", f"stop reason, not {answer.stop_reason}")
    expect_weather(used.input)
    result = {"type": "tool_result", "tool_use_id": used.id, "content": "18 degrees"}
    history = [
        *ASK,
        {"role": "assistant", "content": [block.model_dump(exclude_none=True) for block in answer.content]},
        {"role": "user", "content": [result]},
    ]
    after = client.messages.create(model=MODEL, max_tokens=16, messages=history, tools=[TOOL])
    expect(after.stop_reason, "the conversation goes on after the tool's result")


def streamed_tools() -> None:
    with client.messages.stream(
        model=MODEL, max_tokens=512, messages=ASK, tools=[TOOL], tool_choice={"type": "tool", "name": "get_weather"}
    ) as stream:
        kinds = {event.type for event in stream}
        final = stream.get_final_message()
    expect("input_json" in kinds, f"arguments are streamed, among {sorted(kinds)}")
    expect_weather(next(block for block in final.content if block.type == "tool_use").input)


def count_tokens() -> None:
    counted = client.messages.count_tokens(model=MODEL, messages=ASK)
    answer = client.messages.create(model=MODEL, max_tokens=1, messages=ASK)
    expect(counted.input_tokens == answer.usage.input_tokens, "the count is what the request is charged")


def models() -> None:
    page = client.models.list(limit=1)
    expect([model.id for model in page] == [MODEL] and page.has_more is False, "the demo is listed")
    found = client.models.retrieve(MODEL)
    expect(found.display_name and found.created_at.year > 2000, "the demo has a name and a time")
    try:
        client.models.retrieve("other")
    except anthropic.NotFoundError as error:
        expect(error.body["error"]["type"] == "not_found_error", "the error is in Anthropic's envelope")
    else:
        raise AssertionError("another model's name is a 404")


def errors() -> None:
    try:
        client.messages.create(model="other", max_tokens=1, messages=ASK)
    except anthropic.NotFoundError as error:
        expect(error.body["error"]["type"] == "not_found_error", "the error is in Anthropic's envelope")
    else:
        raise AssertionError("another model's name is a 404")


call("messages", messages)
call("streaming", streaming)
call("tools", tools)
call("streamed tools", streamed_tools)
call("count_tokens", count_tokens)
call("models", models)
call("errors", errors)
end()
