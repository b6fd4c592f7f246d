"""Requests that do not end well: what the client is told, and what is freed."""

import asyncio
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import pytest

from server.errors import EngineDied, TimeLimitReached
from server.protocol.messages import FinishReason, SamplingParams, TokenDelta
from server.settings import Settings
from support.api.edge_fakes import ScriptedEngine, Served, delta, events, make_services, playing, saying, served
from support.on_a_loop import on_a_loop

COMPLETIONS = "/v1/completions"


def test_one_failing_prompt_cancels_the_others(folder: Path) -> None:
    def script(prompt: list[int]) -> list[TokenDelta]:
        if prompt == [98]:
            return [
                TokenDelta("", [], FinishReason.ERROR, error_code="nonfinite_logits", error_message="no finite logit")
            ]
        return [delta("x")] * 1000

    it = served(folder, script)
    answer = it.post(COMPLETIONS, {"prompt": ["a", "b"]})
    assert answer.status_code == 500
    assert answer.json()["error"]["code"] == "nonfinite_logits"
    assert it.engine.cancelled == [it.engine.submitted[0][0]]


def test_a_death_before_the_first_token_is_a_503(folder: Path) -> None:
    deltas = [TokenDelta("", [], FinishReason.ERROR, error_code=EngineDied.code, error_message="gone")]

    answer = served(folder, playing(*deltas)).post(COMPLETIONS, {"prompt": "a", "stream": True})
    assert answer.status_code == 503
    assert answer.json()["error"]["code"] == "engine_died"
    assert int(answer.headers["retry-after"]) >= 1


@pytest.mark.parametrize("code", ["invalid_value", "context_length_exceeded"])
def test_what_the_engine_refuses_is_the_clients_to_mend(folder: Path, code: str) -> None:
    """A tokenizer may know more tokens than the model: only the engine sees it."""
    why = "prompt token 97 is outside the vocabulary of 96"
    it = served(folder, playing(TokenDelta("", [], FinishReason.ERROR, error_code=code, error_message=why)))
    answer = it.post(COMPLETIONS, {"prompt": "a"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, code)
    assert answer.json()["error"]["message"] == why
    assert it.value("requests_total", route=COMPLETIONS, outcome="client_error") == 1


def test_a_death_mid_stream_is_an_event_with_the_id(folder: Path) -> None:
    deltas = [delta("a"), TokenDelta("", [], FinishReason.ERROR, error_code=EngineDied.code, error_message="gone")]

    it = served(folder, playing(*deltas))
    answer = it.post(COMPLETIONS, {"prompt": "a", "stream": True}, headers={"x-request-id": "mine-1"})
    first, error, done = events(answer)
    assert first["choices"][0]["text"] == "a"
    assert error["error"] == {
        "message": "gone",
        "type": "server_error",
        "param": None,
        "code": "engine_died",
        "request_id": "mine-1",
        "trace_id": answer.headers["traceparent"].split("-")[1],
    }
    assert done == "[DONE]"
    assert it.value("requests_total", route=COMPLETIONS, outcome="server_error") == 1


@on_a_loop
async def test_a_full_queue_is_a_429_that_says_when_to_come_again(folder: Path) -> None:
    it = served(folder, max_queued_requests=1)
    it.engine.gate.clear()
    async with it.client() as client:
        first = asyncio.create_task(client.post(COMPLETIONS, json={"prompt": "a"}))
        while not it.engine.submitted:
            await asyncio.sleep(0)
        assert (await client.get("/load")).json() == {"server_load": 1, "num_running": 0, "num_waiting": 1}
        second = await client.post(COMPLETIONS, json={"prompt": "b"})
        assert second.status_code == 429
        assert second.json()["error"]["message"] == "1 requests wait for their first token, the limit is 1."
        assert second.headers["retry-after"] == "1"
        it.engine.gate.set()
        assert (await first).status_code == 200
        assert (await client.post(COMPLETIONS, json={"prompt": "c"})).status_code == 200
        assert (await client.get("/load")).json()["server_load"] == 0
    assert it.value("rejected_total", reason="queue_requests") == 1


@pytest.mark.parametrize(("waited_s", "retry_after"), [(0.0, 1), (2.2, 3), (60.0, 60), (500.0, 60)])
def test_retry_after_is_the_usual_wait_within_limits(folder: Path, waited_s: float, retry_after: int) -> None:
    it = served(folder, max_queued_requests=1)
    it.services.admission.enter()
    it.services.admission.wait_s = waited_s
    answer = it.post(COMPLETIONS, {"prompt": "b"})
    assert (answer.status_code, answer.headers["retry-after"]) == (429, str(retry_after))


@on_a_loop
async def test_waiting_prompt_tokens_are_limited_but_for_the_first(folder: Path) -> None:
    it = served(folder, max_queued_tokens=10)
    it.engine.gate.clear()
    async with it.client() as client:
        first = asyncio.create_task(client.post(COMPLETIONS, json={"prompt": "a" * 100}))
        while not it.engine.submitted:
            await asyncio.sleep(0)
        second = await client.post(COMPLETIONS, json={"prompt": "b" * 5})
        assert second.status_code == 429
        assert "105 prompt tokens" in second.json()["error"]["message"]
        it.engine.gate.set()
        assert (await first).status_code == 200
    assert it.services.admission.num_tokens == 0
    assert it.services.admission.num_requests == 0


class WaitingForOne(ScriptedEngine):
    """Begins the prompt `b` only when its gate is open."""

    async def stream(
        self, request_id: str, prompt_token_ids: list[int], sampling: SamplingParams, **options: Any
    ) -> AsyncGenerator[TokenDelta]:
        if prompt_token_ids == [98]:
            await self.gate.wait()
        async for it in super().stream(request_id, prompt_token_ids, sampling, **options):
            yield it


@on_a_loop
async def test_a_request_waits_until_each_of_its_prompts_has_a_token(folder: Path) -> None:
    engine = WaitingForOne()
    engine.num_free = 100
    engine.gate.clear()
    it = Served(make_services(folder, engine, Settings(model="tiny")), engine)
    async with it.client() as client:
        answer = asyncio.create_task(client.post(COMPLETIONS, json={"prompt": ["a", "b"]}))
        while it.value("generation_tokens_total") != 6:  # all of the first prompt's answer
            await asyncio.sleep(0)
        assert (it.services.admission.num_requests, it.services.admission.num_tokens) == (1, 2)
        engine.gate.set()
        assert (await answer).status_code == 200
    assert (it.services.admission.num_requests, it.services.admission.num_tokens) == (0, 0)


def test_a_request_before_ready_is_a_503_with_the_reason(folder: Path) -> None:
    it = served(folder)
    it.engine.refuse()
    answer = it.post(COMPLETIONS, {"prompt": "a"})
    assert answer.status_code == 503
    assert answer.json()["error"]["message"] == "The engine refuses to serve: 1 of 2 shapes has no proven path"
    assert it.value("rejected_total", reason="not_ready") == 1


@pytest.mark.parametrize("fields", [{}, {"timeout": 3600}], ids=["none of its own", "a longer one of its own"])
def test_a_request_beyond_the_limit_is_a_504_and_cancelled(folder: Path, fields: dict[str, int]) -> None:
    it = served(folder, request_timeout_s=0.05)
    it.engine.gate.clear()
    answer = it.post(COMPLETIONS, {"prompt": "a", **fields})
    assert answer.status_code == 504
    assert "0.05 s" in answer.json()["error"]["message"]
    assert len(it.engine.cancelled) == 1


@pytest.mark.parametrize(
    ("route", "prompt"),
    [
        (COMPLETIONS, {"prompt": "a"}),
        ("/v1/responses", {"input": "a"}),
        ("/v1/messages", {"messages": [{"role": "user", "content": "a"}], "max_tokens": 5}),
    ],
)
def test_a_request_beyond_its_own_timeout_is_a_408(route: str, prompt: dict[str, object], folder: Path) -> None:
    it = served(folder)
    it.engine.gate.clear()
    answer = it.post(route, {**prompt, "timeout": 0.05, "priority": -3})
    assert (answer.status_code, answer.headers["x-should-retry"]) == (408, "false")
    assert answer.headers.get("connection") != "close"
    assert answer.json()["error"]["code"] == "request_timeout"
    assert it.engine.priorities == [-3]
    assert answer.json()["error"]["param"] == "timeout"
    assert it.engine.cancelled == [it.engine.submitted[0][0]]


@on_a_loop
async def test_a_stream_beyond_its_own_timeout_ends_with_an_event(folder: Path) -> None:
    it = served(folder, saying("a", "b"))
    it.engine.gate.clear()
    it.engine.num_free = 1
    async with it.client() as client:
        fields = {"prompt": "a", "stream": True, "timeout": 1000}
        answer = asyncio.create_task(client.post(COMPLETIONS, json=fields))
        while not it.value("prompt_tokens_total"):
            await asyncio.sleep(0)
        assert (await client.get("/load")).json() == {"server_load": 1, "num_running": 1, "num_waiting": 0}
        [context] = it.services.lifecycle.inflight
        context.limit(0, TimeLimitReached("too late"))
        first, error, done = events(await answer)
    assert (first["choices"][0]["text"], error["error"]["code"], done) == ("a", "request_timeout", "[DONE]")
    assert it.engine.cancelled == [it.engine.submitted[0][0]]
    assert it.value("requests_total", route=COMPLETIONS, outcome="client_error") == 1
