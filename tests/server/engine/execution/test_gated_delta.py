"""Layers with a state, served by the whole engine, token for token beside transformers (fp32, tiny, odd sizes)."""

import random
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from kernels.recurrence.sizes import CHUNK
from server.engine.proof.shadow_check import ShadowCheck
from server.model.decoder import Decoder
from server.protocol.messages import Fork
from support.engine.graph_session import Session
from support.engine.hybrid_engine import PAGE_SIZE, Hybrid
from support.models.tiny_families import (
    BAMBA,
    FALCON_H1,
    KIMI_LINEAR,
    LFM_2,
    LING_2_6,
    NEMOTRON_3_SUPER,
    QWEN_3_NEXT,
    RECURRENT,
    load,
    save_reference,
)

NUM_TOKENS = 8
MODELS: dict[str, dict[str, object]] = {
    "qwen3_next": QWEN_3_NEXT, "qwen3_5_text": RECURRENT, "lfm2": LFM_2, "nemotron_h": NEMOTRON_3_SUPER,
    "kimi_linear": KIMI_LINEAR, "bailing_hybrid": LING_2_6, "bamba": BAMBA, "falcon_h1": FALCON_H1,
}  # fmt: skip
WORDS = random.Random(5).choices(range(97), k=160)
Answer = Callable[[list[int]], list[int]]


class Model:
    def __init__(self, folder: Path, family: str) -> None:
        no_ends = {"bos_token_id": None, "eos_token_id": None}
        self._reference: PreTrainedModel = save_reference(folder, family, {**MODELS[family], **no_ends})
        self.decoder: Decoder = load(folder)
        self._found: dict[tuple[int, ...], list[int]] = {}

    def answer(self, prompt: list[int]) -> list[int]:
        """Return the greedy tokens of transformers, which keeps a state of its own."""
        if tuple(prompt) not in self._found:
            ids = torch.tensor([prompt])
            mask = torch.ones_like(ids)
            output = self._reference.generate(ids, attention_mask=mask, max_new_tokens=NUM_TOKENS, do_sample=False)
            self._found[tuple(prompt)] = output[0, len(prompt) :].tolist()
        return self._found[tuple(prompt)]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Model]:
    torch.set_num_threads(1)  # for tensors this small threads wait for each other
    return cache(lambda family: Model(tmp_path_factory.mktemp("model"), family))


@pytest.fixture(params=["qwen3_5_text", "lfm2", "nemotron_h", "kimi_linear", "bailing_hybrid", "bamba", "falcon_h1"])
def model(models: Callable[[str], Model], request: pytest.FixtureRequest) -> Model:
    return models(request.param)


class Served(Session):
    """A session that proves after each step that no slot and no page is lost, and at its end that all has returned."""

    def __init__(self, model: Model, **options: int | bool) -> None:
        self.subject = Hybrid(model.decoder, **options)  # type: ignore[arg-type]
        super().__init__(self.subject.engine)

    def step(self) -> None:
        super().step()
        self.subject.scheduler.check_integrity()

    def drain(self) -> "Served":
        super().drain()
        states = self.subject.states
        assert self.subject.pool.num_used == self.subject.scheduler.num_pages_used == 0
        assert not any(tensor[states.num_slots].any() for layer in states.layers for tensor in layer.tensors)
        return self

    def ask(self, name: str, prompt: list[int], num_forks: int = 0) -> None:
        self.submit(name, prompt, max_tokens=NUM_TOKENS, forks=[Fork(f"{name} {i}", None) for i in range(num_forks)])

    def ask_at_random(self, rng: random.Random, prompts: list[list[int]]) -> dict[str, list[int]]:
        """Ask ten times, some forked, some cancelled in the middle of a chunk; prompts of the answers still to come."""
        asked: dict[str, list[int]] = {}
        for index in range(10):
            prompt, num_forks = rng.choice(prompts), rng.choice((0, 0, 2))
            self.ask(str(index), prompt, num_forks)
            asked |= dict.fromkeys((str(index), *(f"{index} {i}" for i in range(num_forks))), prompt)
            for _ in range(rng.randrange(3)):
                self.step()
            if rng.random() < 0.4:
                cancelled = rng.choice(list(asked))
                self.engine.cancel(cancelled)
                del asked[cancelled]
        return asked


@pytest.mark.parametrize("family", MODELS)
def test_answers_alone_and_beside_others_are_transformers(models: Callable[[str], Model], family: str) -> None:
    model = models(family)
    session = Served(model, runs_ahead=True, has_graphs=True)
    prompts = [WORDS[start : start + size] for start, size in ((0, 1), (1, 7), (2, 8), (3, CHUNK - 3), (4, 80))]
    for index, prompt in enumerate(prompts):
        session.ask(f"alone {index}", prompt)
        session.drain()
    for index, prompt in enumerate(prompts):
        session.ask(f"beside {index}", prompt)
    session.drain()
    for index, prompt in enumerate(prompts):
        assert session.tokens(f"alone {index}") == session.tokens(f"beside {index}") == model.answer(prompt)


@pytest.mark.parametrize("step_tokens", [1, 21, CHUNK - 1, CHUNK, CHUNK + 1])
def test_chunks_that_end_anywhere_change_no_token(model: Model, step_tokens: int) -> None:
    session = Served(model, step_tokens=step_tokens, max_num_seqs=1)
    for size in (CHUNK + 2, 2 * CHUNK - 16):
        session.ask(str(size), WORDS[:size])
        session.drain()
        assert session.tokens(str(size)) == model.answer(WORDS[:size])


@pytest.mark.parametrize(
    ("border", "distance"), [*((3 * PAGE_SIZE, it) for it in (-1, 0, 1)), *((CHUNK, it) for it in (-10, -1, 0, 1, 4))]
)
def test_a_hit_near_a_border_restores_the_state(model: Model, border: int, distance: int) -> None:
    """A prompt, another one that parts from it near the border, and the first one again: A, B, A."""
    session, shared = Served(model, runs_ahead=True), WORDS[: border + distance]
    a, b = [*shared, *WORDS[100:112]], [*shared, *WORDS[120:134]]
    hits = []
    for index, prompt in enumerate((a, b, a, b, [*shared, 5])):
        before = session.total("num_prefix_hit_tokens")
        session.ask(str(index), prompt)
        session.drain()
        assert session.tokens(str(index)) == model.answer(prompt)
        hits.append(session.total("num_prefix_hit_tokens") - before)
    last = (len(a) - 1) // PAGE_SIZE * PAGE_SIZE
    assert (hits[0], hits[1], hits[2]) == (0, 0, last)  # the second prompt finds pages without a state
    assert hits[3] > 0


def test_a_shadow_check_names_the_layer_of_the_model(models: Callable[[str], Model]) -> None:
    model = models("qwen3_5_text")
    session, layers = Served(model), set()
    runner = session.subject.runner
    check = runner.shadow = ShadowCheck(runner.dispatcher, budget=1e9, interval_s=0.0, is_quarantining=True)
    session.ask("a", WORDS[:20])
    while session.engine.has_work:
        session.step()
        report = check.judge()
        if report is not None:
            assert report.result == "match"
            layers.add(report.layer)
    assert layers == set(model.decoder.config.attention_layers)
    assert session.tokens("a") == model.answer(WORDS[:20])


def test_preempted_aborted_and_forked_answers_are_transformers(model: Model) -> None:
    rng = random.Random(4)
    prompts = [[*WORDS[:cut], *WORDS[90 : 90 + rest]] for cut, rest in ((11, 3), (40, 1), (60, 9), (70, 0), (33, 6))]
    num_preempted = num_hits = 0
    for runs_ahead, num_slots, num_pages in ((True, 4, 24), (False, 9, 20), (False, 2, 30)):
        session = Served(model, runs_ahead=runs_ahead, num_slots=num_slots, num_pages=num_pages, step_tokens=21)
        asked = session.ask_at_random(rng, prompts)
        session.drain()
        for name, prompt in asked.items():
            assert session.tokens(name) == model.answer(prompt)
        num_preempted += session.total("num_preemptions")
        num_hits += session.total("num_prefix_hit_tokens")
    assert num_preempted > 0
    assert num_hits > 0
