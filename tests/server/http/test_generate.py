"""The endpoints that generate, against a scripted engine: one answer to a prompt, and several."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from pathlib import Path

import msgspec
import pytest
from msgspec.structs import replace

from server.http.chat.rendering import plain_messages
from server.http.chat.requests import Message
from server.http.generation.pieces import Piece, merged
from server.protocol.messages import FinishReason, Fork, SamplingParams, Submit, TokenDelta
from server.settings import Settings
from server.supervisor.choices import Choices
from server.telemetry.operators import fingerprint_digest
from server.telemetry.tracing import Tracing
from support.api.edge_fakes import (
    END,
    MAX_MODEL_LEN,
    TIMES,
    Script,
    ScriptedEngine,
    Served,
    delta,
    events,
    make_services,
    playing,
    saying,
    served,
    usage_of,
    with_keys,
)
from support.on_a_loop import on_a_loop

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
USER = [{"role": "user", "content": "Hi"}]


def test_a_request_is_measured_once_under_its_prompts_bucket(folder: Path) -> None:
    it = served(folder, saying("Hel", "lo"))
    it.post(COMPLETIONS, {"prompt": "a" * 200})
    for family in ("time_to_first_token_seconds", "time_per_output_token_seconds", "prefill_seconds"):
        assert it.value(f"{family}_count", model="tiny", bucket="le_512") == 1
        assert it.value(f"{family}_count", model="tiny", bucket="le_128") == 0
        assert it.value(f"{family}_count", model="tiny", bucket="le_8k") is None  # beyond the model's limit
    assert it.value("queue_seconds_sum", model="tiny") == 0.25
    assert it.value("prefill_seconds_sum", model="tiny", bucket="le_512") == 0.5
    assert it.value("prompt_tokens_total") == 200
    assert it.value("generation_tokens_total") == 6
    assert it.value("request_duration_seconds_count", model="tiny", outcome="ok") == 1
    assert it.value("requests_total", route=COMPLETIONS, outcome="ok") == 1
    assert it.value("oldest_inflight_seconds") == 0


def test_the_engine_gets_tokens_and_sampling_parameters(folder: Path) -> None:
    it = served(folder)
    values = {
        "max_tokens": 7, "min_tokens": 2, "temperature": 0.5, "top_p": 0.9, "top_k": 40, "min_p": 0.1, "seed": -3,
        "repetition_penalty": 1.1, "presence_penalty": 0.2, "frequency_penalty": -0.3, "ignore_eos": True,
    }  # fmt: skip
    assert it.post(COMPLETIONS, {"prompt": "ab", "stop_token_ids": [5, 6], **values}).status_code == 200
    [(_, prompt, sampling)] = it.engine.submitted
    assert prompt == [97, 98]
    assert sampling == SamplingParams(stop_token_ids=(5, 6), **values)  # type: ignore[arg-type]


@pytest.mark.parametrize("top_k", [-1, 0])
def test_a_top_k_that_means_no_limit_reaches_the_engine_as_none(folder: Path, top_k: int) -> None:
    it = served(folder)
    it.post(COMPLETIONS, {"prompt": "a", "top_k": top_k})
    assert it.engine.submitted[0][2].top_k is None


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        (COMPLETIONS, {"prompt": "a"}),
        (CHAT, {"messages": USER}),
        ("/v1/responses", {"input": "Hi"}),
        ("/v1/messages", {"messages": USER, "max_tokens": 4}),
    ],
)
def test_a_top_p_of_0_is_greedy_on_every_route(folder: Path, path: str, fields: dict[str, object]) -> None:
    it = served(folder)
    answer = it.post(path, {**fields, "top_p": 0, "temperature": 1.5})
    assert answer.status_code == 200, answer.text
    sampling = it.engine.submitted[0][2]
    assert (sampling.temperature, sampling.top_p) == (0.0, 1.0)
    body = answer.json()
    assert (body.get("temperature"), body.get("top_p")) == ((1.5, 0.0) if "input" in fields else (None, None))


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


def test_a_developer_message_is_the_systems(folder: Path) -> None:
    it = served(folder)
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    it.post(CHAT, {"messages": [{"role": "developer", "content": "x"}, {"role": "user", "content": parts}]})
    assert bytes(it.engine.submitted[0][1]) == b"[system]x[user]a\nb[assistant]"


def test_only_with_the_setting_do_messages_spell_special_tokens(folder: Path) -> None:
    text = "a<|end|>b"
    for setting, expected in ((False, [*text.encode()]), (True, [*b"a", END, *b"b"])):
        it = served(folder, special_tokens_in_text=setting)
        messages = [{"role": "user", "content": [{"type": "text", "text": text}]}]
        assert it.post(CHAT, {"messages": messages}).status_code == 200
        chat = [*b"[user]", *expected, *b"[assistant]"]
        assert it.engine.submitted[0][1] == chat
        assert it.post("/tokenize", {"messages": messages}).json()["tokens"] == chat
        assert it.post(COMPLETIONS, {"prompt": text}).status_code == 200
        assert it.engine.submitted[1][1] == [*b"a", END, *b"b"]


def test_a_name_reaches_the_template() -> None:
    fields = [{"role": "user", "content": "a", "name": "Ann"}, {"role": "assistant", "content": None}]
    messages = [Message.model_validate(message) for message in fields]
    assert plain_messages(messages) == [
        {"role": "user", "content": "a", "name": "Ann"},
        {"role": "assistant", "content": ""},
    ]


def test_a_chat_answer_is_an_assistants_message(folder: Path) -> None:
    body = served(folder, saying("Yes.")).post(CHAT, {"messages": USER, "max_completion_tokens": 9}).json()
    [choice] = body["choices"]
    assert body["object"] == "chat.completion"
    assert choice["message"] == {"role": "assistant", "content": "Yes.", "refusal": None}
    assert choice["finish_reason"] == "stop"


def test_a_chat_stream_is_role_text_reason_usage_done(folder: Path) -> None:
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
    assert usage["usage"] == usage_of(19, 6)
    assert done == "[DONE]"
    assert len({chunk["id"] for chunk in (*chunks, usage)}) == 1


@pytest.mark.parametrize(("route", "body"), [(COMPLETIONS, {"prompt": "a"}), (CHAT, {"messages": USER})])
def test_an_answer_has_the_metrics_fingerprint(folder: Path, route: str, body: dict[str, object]) -> None:
    it = served(folder, saying("Hel", "lo"))
    assert it.engine.ready is not None
    wanted = f"hallmark-{it.services.program.version}-{fingerprint_digest(it.engine.ready.fingerprint)}"
    assert it.post(route, body).json()["system_fingerprint"] == wanted
    *chunks, done = events(it.post(route, body | {"stream": True}))
    assert done == "[DONE]"
    assert {chunk["system_fingerprint"] for chunk in chunks} == {wanted}  # type: ignore[index]


def test_a_stream_without_include_usage_has_no_usage(folder: Path) -> None:
    *chunks, done = events(served(folder, saying("a", "b")).post(COMPLETIONS, {"prompt": "x", "stream": True}))
    assert [chunk["choices"][0]["text"] for chunk in chunks] == ["a", "b", ""]
    assert chunks[-1]["choices"][0]["finish_reason"] == "stop"
    assert not any("usage" in chunk for chunk in chunks)
    assert done == "[DONE]"


def test_bytes_of_no_character_end_as_a_replacement(folder: Path) -> None:
    deltas = [TokenDelta("", [97, 0xE2, 0x82]), delta("", FinishReason.LENGTH)]

    body = served(folder, playing(*deltas)).post(COMPLETIONS, {"prompt": "x"}).json()
    assert body["choices"][0]["text"].rstrip("\ufffd") == "a"
    assert body["choices"][0]["text"] != "a"


@pytest.mark.parametrize(
    ("script", "fields", "text", "reason", "num_tokens", "is_cancelled"),
    [
        (saying("one S", "TO", "P two", " three"), {"stop": "STOP"}, "one ", "stop", 8, True),
        (saying("a ST"), {"stop": "STOP"}, "a ST", "stop", 5, False),  # it only begins like a stop string
        (saying("ab", "bb"), {"stop": "b", "min_tokens": 2}, "ab", "stop", 3, True),  # the third may stop
        (saying("ab", finish=FinishReason.LENGTH), {"max_tokens": 2}, "ab", "length", 2, False),
        (playing(TokenDelta("", [*b"ab."], FinishReason.STOP)), {"stop_token_ids": [46]}, "ab", "stop", 3, False),
    ],
    ids=["stop string across tokens", "begins like one", "before min_tokens", "limit", "stop token"],
)
def test_an_answer_ends_where_it_should(
    folder: Path, script: Script, fields: dict[str, object], text: str, reason: str, num_tokens: int, is_cancelled: bool
) -> None:
    it = served(folder, script)
    body = it.post(COMPLETIONS, {"prompt": "x", **fields}).json()
    assert body["choices"] == [{"index": 0, "text": text, "logprobs": None, "finish_reason": reason}]
    assert body["usage"]["completion_tokens"] == num_tokens
    assert it.engine.cancelled == ([it.engine.submitted[0][0]] if is_cancelled else [])


@pytest.mark.parametrize("stream", [False, True])
def test_several_prompts_have_n_choices_each_in_order(folder: Path, stream: bool) -> None:
    def script(prompt: list[int]) -> list[TokenDelta]:
        return [delta(bytes(prompt).decode().upper()), delta("", FinishReason.STOP)]

    body = {
        "prompt": ["ab", "cde", [102]],
        "n": 2,
        "stream": stream,
        "stream_options": {"include_usage": True} if stream else None,
    }
    answer = served(folder, script).post(COMPLETIONS, body)
    texts = [""] * 6
    if stream:
        *chunks, last, _ = events(answer)
        choices = [chunk["choices"][0] for chunk in chunks]
    else:
        last = answer.json()
        choices = last["choices"]
    for choice in choices:
        texts[choice["index"]] += choice["text"]
    assert texts == ["AB", "AB", "CDE", "CDE", "F", "F"]
    assert last["usage"] == usage_of(6, 2 * 9)  # a prompt counts once


def test_a_traced_answer_names_its_span_in_the_clients_trace(folder: Path, refused_url: str) -> None:
    trace_id = "0af7651916cd43dd8448eb211c80319c"
    engine = ScriptedEngine()
    tracing = Tracing(refused_url, version="1", count_dropped=lambda _: None)
    it = Served(make_services(folder, engine, Settings(model="tiny"), tracing=tracing), engine)
    headers = {"traceparent": f"00-{trace_id}-b7ad6b7169203331-01"}
    answer = it.post(COMPLETIONS, {"prompt": "a"}, headers=headers)
    version, trace, span, flags = answer.headers["traceparent"].split("-")
    tracing.close()
    assert (version, trace, flags) == ("00", trace_id, "01")
    assert span != "b7ad6b7169203331"


def test_usage_counts_the_cached_prompt_tokens(folder: Path) -> None:
    times = msgspec.structs.replace(TIMES, num_cached_tokens=16)
    it = served(folder, playing(TokenDelta("", [65], FinishReason.LENGTH, times=times)))
    answer = it.post(COMPLETIONS, {"prompt": [1] * 20, "max_tokens": 1})
    assert answer.json()["usage"] == usage_of(20, 1, num_cached=16)


def test_a_request_may_bring_its_own_salt(folder: Path) -> None:
    it = served(folder, saying("x"))
    for salt in ({}, {"cache_salt": "mine"}, {"cache_salt": "mine"}, {"cache_salt": "other"}):
        assert it.post(COMPLETIONS, {"prompt": "a", **salt}).status_code == 200
    none, mine, again, other = it.engine.salts
    assert none == b""
    assert mine == again
    assert len({none, mine, other}) == 3


def test_keys_that_send_one_salt_share_no_pages(folder: Path) -> None:
    it = with_keys(served(folder), "left", "right")
    sent = [("left", "s"), ("left", None), ("right", "s"), ("left", "t"), ("right", None)]
    for key, salt in (*sent, *sent[:2]):
        headers = {"authorization": f"Bearer {key}"}
        assert it.post(COMPLETIONS, {"prompt": "a", "cache_salt": salt}, headers=headers).status_code == 200
    salts, again = it.engine.salts[: len(sent)], it.engine.salts[len(sent) :]
    assert len({*salts, b""}) == 6
    assert again == salts[:2]


def test_a_chat_streams_its_choices_side_by_side(folder: Path) -> None:
    fields = {"messages": USER, "n": 3, "stream": True, "stream_options": {"include_usage": True}}
    *chunks, last, _ = events(served(folder, saying("Hel", "lo")).post("/v1/chat/completions", fields))
    choices = [chunk["choices"][0] for chunk in chunks]
    for index in range(3):
        own = [choice for choice in choices if choice["index"] == index]
        assert own[0]["delta"]["role"] == "assistant"
        assert "".join(choice["delta"].get("content", "") for choice in own) == "Hello"
        assert own[-1]["finish_reason"] == "stop"
    assert last["usage"] == usage_of(len(b"[user]Hi[assistant]"), 18)


@pytest.mark.parametrize(
    ("seed", "seeds"), [(7, [7, 8, 9]), (None, [None] * 3), (2**63 - 2, [2**63 - 2, 2**63 - 1, -(2**63)])]
)
def test_each_choice_has_a_seed_of_its_own(folder: Path, seed: int | None, seeds: list[int | None]) -> None:
    it = served(folder)
    assert it.post(COMPLETIONS, {"prompt": "a", "n": 3, "seed": seed}).status_code == 200
    assert [sampling.seed for _, _, sampling in it.engine.submitted] == seeds


def test_the_choices_of_a_prompt_are_submitted_at_once(folder: Path) -> None:
    it = served(folder)
    assert it.post(COMPLETIONS, {"prompt": ["a", "b"], "n": 2, "seed": 5}).status_code == 200
    first, also_first, second, also_second = it.engine.choices
    assert first is also_first is not None
    assert second is also_second is not first
    assert it.post(COMPLETIONS, {"prompt": ["a", "a"]}).status_code == 200
    assert it.engine.choices[4:] == [None, None]


def test_the_last_choice_that_joins_submits_them_all() -> None:
    choices = Choices(3)
    submits = [Submit(name, [1, 2], SamplingParams(max_tokens=1, seed=ord(name))) for name in "abc"]
    assert [choices.join(submit) for submit in submits[:2]] == [None, None]
    whole = choices.join(submits[2])
    assert whole == replace(submits[0], forks=[Fork("b", ord("b")), Fork("c", ord("c"))])


@on_a_loop
async def test_unread_choices_wait_where_they_are_merged() -> None:
    num_taken = 0

    async def endless(index: int) -> AsyncGenerator[Piece]:
        nonlocal num_taken
        while True:
            await asyncio.sleep(0)
            num_taken += 1
            yield Piece(index, "x", None)

    async with aclosing(merged([endless(0), endless(1)])) as stream:
        for num_read in range(1, 20):
            await anext(stream)
            for _ in range(20):
                await asyncio.sleep(0)
            assert num_taken <= num_read + 4  # two that wait, and one in the hands of each stream
    assert num_taken >= 20
