"""The prefix cache under the real engine: the same tokens, computed less."""

from pathlib import Path

import pytest

from server.engine.scheduling.engine import Engine
from server.protocol.messages import RequestTimes, SamplingParams, Submit
from support.engine import llama_engine
from support.engine.graph_session import Session, attention_counts
from support.models.tiny_llama import TinyLlama

PAGE = 16
PROMPT = [(7 * i * i + 3 * i) % 50 + 4 for i in range(150)]


def build(model: TinyLlama, cache: Path, **settings: int) -> Engine:
    sizes = {"max_model_len": 256, "page_size": PAGE, "max_num_batched_tokens": 64}
    return llama_engine.build(model, cache, **{**sizes, **settings}).engine


class Asked(Session):
    def ask(self, name: str, prompt: list[int], num_tokens: int = 12, salt: bytes = b"") -> list[int]:
        """The greedy answer; the engine is idle then, so its pages are counted."""
        sampling = SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True)
        self.engine.submit(Submit(name, prompt, sampling, cache_salt=salt))
        self.outputs.clear()
        return self.drain().tokens(name)

    @property
    def times(self) -> RequestTimes:
        (times,) = [delta.times for output in self.outputs for delta in output.deltas if delta.times is not None]
        return times


@pytest.fixture(scope="module")
def plain(tiny_llama: TinyLlama, tmp_path_factory: pytest.TempPathFactory) -> Asked:
    """Answers without a prefix cache."""
    return Asked(build(tiny_llama, tmp_path_factory.mktemp("plain"), prefix_caching=False))


@pytest.fixture(scope="module")
def cached(tiny_llama: TinyLlama, tmp_path_factory: pytest.TempPathFactory) -> Asked:
    return Asked(build(tiny_llama, tmp_path_factory.mktemp("cached")))


@pytest.mark.parametrize("length", [150, 145, 144, 143, 17])
def test_a_hit_changes_no_token_and_saves_every_full_page(plain: Asked, cached: Asked, length: int) -> None:
    prompt = [length % 50 + 40, *PROMPT[1:length]]
    for _ in range(2):
        wanted = plain.ask("a", prompt)
    assert cached.ask("a", prompt) == wanted
    assert cached.times.num_cached_tokens == plain.times.num_cached_tokens == 0
    assert plain.total("num_prefix_queried_tokens") == 0
    assert cached.ask("b", prompt) == wanted
    num_found = (length - 1) // PAGE * PAGE
    assert cached.times.num_cached_tokens == num_found
    assert (cached.total("num_prefix_queried_tokens"), cached.total("num_prefix_hit_tokens")) == (length, num_found)
    assert {count.phase for count in attention_counts(*cached.outputs)} <= {"extend", "decode"}


def test_a_following_turn_finds_question_and_answer(plain: Asked, cached: Asked) -> None:
    question = [1, *PROMPT[:50]]
    answer = cached.ask("a", question, num_tokens=30)
    following = [*question, *answer, *PROMPT[60:70]]
    assert cached.ask("b", following) == plain.ask("b", following)
    assert cached.times.num_cached_tokens == (51 + 29) // PAGE * PAGE  # the last token of the answer was not computed


def test_another_salt_finds_nothing(cached: Asked) -> None:
    prompt = [2, *PROMPT]
    first = cached.ask("a", prompt, salt=b"one")
    assert cached.ask("b", prompt, salt=b"two") == first
    assert cached.times.num_cached_tokens == 0
    cached.ask("c", prompt, salt=b"one")
    assert cached.times.num_cached_tokens == 144


def test_a_small_cache_forgets_and_answers_the_same(plain: Asked, tiny_llama: TinyLlama, tmp_path: Path) -> None:
    small = Asked(build(tiny_llama, tmp_path, kv_cache_tokens=320))
    prompts = [[first, *PROMPT] for first in range(4, 7)]
    wanted = [plain.ask(str(index), prompt) for index, prompt in enumerate(prompts)]
    for _ in range(2):
        for index, prompt in enumerate(prompts):
            assert small.ask(str(index), prompt) == wanted[index]
            assert small.times.num_cached_tokens == 0  # prompts of 10 pages go through 20
    assert small.ask("again", prompts[-1]) == wanted[-1]
    assert small.times.num_cached_tokens == 144
