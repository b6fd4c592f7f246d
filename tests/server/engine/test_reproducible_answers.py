"""Under `reproducible` an answer alone has the tokens and the bits of the same answer in any company."""

from collections.abc import Mapping
from pathlib import Path

import pytest

from kernels.vocabulary.shape import Phase
from server.engine.scheduling.engine import Engine
from server.protocol.messages import FinishReason, Grammar, GrammarKind, SamplingParams
from server.settings import DEMO_MODEL, DtypeChoice
from support.engine.reproducible_engine import Request, answers, build, different, requests
from support.models.tiny_families import (
    DEEPSEEK_V3,
    DEEPSEEK_V32,
    GEMMA_2,
    GLM,
    GLM_LITE,
    LFM_2,
    LING_2_6,
    MIMO,
    MIXED,
    NEMOTRON_3_SUPER,
    QWEN_3_NEXT,
    save_reference,
)

DRAFTS = '{"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1, "prompt_lookup_max": 2}'
LENGTHS = (1, 17, 58, 33, 20)  # the answer of one crosses a border of the states' chunks
SIZES = {"num_hidden_layers": 2, "max_position_embeddings": 256, "eos_token_id": None}
MODELS: Mapping[str, tuple[str, DtypeChoice, Mapping[str, object]]] = {
    "llama, tied": ("llama", DtypeChoice.BF16, {"tie_word_embeddings": True}),
    "recurrent layers, gated shared expert": ("qwen3_next", DtypeChoice.FP32, {**QWEN_3_NEXT, "num_hidden_layers": 2}),
    "short convolutions": ("lfm2", DtypeChoice.BF16, LFM_2),
    "state spaces, experts without a gate": ("nemotron_h", DtypeChoice.BF16, NEMOTRON_3_SUPER),
    "mixture with a router of sigmoids": ("glm4_moe", DtypeChoice.BF16, GLM),
    "narrow values, sinks in windows": (
        "mimo_v2_flash",
        DtypeChoice.BF16,
        {**MIMO, "layer_types": MIXED[:2], "mlp_layer_types": ["dense", "sparse"]},
    ),
    "latents, a router of groups": ("deepseek_v3", DtypeChoice.FP32, DEEPSEEK_V3),
    "latents in 16 bits": ("glm4_moe_lite", DtypeChoice.BF16, {**GLM_LITE, "mlp_layer_types": ["dense", "sparse"]}),
    "latents that an indexer chooses": ("deepseek_v32", DtypeChoice.FP32, DEEPSEEK_V32),
    "lightning attention beside latents": ("bailing_hybrid", DtypeChoice.BF16, {**LING_2_6, "layer_group_size": 2}),
    "windows, softcaps, GELU": ("gemma2", DtypeChoice.FP32, GEMMA_2),
    "GELU without a gate, biases of norms and head": ("phi", DtypeChoice.FP32, {}),
}


@pytest.mark.parametrize("model", MODELS)
def test_an_answer_is_the_same_in_any_company(model: str, tmp_path: Path) -> None:
    family, dtype, changes = MODELS[model]
    save_reference(tmp_path, family, {**SIZES, **changes})
    asked = requests(97, LENGTHS)

    def engine(**settings: object) -> Engine:
        return build(tmp_path, tmp_path / "cache", dtype=dtype, **settings).engine

    alone = answers(engine(prefix_caching=False), asked, at_once=1)
    assert len(alone) == len(asked) + 2  # one has three choices
    mixed = engine()
    for seed in (1, 2):  # the second time every prompt is found in pages that prefill and decode have written
        assert different(alone, answers(mixed, asked, at_once=6, seed=seed)) == []
    # Chunks at odd borders, preemptions, and drafted tokens.
    crowded = engine(max_model_len=100, kv_cache_tokens=104, max_num_batched_tokens=13, speculative_config=DRAFTS)
    assert different(alone, answers(crowded, asked, at_once=6, seed=3)) == []


def test_without_the_setting_company_changes_bits(tmp_path: Path) -> None:
    save_reference(tmp_path, "llama", SIZES)
    asked = requests(97, LENGTHS)
    alone, mixed = (
        answers(build(tmp_path, tmp_path / "cache", reproducible=False).engine, asked, at_once=at_once)
        for at_once in (1, 6)
    )
    assert different(alone, mixed) != []


def test_an_order_of_one_path_has_no_second_in_service(tmp_path: Path) -> None:
    save_reference(tmp_path, "llama", SIZES)
    built = build(tmp_path, tmp_path / "cache")
    quarantined = built.runner.dispatcher.quarantine("torch.attention.tiles", Phase.DECODE)
    assert {path for path, _ in quarantined} == {"torch.attention.tiles"}
    requests(97, (9,))[0].submit(built.engine, "a")
    outputs = []
    while built.engine.has_work:
        outputs.append(built.engine.step())
    [end] = [delta for output in outputs if output is not None for delta in output.deltas if delta.finish_reason]
    assert end.finish_reason is FinishReason.ERROR
    assert end.error_message is not None
    assert "torch.attention.tiles is quarantined, and under --reproducible only paths of one order" in end.error_message


def test_a_grammar_in_company_changes_no_bit(tmp_path: Path) -> None:
    digits = Grammar(GrammarKind.REGEX, "[0-9]{3,9}")
    bound = [SamplingParams(max_tokens=6, temperature=heat, seed=4, logprobs=2, grammar=digits) for heat in (0.0, 1.0)]
    asked = [*requests(4096, (9, 30)), *(Request((50, 60, 70), it) for it in bound)]
    engine = build(DEMO_MODEL, tmp_path, max_model_len=128, kv_cache_tokens=1024).engine
    alone = answers(engine, asked, at_once=1)
    assert different(alone, answers(engine, asked, at_once=4, seed=1)) == []
