"""The demo model served for real, driven by OpenAI's client."""

import json
import shutil
import subprocess

import openai
import pytest
from running_server import DEMO, Server

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]  # a start on a busy machine takes minutes
MODEL = "demo"
PROMPT = "Once upon a time, in a village by the sea,"


def test_a_completion_streams_text_and_then_its_usage(client: openai.OpenAI) -> None:
    stream = client.completions.create(
        model=MODEL,
        prompt=PROMPT,
        max_tokens=32,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
        extra_body={"ignore_eos": True},
    )
    chunks = list(stream)
    texts = [choice.text for chunk in chunks for choice in chunk.choices]
    reasons = [choice.finish_reason for chunk in chunks for choice in chunk.choices if choice.finish_reason]
    assert sum(bool(text) for text in texts) > 4, "the text came at once"
    assert reasons == ["length"]
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 32
    whole = client.completions.create(
        model=MODEL, prompt=PROMPT, max_tokens=32, temperature=0, extra_body={"ignore_eos": True}
    )
    assert "".join(texts) == whole.choices[0].text
    assert whole.usage == chunks[-1].usage


def test_a_chat_streams_what_it_gives_whole(client: openai.OpenAI) -> None:
    messages = [{"role": "user", "content": "Tell me a short story about a dog."}]
    whole = client.chat.completions.create(model=MODEL, messages=messages, max_tokens=24, temperature=0)
    stream = client.chat.completions.create(model=MODEL, messages=messages, max_tokens=24, temperature=0, stream=True)
    text = "".join(choice.delta.content or "" for chunk in stream for choice in chunk.choices)
    assert text
    assert text == whole.choices[0].message.content
    assert whole.choices[0].message.role == "assistant"


def test_a_stop_string_across_tokens_ends_the_text_before_it(client: openai.OpenAI) -> None:
    def complete(**more: object) -> openai.types.CompletionChoice:
        answer = client.completions.create(model=MODEL, prompt=PROMPT, max_tokens=32, temperature=0, **more)
        return answer.choices[0]

    text = complete().text
    stop = text[len(text) // 2 : len(text) // 2 + 9]  # nine characters from anywhere: more than one token
    stopped = complete(stop=stop)
    assert stopped.text == text[: text.index(stop)]
    assert stopped.finish_reason == "stop"


def test_a_prompt_beyond_the_context_is_refused_with_limits(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as refusal:
        client.completions.create(model=MODEL, prompt=[5] * 5000, max_tokens=1)
    assert refusal.value.code == "context_length_exceeded"
    assert "4096" in refusal.value.message
    assert "5000" in refusal.value.message


def test_the_plan_names_a_path_for_every_shape(demo: Server) -> None:
    plan = demo.plan()
    assert {row["phase"] for row in plan} == {"prefill", "extend", "decode", "linear"}
    assert [row["shape"] for row in plan if row["path"] is None] == []
    assert {row["status"] for row in plan} <= {"proven", "provisional"}
    assert [row["shape"] for row in plan if row["fallback_reasons"]] == []


def test_launches_are_counted_for_every_layer_of_every_step(demo: Server, client: openai.OpenAI) -> None:
    num_layers = json.loads((DEMO / "config.json").read_text())["num_hidden_layers"]
    num_calls = num_layers + 4 * num_layers + 1  # of attention, of a layer's products, of the head
    before = demo.value("hallmark_attention_launches_total"), demo.value("hallmark_engine_steps_total")
    client.completions.create(model=MODEL, prompt=PROMPT, max_tokens=10, temperature=0, extra_body={"ignore_eos": True})
    demo.wait_for(lambda: demo.value("hallmark_engine_steps_total") >= before[1] + 10, "ten steps")
    assert demo.value("hallmark_engine_steps_total") == before[1] + 10  # one prefill and nine decode steps
    assert demo.value("hallmark_attention_launches_total") == before[0] + 10 * num_calls


def test_prometheus_accepts_the_metrics(demo: Server) -> None:
    program = shutil.which("promtool")
    if program is None:
        pytest.skip("promtool is not installed (Debian package prometheus)")
    text = demo.get("/metrics").text
    result = subprocess.run([program, "check", "metrics"], input=text, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr


def test_the_series_of_the_server_stay_few(demo: Server) -> None:
    samples = [line for line in demo.get("/metrics").text.splitlines() if not line.startswith("#")]
    assert 100 < len(samples) <= 2000
