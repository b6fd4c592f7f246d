"""Details of answers beside their text: log probabilities, token ids, their prompts, usage so far."""

import json
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from server.http.common.json_pieces import PIECE_BYTES, LazyList, json_pieces
from server.settings import DEMO_MODEL
from server.text.tokenizer import Tokenizer
from support.api.edge_fakes import events, saying, served, usage_of

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
USER = [{"role": "user", "content": "Hi"}]
# By the fakes' scores: a token's log probability is an eighth of its negative id, the likeliest are tokens 0, 1, ...


def entry(text: str, top: int = 0) -> dict[str, Any]:
    likeliest = [{"token": chr(i), "logprob": -i / 8, "bytes": [i]} for i in range(top)]
    return {"token": text, "logprob": -ord(text) / 8, "bytes": [ord(text)], "top_logprobs": likeliest}


END = {"token": "<|end|>", "logprob": -32.0, "bytes": [*b"<|end|>"]}


def test_a_chat_gives_each_token_with_its_log_probability(folder: Path) -> None:
    it = served(folder, saying("Hel", "lo"))
    body = it.post(CHAT, {"messages": USER, "logprobs": True, "top_logprobs": 2}).json()
    [choice] = body["choices"]
    *content, end = choice["logprobs"]["content"]
    assert content == [entry(char, top=2) for char in "Hello"]
    assert end == END | {"top_logprobs": entry("a", top=2)["top_logprobs"]}
    assert body["usage"]["completion_tokens"] == 6
    assert it.engine.submitted[0][2].logprobs == 2


def test_a_streamed_chat_gives_every_token_once(folder: Path) -> None:
    it = served(folder, saying("one S", "T", "AY", "S"))
    fields = {"messages": USER, "logprobs": True, "stream": True, "stop": "STOP", "return_token_ids": True}
    *chunks, _ = events(it.post(CHAT, fields))
    choices: list[Any] = [chunk["choices"][0] for chunk in chunks]  # type: ignore[index]
    content = [entry for choice in choices if choice["logprobs"] for entry in choice["logprobs"]["content"]]
    assert content == [*(entry(char) for char in "one STAYS"), END | {"top_logprobs": []}]
    ids = [token_id for choice in choices for token_id in choice.get("token_ids", ())]
    assert ids == [*b"one STAYS", 256]
    assert "".join(choice["delta"].get("content", "") for choice in choices) == "one STAYS"
    assert bytes(chunks[1]["prompt_token_ids"]) == b"[user]Hi[assistant]"  # type: ignore[index]


def test_tokens_behind_a_stop_string_have_no_log_probability(folder: Path) -> None:
    it = served(folder, saying("one S", "TO", "P two"))
    fields = {"prompt": "x", "stop": "STOP", "logprobs": 0, "return_token_ids": True}
    body = it.post(COMPLETIONS, fields).json()
    [choice] = body["choices"]
    assert "".join(choice["logprobs"]["tokens"]) == bytes(choice["token_ids"]).decode() == "one STOP"
    assert (choice["text"], body["usage"]["completion_tokens"]) == ("one ", len("one STOP"))


@pytest.mark.parametrize("stream", [False, True])
def test_a_completion_echoes_its_prompt_with_log_probabilities(folder: Path, stream: bool) -> None:
    it = served(folder, saying("de", "f"))
    fields = {"prompt": ["abc", "xy"], "echo": True, "logprobs": 1, "max_tokens": 9, "stream": stream}
    answer = it.post(COMPLETIONS, fields)
    chunks: list[Any] = events(answer)[:-1] if stream else [answer.json()]
    for index, prompt in enumerate(("abc", "xy")):
        choices = [choice for chunk in chunks for choice in chunk["choices"] if choice["index"] == index]
        assert "".join(choice["text"] for choice in choices) == f"{prompt}def"
        found = {
            name: [value for choice in choices if choice["logprobs"] for value in choice["logprobs"][name]]
            for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset")
        }
        assert found["tokens"] == [*prompt, "d", "e", "f", "<|end|>"]
        expected = [-ord(char) / 8 for char in f"{prompt}def"][1:]
        assert found["token_logprobs"] == [None, *expected, -32.0]
        assert found["top_logprobs"][:2] == [None, {"\x00": 0.0, prompt[1]: expected[0]}]
        assert found["text_offset"] == [*range(len(prompt) + 4)]
    sampling = it.engine.submitted[0][2]
    assert (sampling.prompt_logprobs, sampling.logprobs, sampling.max_tokens) == (1, 1, 9)


@pytest.mark.parametrize("stream", [False, True])
def test_an_echo_without_tokens_is_the_prompt_alone(folder: Path, stream: bool) -> None:
    it = served(folder, saying("d"))
    fields = {"prompt": "abc", "echo": True, "logprobs": 0, "max_tokens": 0, "stream": stream}
    if stream:
        fields["stream_options"] = {"include_usage": True}
    answer = it.post(COMPLETIONS, fields)
    chunks: list[Any] = events(answer)[:-1] if stream else [answer.json()]
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    assert "".join(choice["text"] for choice in choices) == "abc"
    assert [name for choice in choices for name in choice["logprobs"]["tokens"]] == ["a", "b", "c"]
    assert chunks[-1]["usage"] == usage_of(3, 0)
    assert it.engine.submitted[0][2].max_tokens == 1


def test_tokens_may_be_named_by_their_ids(folder: Path) -> None:
    fields = {"prompt": [97, 98], "echo": True, "logprobs": 1, "max_tokens": 0, "return_tokens_as_token_ids": True}
    [choice] = served(folder).post(COMPLETIONS, fields).json()["choices"]
    assert choice["logprobs"]["tokens"] == ["token_id:97", "token_id:98"]
    assert choice["logprobs"]["top_logprobs"] == [None, {"token_id:0": 0.0, "token_id:98": -12.25}]
    chat = {"messages": USER, "logprobs": True, "return_tokens_as_token_ids": True}
    [choice] = served(folder, saying("a")).post(CHAT, chat).json()["choices"]
    assert choice["logprobs"]["content"][0] == {
        "token": "token_id:97",
        **{k: v for k, v in entry("a").items() if k != "token"},
    }


def test_prompt_logprobs_are_as_vllm_gives_them(folder: Path) -> None:
    of_b = {
        "0": {"logprob": 0.0, "rank": 1, "decoded_token": "\x00"},
        "98": {"logprob": -12.25, "rank": 99, "decoded_token": "b"},
    }
    body = served(folder).post(COMPLETIONS, {"prompt": "ab", "prompt_logprobs": 1, "return_token_ids": True}).json()
    assert body["choices"][0]["prompt_logprobs"] == [None, of_b]
    assert body["choices"][0]["prompt_token_ids"] == [97, 98]
    assert body["choices"][0]["token_ids"] == [*b"Hello", 256]
    chat = served(folder).post(CHAT, {"messages": USER, "prompt_logprobs": 0, "return_token_ids": True, "n": 2}).json()
    assert len(chat["prompt_logprobs"]) == len(chat["prompt_token_ids"]) == len("[user]Hi[assistant]")
    assert list(chat["prompt_logprobs"][1]) == [str(ord("u"))]


@pytest.mark.parametrize("stream", [False, True])
def test_long_details_are_written_in_pieces(folder: Path, stream: bool) -> None:
    prompt = [97 + i % 26 for i in range(60)]
    fields = {"prompt": [prompt] * 8, "echo": True, "logprobs": 20, "max_tokens": 1, "stream": stream, "hallmark": True}
    answer = served(folder, saying("d")).post(COMPLETIONS, fields)
    chunks: list[Any] = events(answer)[:-1] if stream else [answer.json()]
    assert "content-length" not in answer.headers
    for index in range(8):
        choices = [choice for chunk in chunks for choice in chunk["choices"] if choice["index"] == index]
        found = [value for choice in choices for value in choice["logprobs"]["token_logprobs"]]
        assert found == [None, *(-token_id / 8 for token_id in prompt[1:]), -12.5, -32.0]
        assert {len(top) for choice in choices for top in choice["logprobs"]["top_logprobs"] if top} == {21}
    assert chunks[-1]["hallmark"]["status"] == "provisional"


def test_a_lazy_list_is_never_in_memory_whole() -> None:
    document = {"a\x00": [1], "b": LazyList(lambda: ([i, "\x00"] for i in range(70_000))), "c": LazyList(lambda: ())}
    tracemalloc.start()
    num_bytes = sum(map(len, json_pieces(document)))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 8 * PIECE_BYTES < num_bytes
    wanted = {"a\x00": [1], "b": [[i, "\x00"] for i in range(70_000)], "c": []}
    assert json.loads(b"".join(json_pieces(document))) == wanted


def test_every_chunk_may_have_the_usage_so_far(folder: Path) -> None:
    for options, has_last in (({"include_usage": True}, True), ({}, False)):
        fields = {"prompt": "abc", "stream": True, "stream_options": {**options, "continuous_usage_stats": True}}
        chunks: list[Any] = events(served(folder, saying("Hel", "lo")).post(COMPLETIONS, fields))[:-1]
        assert [chunk["usage"] for chunk in chunks[:3]] == [usage_of(3, num) for num in (3, 5, 6)]
        assert [len(chunk["choices"]) for chunk in chunks] == [1, 1, 1, *([0] if has_last else [])]


def test_biases_that_change_something_reach_the_engine(folder: Path) -> None:
    it = served(folder)
    part = {"type": "text", "text": "Hi", "cache_control": {"type": "ephemeral"}}
    marked = [{"role": "user", "content": [part], "cache_control": {"type": "ephemeral"}}]
    assert it.post(CHAT, {"messages": USER, "logit_bias": {"5": -100, "256": 0.5}}).status_code == 200
    assert it.post(CHAT, {"messages": USER}).status_code == 200
    assert it.post(CHAT, {"messages": marked}).status_code == 200
    assert it.engine.submitted[0][2].logit_bias == ((5, -100.0), (256, 0.5))
    assert it.engine.submitted[1][1:] == it.engine.submitted[2][1:]


def test_limits_on_tokens_reach_the_engine(folder: Path) -> None:
    it = served(folder)
    fields = {"prompt": "a", "allowed_token_ids": [5, 7, 5], "bad_words": ["ab", "c"]}
    assert it.post(COMPLETIONS, fields).status_code == 200
    sampling = it.engine.submitted[0][2]
    assert sampling.allowed_token_ids == (5, 7)
    assert sampling.bad_words == (tuple(b"ab"), tuple(b"c"))
    for wrong in ({"allowed_token_ids": [257]}, {"bad_words": [" "]}, {"bad_words": [""]}):
        error = it.post(COMPLETIONS, {"prompt": "a", **wrong}).json()["error"]
        assert (error["code"], error["param"].partition("[")[0]) == ("invalid_value", next(iter(wrong)))


@pytest.mark.parametrize("word", ["cat", " cat"])
def test_a_word_is_banned_behind_a_space_however_many_tokens_it_has(word: str) -> None:
    it = served(DEMO_MODEL)
    assert it.post(COMPLETIONS, {"prompt": "a", "bad_words": [word]}).status_code == 200
    alone, behind = (Tokenizer.load(DEMO_MODEL).encode(text, add_special_tokens=False) for text in ("cat", " cat"))
    assert len(alone) != len(behind)
    assert it.engine.submitted[0][2].bad_words == (tuple(alone), tuple(behind))


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"top_logprobs": 1}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"logprobs": 1}, "logprobs"),
    ],
)
def test_a_chat_refuses_log_probabilities_by_name(folder: Path, fields: dict[str, Any], param: str) -> None:
    answer = served(folder).post(CHAT, {"messages": USER, **fields})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
