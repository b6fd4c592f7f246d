"""The engine on a GPU: the same tokens as transformers on a CPU, on first-choice paths, nothing compiled in service."""

from pathlib import Path

import pytest

from qualification.decision.decision import Policy
from server.engine.startup.builder import BuiltEngine, build_engine
from server.protocol.messages import SamplingParams, StepOutput, Submit
from server.settings import DeviceChoice, DtypeChoice, Settings
from support.engine.graph_session import attention_counts
from support.models.tiny_llama import TinyLlama

pytestmark = pytest.mark.gpu


def build(model: TinyLlama, cache: Path, kv_cache_tokens: int | None) -> BuiltEngine:
    settings = Settings(
        model=str(model.folder),
        device=DeviceChoice.CUDA,
        dtype=DtypeChoice.FP32,  # so that rounding moves no greedy token
        max_model_len=256,
        max_num_seqs=8,
        max_num_batched_tokens=96,
        kv_cache_tokens=kv_cache_tokens,
        page_size=16,
        gpu_memory_utilization=0.3,
        on_unproven=Policy.DEGRADE,
        cache_dir=str(cache),
    )
    return build_engine(settings, frozenset(), lambda *_: None)


def drain(built: BuiltEngine) -> list[StepOutput]:
    outputs = []
    while built.engine.has_work:
        output = built.engine.step()
        assert output is not None
        outputs.append(output)
    return outputs


def submit_all(built: BuiltEngine, model: TinyLlama, **sampling: float) -> None:
    for index, prompt in enumerate(model.prompts):
        params = SamplingParams(max_tokens=20, **{"temperature": 0.0, **sampling})  # type: ignore[arg-type]
        built.engine.submit(Submit(f"r{index}", prompt, params))


def tokens_of(outputs: list[StepOutput], name: str) -> list[int]:
    deltas = [delta for output in outputs for delta in output.deltas if delta.request_id == name]
    return [token for delta in deltas for token in delta.token_ids]


@pytest.mark.parametrize("kv_cache_tokens", [2048, 272])  # 272: too few for all at once, so that some are preempted
def test_greedy_tokens_equal_those_of_transformers(tiny_llama: TinyLlama, tmp_path: Path, kv_cache_tokens: int) -> None:
    built = build(tiny_llama, tmp_path, kv_cache_tokens)
    submit_all(built, tiny_llama)
    outputs = drain(built)
    assert [tokens_of(outputs, f"r{i}") for i in range(len(tiny_llama.prompts))] == tiny_llama.greedy
    assert (sum(output.record.num_preemptions for output in outputs) > 0) == (kv_cache_tokens == 272)


def test_service_compiles_nothing_and_stays_on_triton(tiny_llama: TinyLlama, tmp_path: Path) -> None:
    built = build(tiny_llama, tmp_path, 4096)
    submit_all(built, tiny_llama, temperature=1.0)
    outputs = drain(built)
    assert sum(output.record.num_compiles for output in outputs) == 0
    paths = {count.path for count in attention_counts(*outputs)}
    assert paths == {"triton.prefill", "triton.extend", "triton.decode"}  # fp32: no Gluon


@pytest.mark.timed  # alone: the memory of other tests is not free
def test_the_cache_takes_the_memory_it_may(tiny_llama: TinyLlama, tmp_path: Path) -> None:
    built = build(tiny_llama, tmp_path, None)
    page_bytes = 2 * 2 * 16 * 2 * 16 * 4  # k and v, layers, tokens, heads, head dim, fp32
    assert 1 << 30 < built.ready.num_pages * page_bytes < 100 << 30
