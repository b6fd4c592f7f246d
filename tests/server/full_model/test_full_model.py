"""The whole model's times beside its kernels': both attentions, prefill and decode apart."""

import msgspec
import pytest

from kernels.vocabulary.shape import Phase
from qualification.decision.presets import PRESETS
from qualification.evidence.full_model import Attention, FullModel
from server.full_model.measure import measure_model
from server.settings import DeviceChoice, Settings
from support.models.tiny_llama import TinyLlama


@pytest.fixture(scope="module")
def kept(tiny_llama: TinyLlama, tmp_path_factory: pytest.TempPathFactory) -> list[FullModel]:
    settings = Settings(
        model=str(tiny_llama.folder),
        device=DeviceChoice.CPU,
        max_model_len=256,
        kv_cache_tokens=2048,
        cache_dir=str(tmp_path_factory.mktemp("cache")),
    )
    found: list[FullModel] = []
    measure_model(
        settings, name="tiny", command="hallmark qualify", commit="abc", say=lambda _: None, keep=found.append
    )
    return found


@pytest.fixture
def measured(kept: list[FullModel]) -> FullModel:
    return kept[-1]


def test_plan_times_are_written_before_fallback_times(kept: list[FullModel]) -> None:
    first, last = kept
    assert {it.attention for it in first.timings} == {Attention.PLAN}
    assert last.timings[: len(first.timings)] == first.timings
    assert msgspec.json.decode(msgspec.json.encode(last), type=FullModel) == last


def test_a_prompt_is_timed_by_the_plan_and_by_the_fallback(measured: FullModel) -> None:
    prompts = {it.attention: it for it in measured.timings if (it.phase, it.tokens) == (Phase.PREFILL, 128)}
    assert prompts[Attention.PLAN].paths == ("sdpa.cpu",)
    assert prompts[Attention.FALLBACK].paths == ("sdpa.math",)
    for timing in prompts.values():
        assert timing.n >= 3
        assert timing.attention_ms is not None
        assert 0 < timing.attention_ms < timing.p50_ms


def test_a_whole_preset_can_be_served() -> None:
    whole = {preset.name for preset in PRESETS if preset.is_served}
    assert {"llama-3.1-8b", "qwen3-0.6b"} <= whole
