"""Seals of pages under a real engine: what others must not find is dropped at the hit, and computed again."""

from collections.abc import Callable
from random import Random

import pytest
import torch

from server.engine.execution.runner import ModelRunner
from server.engine.scheduling.sequence import Sequence
from server.protocol.messages import SamplingParams, Submit
from support.engine import serving_faults as faults
from support.engine.replayed import PAGE_SIZE, ReplayedEngine, runner_of
from support.models.tiny_llama import TinyLlama

SEED = 5
NUM_PAGES = 6


@pytest.fixture(scope="module")
def runner(tiny_llama: TinyLlama, tmp_path_factory: pytest.TempPathFactory) -> ModelRunner:
    return runner_of(tiny_llama.folder, tmp_path_factory.mktemp("cache"))


def ask(engine: ReplayedEngine, prompt: list[int], salt: bytes = b"") -> tuple[list[int], int, int]:
    """Return the greedy answer, how many tokens were found in pages, and how many pages were dropped."""
    engine.outputs.clear()
    sampling = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
    engine.engine.submit(Submit("a", prompt, sampling, cache_salt=salt))
    engine.serve(0)
    tokens = [token for output in engine.outputs for delta in output.deltas for token in delta.token_ids]
    num_hit = sum(output.record.num_prefix_hit_tokens for output in engine.outputs)
    return tokens, num_hit, sum(output.record.num_page_mismatches for output in engine.outputs)


def test_another_tenants_page_is_dropped(runner: ModelRunner) -> None:
    engine = ReplayedEngine(runner, tap=faults.unsalted)
    prompt = engine.prompt(NUM_PAGES * PAGE_SIZE)
    wanted, _, _ = ask(engine, prompt, b"one")
    assert ask(engine, prompt, b"another") == (wanted, 0, 1)
    assert ask(engine, prompt, b"another")[0] == wanted


@pytest.mark.parametrize("tap", [faults.short_keys, faults.unchained_keys])
def test_a_page_with_a_wrong_name_is_dropped(runner: ModelRunner, tap: Callable[[Sequence], None]) -> None:
    right, rng = ReplayedEngine(runner), Random(SEED)
    pages = [right.prompt(PAGE_SIZE) for _ in range(NUM_PAGES)]
    prompts = [[token for page in rng.sample(pages, NUM_PAGES) for token in page] for _ in range(8)]
    wanted = [ask(right, prompt)[0] for prompt in prompts]
    engine = ReplayedEngine(runner, tap=tap)  # in the same pages, from now on
    answers = [ask(engine, prompt) for prompt in prompts]
    assert [tokens for tokens, _, _ in answers] == wanted
    assert sum(num_dropped for _, _, num_dropped in answers) > 0


def test_a_name_that_outlives_its_page_is_dropped(runner: ModelRunner) -> None:
    engine = ReplayedEngine(runner, num_pages=16)
    prompt = engine.prompt(NUM_PAGES * PAGE_SIZE)
    wanted, _, _ = ask(engine, prompt)
    names = dict(engine.pool.page_of_key)
    for _ in range(4):
        ask(engine, engine.prompt(NUM_PAGES * PAGE_SIZE))  # evicts the pages of the first prompt
    for name, page in names.items():
        engine.pool.forget(page)
        engine.pool.page_of_key[name], engine.pool.key_of_page[page] = page, name
    tokens, num_hit, num_dropped = ask(engine, prompt)
    assert (tokens, num_hit) == (wanted, 0)
    assert num_dropped > 0


def test_changed_bytes_of_a_sealed_page_are_dropped(runner: ModelRunner) -> None:
    engine = ReplayedEngine(runner, sealed_share=1.0)
    words = [tensor.view(torch.int32) for tensor in runner.worker.kv.tensors]
    rng = Random(SEED)
    for _ in range(6):
        prompt = engine.prompt(2 * PAGE_SIZE + 1)
        wanted, _, _ = ask(engine, prompt)
        page = engine.pool.page_of_key[[*engine.pool.page_of_key][-2]]
        words[rng.randrange(len(words))].view(words[0].shape[0], -1)[page, rng.randrange(16)] ^= 1 << rng.randrange(31)
        tokens, num_hit, num = ask(engine, prompt)
        assert (tokens, num) == (wanted, 1)
        assert num_hit < 2 * PAGE_SIZE


def test_right_pages_are_found_and_none_is_dropped(runner: ModelRunner) -> None:
    engine = ReplayedEngine(runner, num_pages=24, sealed_share=1.0)
    for _ in range(4):
        engine.serve(8)
    records = [output.record for output in engine.outputs]
    assert sum(record.num_prefix_hit_tokens for record in records) > 150
    assert sum(record.num_page_mismatches for record in records) == 0
