"""The endpoints that generate, against a scripted engine."""

import asyncio
from pathlib import Path

import pytest
from edge_fakes import MAX_MODEL_LEN, delta, events, playing, saying, served

from server.engine.messages import FinishReason, SamplingParams, TokenDelta
from server.errors import EngineDied

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
USER = [{"role": "user", "content": "Hi"}]


def test_a_completion_has_text_finish_reason_and_exact_usage(folder: Path) -> None:
    it = served(folder, saying("Hel", "lo"))
    answer = it.post(COMPLETIONS, {"model": "tiny", "prompt": "abc", "max_tokens": 50})
    assert answer.status_code == 200
    body = answer.json()
    assert body["object"] == "text_completion"
    assert body["model"] == "tiny"
    assert body["choices"] == [{"index": 0, "text": "Hello", "logprobs": None, "finish_reason": "stop"}]
    assert body["usage"] == {"prompt_tokens": 3, "completion_tokens": 6, "total_tokens": 9}  # with the end token


def test_a_request_is_measured_once_under_its_prompts_bucket(folder: Path) -> None:
    it = served(folder, saying("Hel", "lo"))
    it.post(COMPLETIONS, {"prompt": "a" * 200})
    for family in ("time_to_first_token_seconds", "time_per_output_token_seconds", "prefill_seconds"):
        assert it.value(f"{family}_count", model="tiny", bucket="le_512") == 1
        assert it.value(f"{family}_count", model="tiny", bucket="le_128") == 0
    assert it.value("queue_seconds_sum", model="tiny") == 0.25
    assert it.value("prefill_seconds_sum", model="tiny", bucket="le_512") == 0.5
    assert it.value("prompt_tokens_total") == 200
    assert it.value("generation_tokens_total") == 6
    assert it.value("request_duration_seconds_count", model="tiny", outcome="ok") == 1
    assert it.value("requests_total", route=COMPLETIONS, outcome="ok") == 1
    assert it.value("oldest_inflight_seconds") == 0


def test_the_engine_gets_the_tokens_and_every_sampling_parameter(folder: Path) -> None:
    it = served(folder)
    body = {
        "prompt": "ab",
        "max_tokens": 7,
        "min_tokens": 2,
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 40,
        "min_p": 0.1,
        "seed": -3,
        "repetition_penalty": 1.1,
        "presence_penalty": 0.2,
        "frequency_penalty": -0.3,
        "stop_token_ids": [5, 6],
        "ignore_eos": True,
    }
    assert it.post(COMPLETIONS, body).status_code == 200
    [(_, prompt, sampling)] = it.engine.submitted
    assert prompt == [97, 98]
    assert sampling == SamplingParams(
        max_tokens=7,
        min_tokens=2,
        temperature=0.5,
        top_k=40,
        top_p=0.9,
        min_p=0.1,
        seed=-3,
        repetition_penalty=1.1,
        presence_penalty=0.2,
        frequency_penalty=-0.3,
        stop_token_ids=(5, 6),
        ignore_eos=True,
    )


@pytest.mark.parametrize("top_k", [-1, 0])
def test_a_top_k_that_means_no_limit_reaches_the_engine_as_none(folder: Path, top_k: int) -> None:
    it = served(folder)
    it.post(COMPLETIONS, {"prompt": "a", "top_k": top_k})
    assert it.engine.submitted[0][2].top_k is None


def test_nulls_and_fields_that_ask_for_nothing_are_as_if_absent(folder: Path) -> None:
    it = served(folder)
    body = {"prompt": "a", "temperature": None, "n": 1, "echo": False, "logprobs": None, "tools": [], "suffix": ""}
    assert it.post(COMPLETIONS, body).status_code == 200
    assert it.engine.submitted[0][2] == SamplingParams(max_tokens=16)


def test_a_chat_without_max_tokens_may_fill_the_context(folder: Path) -> None:
    it = served(folder)
    assert it.post(CHAT, {"messages": USER}).status_code == 200
    [(_, prompt, sampling)] = it.engine.submitted
    assert bytes(prompt) == b"[user]Hi[assistant]"
    assert sampling.max_tokens == MAX_MODEL_LEN - len(prompt)


def test_a_developer_message_is_the_systems_and_parts_are_joined(folder: Path) -> None:
    it = served(folder)
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    it.post(CHAT, {"messages": [{"role": "developer", "content": "x"}, {"role": "user", "content": parts}]})
    assert bytes(it.engine.submitted[0][1]) == b"[system]x[user]a\nb[assistant]"


def test_a_chat_answer_is_an_assistants_message(folder: Path) -> None:
    body = served(folder, saying("Yes.")).post(CHAT, {"messages": USER, "max_completion_tokens": 9}).json()
    [choice] = body["choices"]
    assert body["object"] == "chat.completion"
    assert choice["message"] == {"role": "assistant", "content": "Yes.", "refusal": None}
    assert choice["finish_reason"] == "stop"


def test_a_chat_stream_is_role_then_text_then_reason_then_usage_then_done(folder: Path) -> None:
    options = {"messages": USER, "stream": True, "stream_options": {"include_usage": True}}
    answer = served(folder, saying("Hel", "lo")).post(CHAT, options)
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    *chunks, usage, done = events(answer)
    assert [chunk["choices"][0]["delta"] for chunk in chunks] == [
        {"role": "assistant", "content": ""},
        {"content": "Hel"},
        {"content": "lo"},
        {},
    ]
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None, None, None, "stop"]
    assert all(chunk["usage"] is None for chunk in chunks)
    assert usage["choices"] == []
    assert usage["usage"] == {"prompt_tokens": 19, "completion_tokens": 6, "total_tokens": 25}
    assert done == "[DONE]"
    assert len({chunk["id"] for chunk in (*chunks, usage)}) == 1


def test_a_completion_stream_without_include_usage_has_no_usage_at_all(folder: Path) -> None:
    *chunks, done = events(served(folder, saying("a", "b")).post(COMPLETIONS, {"prompt": "x", "stream": True}))
    assert [chunk["choices"][0]["text"] for chunk in chunks] == ["a", "b", ""]
    assert chunks[-1]["choices"][0]["finish_reason"] == "stop"
    assert not any("usage" in chunk for chunk in chunks)
    assert done == "[DONE]"


def test_a_character_is_never_cut_between_chunks(folder: Path) -> None:
    euro = "€".encode()

    deltas = [TokenDelta("", [byte]) for byte in euro] + [delta("!", FinishReason.LENGTH)]

    *chunks, _ = events(served(folder, playing(*deltas)).post(COMPLETIONS, {"prompt": "x", "stream": True}))
    assert [chunk["choices"][0]["text"] for chunk in chunks] == ["€", "!"]


def test_bytes_that_never_become_a_character_are_shown_as_a_replacement_at_the_end(folder: Path) -> None:
    deltas = [TokenDelta("", [97, 0xE2, 0x82]), delta("", FinishReason.LENGTH)]

    body = served(folder, playing(*deltas)).post(COMPLETIONS, {"prompt": "x"}).json()
    assert body["choices"][0]["text"].rstrip("\ufffd") == "a"
    assert body["choices"][0]["text"] != "a"


def test_a_stop_string_across_tokens_ends_the_answer_and_cancels_the_engine(folder: Path) -> None:
    it = served(folder, saying("one S", "TO", "P two", " three"))
    body = it.post(COMPLETIONS, {"prompt": "x", "stop": "STOP"}).json()
    assert body["choices"][0] == {"index": 0, "text": "one ", "logprobs": None, "finish_reason": "stop"}
    assert body["usage"]["completion_tokens"] == len("one STOP")
    assert it.engine.cancelled == [it.engine.submitted[0][0]]


def test_no_part_of_a_stop_string_is_streamed(folder: Path) -> None:
    it = served(folder, saying("one S", "TO", "P two"))
    *chunks, _ = events(it.post(COMPLETIONS, {"prompt": "x", "stop": ["STOP", "never"], "stream": True}))
    assert [chunk["choices"][0]["text"] for chunk in chunks] == ["one ", ""]


def test_text_that_only_begins_like_a_stop_string_is_not_lost(folder: Path) -> None:
    body = served(folder, saying("a ST")).post(COMPLETIONS, {"prompt": "x", "stop": "STOP"}).json()
    assert body["choices"][0]["text"] == "a ST"


def test_stop_strings_do_not_count_before_min_tokens(folder: Path) -> None:
    it = served(folder, saying("ab", "ab"))
    body = it.post(COMPLETIONS, {"prompt": "x", "stop": "b", "min_tokens": 2}).json()
    assert body["choices"][0]["text"] == "aba"


def test_an_answer_that_reached_its_limit_says_length(folder: Path) -> None:
    it = served(folder, saying("ab", finish=FinishReason.LENGTH))
    body = it.post(COMPLETIONS, {"prompt": "x", "max_tokens": 2}).json()
    assert body["choices"][0]["finish_reason"] == "length"
    assert body["usage"]["completion_tokens"] == 2


def test_the_token_that_stopped_the_answer_has_no_text_but_counts(folder: Path) -> None:
    deltas = [TokenDelta("", [*b"ab."], FinishReason.STOP)]

    body = served(folder, playing(*deltas)).post(COMPLETIONS, {"prompt": "x", "stop_token_ids": [46]}).json()
    assert body["choices"][0]["text"] == "ab"
    assert body["usage"]["completion_tokens"] == 3


def test_token_ids_are_taken_as_a_prompt(folder: Path) -> None:
    it = served(folder)
    assert it.post(COMPLETIONS, {"prompt": [1, 2, 3]}).json()["usage"]["prompt_tokens"] == 3
    assert it.engine.submitted[0][1] == [1, 2, 3]


@pytest.mark.parametrize("stream", [False, True])
def test_several_prompts_have_a_choice_each(folder: Path, stream: bool) -> None:
    def script(prompt: list[int]) -> list[TokenDelta]:
        return [delta(bytes(prompt).decode().upper()), delta("", FinishReason.STOP)]

    body = {
        "prompt": ["ab", "cde", [102]],
        "stream": stream,
        "stream_options": {"include_usage": True} if stream else None,
    }
    answer = served(folder, script).post(COMPLETIONS, body)
    texts = ["", "", ""]
    if stream:
        *chunks, last, _ = events(answer)
        choices = [chunk["choices"][0] for chunk in chunks]
    else:
        last = answer.json()
        choices = last["choices"]
    for choice in choices:
        texts[choice["index"]] += choice["text"]
    assert texts == ["AB", "CDE", "F"]
    assert last["usage"] == {"prompt_tokens": 6, "completion_tokens": 9, "total_tokens": 15}


def test_one_failing_prompt_of_several_fails_the_request_and_cancels_the_others(folder: Path) -> None:
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


def test_an_engine_that_dies_before_the_first_token_is_a_503_even_for_a_stream(folder: Path) -> None:
    deltas = [TokenDelta("", [], FinishReason.ERROR, error_code=EngineDied.code, error_message="gone")]

    answer = served(folder, playing(*deltas)).post(COMPLETIONS, {"prompt": "a", "stream": True})
    assert answer.status_code == 503
    assert answer.json()["error"]["code"] == "engine_died"
    assert int(answer.headers["retry-after"]) >= 1


def test_an_engine_that_dies_mid_stream_is_an_event_with_the_requests_id(folder: Path) -> None:
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
    }
    assert done == "[DONE]"
    assert it.value("requests_total", route=COMPLETIONS, outcome="server_error") == 1


def test_a_full_queue_is_a_429_that_says_when_to_come_again(folder: Path) -> None:
    async def run() -> None:
        it = served(folder, max_queued_requests=1)
        it.engine.gate.clear()
        async with it.client() as client:
            first = asyncio.create_task(client.post(COMPLETIONS, json={"prompt": "a"}))
            while not it.engine.submitted:
                await asyncio.sleep(0)
            second = await client.post(COMPLETIONS, json={"prompt": "b"})
            assert second.status_code == 429
            assert second.json()["error"]["message"] == "1 requests wait for their first token, the limit is 1."
            assert second.headers["retry-after"] == "1"
            it.engine.gate.set()
            assert (await first).status_code == 200
            assert (await client.post(COMPLETIONS, json={"prompt": "c"})).status_code == 200
        assert it.value("rejected_total", reason="queue_requests") == 1

    asyncio.run(run())


def test_prompt_tokens_that_would_wait_are_limited_but_an_empty_queue_takes_any(folder: Path) -> None:
    async def run() -> None:
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
        assert it.edge.admission.num_tokens == 0
        assert it.edge.admission.num_requests == 0

    asyncio.run(run())


def test_a_request_before_ready_is_a_503_with_the_reason(folder: Path) -> None:
    it = served(folder)
    it.engine.refuse()
    answer = it.post(COMPLETIONS, {"prompt": "a"})
    assert answer.status_code == 503
    assert answer.json()["error"]["message"] == "The engine refuses to serve: 1 of 2 shapes has no proven path"
    assert it.value("rejected_total", reason="not_ready") == 1


def test_a_request_that_takes_longer_than_allowed_is_a_504_and_is_cancelled(folder: Path) -> None:
    it = served(folder, request_timeout_s=0.05)
    it.engine.gate.clear()
    answer = it.post(COMPLETIONS, {"prompt": "a"})
    assert answer.status_code == 504
    assert "0.05 s" in answer.json()["error"]["message"]
    assert len(it.engine.cancelled) == 1


def test_a_shutdowns_deadline_ends_a_running_stream_with_an_event(folder: Path) -> None:
    async def run() -> None:
        it = served(folder, saying("a", "b"))
        it.engine.gate.clear()
        it.engine.num_free = 1
        async with it.client() as client:
            answer = asyncio.create_task(client.post(COMPLETIONS, json={"prompt": "a", "stream": True}))
            while it.edge.metrics.prompt_tokens._value.get() == 0:
                await asyncio.sleep(0)
            it.edge.lifecycle.begin_drain()
            refused = await client.post(COMPLETIONS, json={"prompt": "b"})
            assert refused.json()["error"]["code"] == "shutting_down"
            it.edge.lifecycle.abort_all()
            first, error, done = events(await answer)
        assert first["choices"][0]["text"] == "a"
        assert error["error"]["code"] == "shutting_down"
        assert done == "[DONE]"
        assert it.engine.cancelled == [it.engine.submitted[0][0]]

    asyncio.run(run())
