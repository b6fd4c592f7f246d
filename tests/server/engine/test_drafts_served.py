"""Drafted tokens by the setting: from its text to answers, counts, metrics of both names, and refusals."""

import random
from pathlib import Path

import pytest

from server.engine.startup.drafting import drafting_of
from server.engine.startup.subject import read_subject
from server.errors import SettingsError
from server.protocol.messages import SamplingParams, StepOutput, Submit
from server.settings import DeviceChoice, Settings, Task
from support.engine.built_engine import built_engine
from support.engine.one_operator import proving
from support.models.tiny_llama import TinyLlama

NGRAM = '{"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 2, "prompt_lookup_max": 4}'


def answers(model: TinyLlama, cache: Path, config: str | None) -> tuple[dict[str, list[int]], list[StepOutput]]:
    """Return the tokens of answers to prompts that repeat themselves, half of them drawn, and all outputs."""
    settings = Settings(
        model=str(model.folder), device=DeviceChoice.CPU, cache_dir=str(cache), kv_cache_tokens=1024, page_size=8,
        max_num_seqs=4, max_num_batched_tokens=64, attestation_interval_s=0.0, speculative_config=config,
    )  # fmt: skip
    engine, rng = built_engine(settings, proving).engine, random.Random(2)
    for index in range(6):
        prompt = [rng.randrange(3, 90) for _ in range(5)] * 4
        heat = 0.0 if index % 2 else 0.8
        sampling = SamplingParams(
            max_tokens=30, temperature=heat, seed=index, ignore_eos=True, logit_bias=((prompt[0], 9.0),)
        )
        engine.submit(Submit(str(index), prompt, sampling))
    outputs: list[StepOutput] = []
    tokens: dict[str, list[int]] = {}
    while engine.has_work:
        output = engine.step()
        assert output is not None
        outputs.append(output)
        for delta in output.deltas:
            tokens.setdefault(delta.request_id, []).extend(delta.token_ids)
    return tokens, outputs


def test_a_setting_drafts_and_changes_no_token(tiny_llama: TinyLlama, tmp_path: Path) -> None:
    plain, without = answers(tiny_llama, tmp_path, None)
    drafted, outputs = answers(tiny_llama, tmp_path, NGRAM)
    assert drafted == plain
    counts = [it.record.drafts for it in outputs if it.record.drafts is not None]
    assert not any(it.record.drafts for it in without)
    assert sum(sum(it.accepted) for it in counts) > 20
    assert all(len(it.drafted) <= 3 and it.accepted[0] <= it.drafted[0] for it in counts)
    assert sum(sum(it.accepted) for it in counts) < sum(sum(it.drafted) for it in counts)
    assert len(outputs) < len(without)
    assert any(it.phase == "verify" for output in outputs for it in output.record.dispatches)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "cannot be read"),
        ('{"method": "ngram"}', "missing required field `num_speculative_tokens`"),
        ('{"method": "eagle", "num_speculative_tokens": 1}', "Invalid enum value 'eagle' - at `$.method`"),
        ('{"method": "mtp", "num_speculative_tokens": 4}', "a model's own head drafts at most 3"),
        ('{"method": "mtp", "num_speculative_tokens": 1, "prompt_lookup_max": 2}', "are of ngram: leave them out"),
        ('{"method": "ngram", "num_speculative_tokens": 5}', "<= 4 - at `$.num_speculative_tokens`"),
        ('{"method": "ngram", "num_speculative_tokens": 2, "model": "x"}', "unknown field `model`"),
        (
            '{"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_min": 6, "prompt_lookup_max": 4}',
            "prompt_lookup_min is 6, it must be at most prompt_lookup_max, 4",
        ),
    ],
)
def test_a_wrong_setting_of_drafts_is_refused(text: str, said: str) -> None:
    with pytest.raises(SettingsError, match=r"^--speculative-config") as caught:
        drafting_of(Settings(speculative_config=text))
    assert said in caught.value.message


@pytest.mark.parametrize("task", [Task.EMBED, Task.SCORE])
def test_a_model_that_generates_nothing_refuses_drafts(tiny_llama: TinyLlama, task: Task) -> None:
    folder = str(tiny_llama.folder)
    settings = Settings(model=folder, device=DeviceChoice.CPU, task=task, speculative_config=NGRAM)
    with pytest.raises(SettingsError, match=f"a model of the task {task.value} drafts nothing; leave it out"):
        read_subject(settings)
