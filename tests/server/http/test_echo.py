"""`echo` and `logprobs` of a completion, against a scripted engine."""

from pathlib import Path

import msgspec
import pytest
from edge_fakes import Served, delta, playing, saying, served, usage_of

from server.protocol.messages import FinishReason, TokenScores

COMPLETIONS = "/v1/completions"
# Of the prompt "abc" and the token "d" that follows, in two chunks.
SCORES = [
    TokenScores(1, [-0.5, -1.5], [[98], [120]], [[-0.5], [-0.25]]),
    TokenScores(3, [-2.0], [[100]], [[-2.0]]),
]


def scoring(folder: Path) -> Served:
    answer = delta("d", FinishReason.LENGTH, is_first=True)
    return served(folder, playing(msgspec.structs.replace(answer, scores=SCORES)))


def test_the_prompt_comes_back_with_the_log_probability_of_each_token_but_the_first(folder: Path) -> None:
    it = scoring(folder)
    body = it.post(COMPLETIONS, {"prompt": "abc", "echo": True, "logprobs": 1, "max_tokens": 0}).json()
    [choice] = body["choices"]
    assert choice["text"] == "abc"
    assert choice["logprobs"] == {
        "tokens": ["a", "b", "c"],
        "token_logprobs": [None, -0.5, -1.5],
        "top_logprobs": [None, {"b": -0.5}, {"x": -0.25, "c": -1.5}],
        "text_offset": [0, 1, 2],
    }
    assert body["usage"] == usage_of(3, 0)


def test_one_generated_token_is_scored_too(folder: Path) -> None:
    it = scoring(folder)
    body = it.post(COMPLETIONS, {"prompt": "abc", "echo": True, "logprobs": 1, "max_tokens": 1}).json()
    [choice] = body["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("abcd", "length")
    assert choice["logprobs"]["tokens"] == ["a", "b", "c", "d"]
    assert choice["logprobs"]["token_logprobs"] == [None, -0.5, -1.5, -2.0]
    assert body["usage"]["completion_tokens"] == 1


def test_tokens_may_be_named_by_their_ids(folder: Path) -> None:
    fields = {"prompt": [97, 98, 99], "echo": True, "logprobs": 1, "max_tokens": 0, "return_tokens_as_token_ids": True}
    [choice] = scoring(folder).post(COMPLETIONS, fields).json()["choices"]
    assert choice["logprobs"]["tokens"] == ["token_id:97", "token_id:98", "token_id:99"]
    assert choice["logprobs"]["top_logprobs"][2] == {"token_id:120": -0.25, "token_id:99": -1.5}


@pytest.mark.parametrize(("max_tokens", "num_engine"), [(0, 1), (1, 1)])
def test_the_engine_is_asked_for_scores_and_one_token(folder: Path, max_tokens: int, num_engine: int) -> None:
    it = scoring(folder)
    it.post(COMPLETIONS, {"prompt": "abc", "echo": True, "logprobs": 2, "max_tokens": max_tokens})
    [(_, _, sampling)] = it.engine.submitted
    assert (sampling.scored, sampling.max_tokens) == (2, num_engine)


def test_echo_alone_gives_prompt_and_answer_without_log_probabilities(folder: Path) -> None:
    it = served(folder, saying("d", "e"))
    [choice] = it.post(COMPLETIONS, {"prompt": "abc", "echo": True, "max_tokens": 5}).json()["choices"]
    assert (choice["text"], choice["logprobs"]) == ("abcde", None)
    assert it.engine.submitted[0][2].scored is None


def test_each_of_several_prompts_has_its_own(folder: Path) -> None:
    it = scoring(folder)
    fields = {"prompt": ["abc", "xyz"], "echo": True, "logprobs": 0, "max_tokens": 0}
    choices = it.post(COMPLETIONS, fields).json()["choices"]
    assert [choice["text"] for choice in choices] == ["abc", "xyz"]
    assert [choice["logprobs"]["tokens"] for choice in choices] == [["a", "b", "c"], ["x", "y", "z"]]
