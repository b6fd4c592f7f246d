"""LiteLLM: its SDK with the providers `openai` and `hosted_vllm`, and its proxy in front of the server."""

import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import httpx
import litellm
import openai
from checks import ASK, BASE_URL, EMBED_URL, FOLDER, MODEL, WEATHER, WEATHER_TOOL, call, end, expect, expect_weather

litellm.telemetry = False
PROXY_START_S = 300
PROXY_KEY = "sk-0123456789abcdef0123456789abcdef"  # the proxy refuses to start without one


def completion(provider: str = "openai", **more: object) -> litellm.ModelResponse:
    asked = {"model": f"{provider}/{MODEL}", "messages": ASK, "api_base": BASE_URL, "api_key": "none"}
    return litellm.completion(**(asked | {"num_retries": 0, "max_tokens": 16} | more))


def chat(provider: str) -> None:
    answer = completion(provider)
    expect(answer.choices[0].message.content and answer.usage.completion_tokens <= 16, "an answer has text")


def streaming(provider: str) -> None:
    chunks = list(completion(provider, stream=True, stream_options={"include_usage": True}))
    expect("".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices), "there is text")


def tools(provider: str) -> None:
    answer = completion(
        provider, tools=[WEATHER_TOOL], tool_choice="required", parallel_tool_calls=False, max_tokens=512
    )
    expect_weather(answer.choices[0].message.tool_calls[0].function.arguments)


def structured() -> None:
    kind = {"type": "json_schema", "json_schema": {"name": "weather", "schema": WEATHER, "strict": True}}
    expect_weather(completion(response_format=kind, max_tokens=512).choices[0].message.content)


def embeddings() -> None:
    answer = litellm.embedding(model=f"openai/{MODEL}", input=["a forest"], api_base=EMBED_URL, api_key="none")
    expect(len(answer.data[0]["embedding"]) == 256, "a vector of 256")


def proxy() -> None:
    """Start the proxy, and ask it as its users do: with OpenAI's client, streamed and with a tool."""
    config = Path(FOLDER, "proxy.yaml")
    config.write_text(
        f"model_list:\n  - model_name: {MODEL}\n    litellm_params:\n"
        f"      model: hosted_vllm/{MODEL}\n      api_base: {BASE_URL}\n      api_key: none\n"
        f"general_settings:\n  master_key: {PROXY_KEY}\n"
    )
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]
    program = [str(Path(sys.executable).parent / "litellm"), "--config", str(config), "--host", "127.0.0.1"]
    environ = os.environ | {"LITELLM_LOCAL_MODEL_COST_MAP": "True"}
    with Path(FOLDER, "proxy.log").open("wb") as log:
        process = subprocess.Popen([*program, "--port", str(port)], stdout=log, stderr=log, env=environ, cwd=FOLDER)
    try:
        _wait_for(f"http://127.0.0.1:{port}/health/liveliness", process)
        client = openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key=PROXY_KEY, max_retries=0, timeout=60)
        chunks = list(client.chat.completions.create(model=MODEL, messages=ASK, max_tokens=16, stream=True))
        expect("".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices), "there is text")
        answer = client.chat.completions.create(
            model=MODEL,
            messages=ASK,
            tools=[WEATHER_TOOL],
            tool_choice="required",
            parallel_tool_calls=False,
            max_tokens=512,
        )
        expect_weather(answer.choices[0].message.tool_calls[0].function.arguments)
    finally:
        process.terminate()
        process.wait(timeout=20)


def _wait_for(url: str, process: "subprocess.Popen[bytes]") -> None:
    deadline = time.monotonic() + PROXY_START_S
    while time.monotonic() < deadline:
        expect(process.poll() is None, f"the proxy runs; it ended with {process.returncode}")
        try:
            if httpx.get(url, timeout=5).status_code == 200:
                return
        except httpx.TransportError:
            time.sleep(0.3)
    raise AssertionError(f"the proxy is ready within {PROXY_START_S} s")


for provider in ("openai", "hosted_vllm"):
    call(f"chat ({provider})", lambda provider=provider: chat(provider))
    call(f"streaming ({provider})", lambda provider=provider: streaming(provider))
    call(f"tools ({provider})", lambda provider=provider: tools(provider))
call("structured output", structured)
call("embeddings", embeddings)
call("proxy", proxy)
end()
