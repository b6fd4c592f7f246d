"""Vectors of the last token equal those of transformers: alone, batched, in chunks, behind cached pages, mixed."""

from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from qualification.decision.decision import Policy
from server.protocol.messages import FinishReason, Pooling, SamplingParams, Submit, TokenDelta
from server.settings import DeviceChoice, Settings, Task
from support.engine.built_engine import built_engine
from support.models.tiny_qwen3 import NO, YES, make_embedding_model, make_reranker

LIMIT = 1e-4
LENGTHS = (1, 2, 15, 16, 17, 64, 130, 256)
POOLED = SamplingParams(max_tokens=1, temperature=0.0, pooling=Pooling())
LABELS = SamplingParams(max_tokens=1, temperature=0.0, pooling=Pooling((YES, NO)))


class Engine:
    """An engine in this process; `run` computes requests together."""

    def __init__(self, folder: Path, cache: Path, **settings: object) -> None:
        chosen = Settings(
            model=str(folder),
            device=DeviceChoice.CPU,
            on_unproven=Policy.DEGRADE,  # measures nothing
            cache_dir=str(cache),
            max_model_len=256,
            kv_cache_tokens=4096,
            **settings,  # type: ignore[arg-type]
        )
        self._engine = built_engine(chosen).engine

    def run(self, requests: dict[str, tuple[list[int], SamplingParams]]) -> dict[str, list[TokenDelta]]:
        found: dict[str, list[TokenDelta]] = {name: [] for name in requests}
        for name, (prompt, sampling) in requests.items():
            self._engine.submit(Submit(name, prompt, sampling))
        while self._engine.has_work:
            output = self._engine.step()
            for delta in output.deltas if output else ():
                found[delta.request_id].append(delta)
        return found

    def vectors(self, prompts: list[list[int]], sampling: SamplingParams) -> list[NDArray[np.float32]]:
        found = self.run({f"{i}": (prompt, sampling) for i, prompt in enumerate(prompts)})
        vectors = []
        for [delta] in found.values():
            assert (delta.finish_reason, delta.token_ids) == (FinishReason.LENGTH, [])
            assert delta.times is not None
            assert delta.pooled is not None
            vectors.append(np.frombuffer(delta.pooled, "<f4"))
        return vectors


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(0, 256, (length,), generator=generator).tolist() for length in LENGTHS]


def test_embeddings_equal_those_of_transformers(prompts: list[list[int]], tmp_path: Path) -> None:
    model = make_embedding_model(tmp_path / "model")
    with torch.inference_mode():
        expected = [model(torch.tensor([prompt])).last_hidden_state[0, -1].numpy() for prompt in prompts]

    def largest_error(engine: Engine, order: list[int]) -> float:
        found = engine.vectors([prompts[i] for i in order], POOLED)
        return max(float(np.abs(it - expected[i]).max()) for it, i in zip(found, order, strict=True))

    together = Engine(tmp_path / "model", tmp_path / "cache")
    everything = list(range(len(prompts)))
    assert largest_error(together, everything) < LIMIT  # one batch; the longest has all the tokens that are allowed
    assert largest_error(together, everything[::-1]) < LIMIT  # behind cached pages
    for i in everything:
        assert largest_error(together, [i]) < LIMIT
    chunked = Engine(tmp_path / "model", tmp_path / "cache", max_num_batched_tokens=19, prefix_caching=False)
    assert largest_error(chunked, everything) < LIMIT


def test_labels_logits_equal_those_of_transformers_beside_text(prompts: list[list[int]], tmp_path: Path) -> None:
    model = make_reranker(tmp_path / "model")
    engine = Engine(tmp_path / "model", tmp_path / "cache", task=Task.SCORE, max_num_batched_tokens=40)
    with torch.inference_mode():
        expected = [model(torch.tensor([prompt])).logits[0, -1, [YES, NO]].numpy() for prompt in prompts]
    text = SamplingParams(max_tokens=5, temperature=0.0, ignore_eos=True)
    alone = [it.token_ids for it in engine.run({"text": (prompts[4], text)})["text"]]
    mixed = {f"{i}": (prompt, LABELS) for i, prompt in enumerate(prompts)} | {"text": (prompts[4], text)}
    found = engine.run(mixed)
    assert [it.token_ids for it in found["text"]] == alone
    for i, logits in enumerate(expected):
        pooled = found[f"{i}"][-1].pooled
        assert pooled is not None
        assert np.abs(np.frombuffer(pooled, "<f4") - logits).max() < LIMIT


def test_a_label_outside_the_vocabulary_is_refused(tmp_path: Path) -> None:
    make_reranker(tmp_path / "model")
    engine = Engine(tmp_path / "model", tmp_path / "cache")
    wrong = SamplingParams(max_tokens=1, pooling=Pooling((320, 0)))
    [delta] = engine.run({"a": ([1, 2], wrong)})["a"]
    assert (delta.finish_reason, delta.error_code) == (FinishReason.ERROR, "invalid_value")
