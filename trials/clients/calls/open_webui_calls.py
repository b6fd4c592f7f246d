"""Open WebUI: the requests of a chat, as `routers/openai.py` and `utils/middleware.py` of its package make them.

Its server is not run. `utils/payload.py` of the installed package makes the parameters of a model where it can be
imported; bodies are written down here from the source of the pinned version:
a chat with built-in tools (its default, `function_calling: native`), tasks (title, tags, follow-ups), a tool's results,
embeddings of documents.
"""

import json
import urllib.request
from collections.abc import Iterator
from typing import Any

from checks import BASE_URL, EMBED_URL, MODEL, call, end, expect, expect_weather

MEMORY = {
    "name": "search_memories",
    "description": "Search the user's stored memories for relevant information.",
    "parameters": {
        "type": "object",
        "properties": {
            "query": {"type": "string", "description": "The search query"},
            "count": {"type": "integer", "description": "Number of memories to return", "default": 5},
        },
        "required": ["query"],
    },
}
TIME = {
    "name": "get_current_timestamp",
    "description": "Get the current Unix timestamp in seconds.",
    "parameters": {"type": "object", "properties": {}, "required": []},
}
WEATHER = {
    "name": "get_weather",
    "description": "The weather of a city.",
    "parameters": {
        "type": "object",
        "properties": {
            "city": {"type": "string", "enum": ["Paris", "Oslo", "Rome"]},
            "unit": {"type": "string", "enum": ["celsius", "fahrenheit"]},
        },
        "required": ["city", "unit"],
        "additionalProperties": False,
    },
}
TOOLS = [{"type": "function", "function": spec} for spec in (MEMORY, TIME, WEATHER)]
PARAMS = {  # of a model, after `apply_model_params_to_body_openai`
    "temperature": 0.7,
    "top_p": 0.9,
    "min_p": 0.0,
    "top_k": 40,
    "frequency_penalty": 0.0,
    "presence_penalty": 0.0,
    "repeat_penalty": 1.1,
    "seed": 7,
    "stop": ["###"],
    "max_tokens": 16,
}
CHAT = [
    {"role": "system", "content": "You are a helpful assistant.\nToday is Monday."},
    {"role": "user", "content": "Tell me about the forest."},
]


def post(path: str, body: dict[str, Any], url: str = BASE_URL) -> Any:
    headers = {"Content-Type": "application/json", "Authorization": "Bearer none", "X-OpenWebUI-User-Name": "someone"}
    request = urllib.request.Request(f"{url}{path}", json.dumps(body).encode(), headers)
    try:
        return urllib.request.urlopen(request, timeout=60)
    except urllib.error.HTTPError as error:
        raise AssertionError(f"{error.code}: {error.read().decode()[:200]}") from None


def answer(body: dict[str, Any]) -> dict[str, Any]:
    return json.load(post("/chat/completions", {"model": MODEL} | body))


def events(body: dict[str, Any]) -> Iterator[dict[str, Any]]:
    with post("/chat/completions", {"model": MODEL, "stream": True} | body) as stream:
        for line in stream:
            if line.startswith(b"data: {"):
                yield json.loads(line[6:])


def models() -> None:
    listed = json.load(urllib.request.urlopen(f"{BASE_URL}/models", timeout=10))
    expect(MODEL in [model["id"] for model in listed["data"]], "the demo is listed")


def chat() -> None:
    found = list(
        events({"messages": CHAT, "tools": TOOLS, "max_tokens": 16, "stream_options": {"include_usage": True}})
    )
    deltas = [event["choices"][0]["delta"] for event in found if event["choices"]]
    expect(any(delta.get("content") or delta.get("tool_calls") for delta in deltas), "there is an answer")
    expect(found[-1]["usage"]["total_tokens"] > 0, "and its tokens are counted")


def parameters() -> None:
    known = {name: value for name, value in PARAMS.items() if name != "repeat_penalty"}  # Ollama's, never ours
    expect(answer({"messages": CHAT, "stream": False} | known)["choices"][0]["message"]["content"], "there is text")


def task() -> None:
    """`generate_title` and its like: one message, no stream."""
    prompt = "### Task:\nGenerate a concise, 3-5 word title with an emoji summarizing the chat history."
    body = {"messages": [{"role": "user", "content": prompt}], "stream": False, "max_tokens": 16}
    expect(answer(body)["choices"][0]["message"]["content"], "there is a title")


def forced_tool() -> None:
    body = {"messages": CHAT, "tools": TOOLS, "max_tokens": 512, "stream": False}
    named = {"type": "function", "function": {"name": "get_weather"}}
    message = answer(body | {"tool_choice": named})["choices"][0]["message"]
    expect_weather(message["tool_calls"][0]["function"]["arguments"])


def tool_results() -> None:
    """Return what Open WebUI's loop sends after it has run tools: `convert_output_to_messages`."""
    called = {"id": "call_1", "type": "function", "function": {"name": "get_current_timestamp", "arguments": "{}"}}
    history = [
        *CHAT,
        {"role": "assistant", "content": "", "tool_calls": [called]},
        {"role": "tool", "tool_call_id": "call_1", "content": '{"current_timestamp": 1795452000}'},
    ]
    found = list(events({"messages": history, "tools": TOOLS, "max_tokens": 16}))
    expect(found, "the conversation goes on after the tool's result")


def embeddings() -> None:
    """`agenerate_openai_batch_embeddings` of its retrieval."""
    found = json.load(post("/embeddings", {"input": ["a forest", "a king"], "model": MODEL}, EMBED_URL))
    expect(len(found["data"]) == 2 and len(found["data"][0]["embedding"]) == 256, "a vector of 256 for each text")


call("models", models)
call("streamed chat with built-in tools", chat)
call("parameters of a model", parameters)
call("task (title)", task)
call("named tool", forced_tool)
call("streamed chat after results of tools", tool_results)
call("embeddings", embeddings)
end()
