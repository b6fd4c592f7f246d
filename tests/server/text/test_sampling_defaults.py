"""Sampling that the model's authors recommend, where a request does not say otherwise."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
from transformers import GenerationConfig

from server.errors import ModelError
from server.http.common.validation import read
from server.http.generation.sampling import sampling_of
from server.http.openai.requests import CompletionRequest
from server.text.sampling_defaults import SamplingDefaults, keys_not_read, load_sampling_defaults
from server.text.tokenizer import Tokenizer

TOKENIZER = cast("Tokenizer", SimpleNamespace(vocab_size=1000))
RECOMMENDED = SamplingDefaults(temperature=0.6, top_p=0.95, top_k=20)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, (0.6, 0.95, 20)),
        ({"temperature": None}, (0.6, 0.95, 20)),  # null says nothing
        ({"temperature": 0.0}, (0.0, 0.95, 20)),
        ({"top_k": -1, "top_p": 1.0}, (0.6, 1.0, None)),
        ({"top_p": 0, "temperature": 1.5}, (0.0, 1.0, 20)),  # the likeliest token
    ],
)
def test_what_a_request_says_wins_field_by_field(
    given: dict[str, object], expected: tuple[float, float, int | None]
) -> None:
    sampling = sampling_of(read(CompletionRequest, {"prompt": "a", **given}), 16, TOKENIZER, RECOMMENDED)
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == expected


def test_without_a_recommendation_openais_defaults_hold() -> None:
    sampling = sampling_of(read(CompletionRequest, {"prompt": "a"}), 16, TOKENIZER, SamplingDefaults())
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.repetition_penalty) == (1.0, 1.0, None, 1.0)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (None, SamplingDefaults()),
        ('{"temperature": 0.6, "top_k": 20, "do_sample": true, "eos_token_id": [1]}',
            SamplingDefaults(temperature=0.6, top_k=20)),
        ('{"top_k": 50.0, "top_p": 0}', SamplingDefaults(top_k=50, top_p=0.0)),
    ],
)  # fmt: skip
def test_the_file_is_read_and_its_other_keys_are_not(
    tmp_path: Path, text: str | None, expected: SamplingDefaults
) -> None:
    if text is not None:
        (tmp_path / "generation_config.json").write_text(text)
    found = load_sampling_defaults(tmp_path)
    assert found == expected
    greedy = sampling_of(read(CompletionRequest, {"prompt": "a", "temperature": 1.5}), 16, TOKENIZER, found)
    assert (greedy.temperature == 0.0) is (expected.top_p == 0.0)  # a top_p of 0 takes the likeliest token


def test_keys_that_would_change_answers_are_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    neutral = {"num_beams": 1, "typical_p": 1.0, "no_repeat_ngram_size": 0, "max_length": 4096, "suppress_tokens": None}
    (tmp_path / "generation_config.json").write_text(json.dumps(neutral))
    load_sampling_defaults(tmp_path)
    assert not caplog.messages
    (tmp_path / "generation_config.json").write_text(json.dumps({**neutral, "num_beams": 4, "max_new_tokens": 9}))
    load_sampling_defaults(tmp_path)
    (line,) = caplog.messages
    assert "generation_config.json: not read: num_beams, max_new_tokens; what a request asks for" in line


def test_every_key_of_transformers_generation_is_known() -> None:
    assert keys_not_read(GenerationConfig().to_dict()) == []


@pytest.mark.parametrize(
    "text", ['{"temperature": 3.0}', '{"repetition_penalty": 0.001}', '{"top_p": "high"}', "not json", "[" * 200_000]
)
def test_a_file_no_sampler_can_follow_is_refused_by_name(text: str, tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text(text)
    with pytest.raises(ModelError, match=r"generation_config\.json"):
        load_sampling_defaults(tmp_path)
