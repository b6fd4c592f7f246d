"""Keys of config.json, changed one at a time: what transformers and the server make of a few of them."""

from dataclasses import replace
from pathlib import Path

import pytest
from config_keys import BASES, FAILURES, MISSING, Case, Comparison, Outcome

from qualification.model.config import ModelConfig
from qualification.model.families.registry import FAMILIES
from server.model.load.load import load_config

LINEAR = {"type": "linear", "factor": 2.0, "mrope_section": [2, 1, 1]}
CASES: list[tuple[tuple[str, ...], object, Outcome]] = [
    (("rms_norm_eps",), 0.1, Outcome.SAME),
    (("rms_norm_eps",), MISSING, Outcome.SAME),
    (("rope_theta",), MISSING, Outcome.SAME),
    (("rope_scaling",), LINEAR, Outcome.SAME),
    (("tie_word_embeddings",), True, Outcome.SAME),
    (("hidden_act",), "swish", Outcome.SAME),
    (("is_causal",), True, Outcome.SAME),
    (("is_causal",), False, Outcome.REFUSED),
    (("is_causal",), None, Outcome.REFUSED),
    (("vocab_size",), 64, Outcome.BOTH_REFUSE),
]


@pytest.fixture(scope="module", params=["mixtral", "qwen2.5 vl, as published"])
def comparison(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Comparison:
    return Comparison(request.param, tmp_path_factory.mktemp("base"))


def test_changed_keys_change_both_or_are_refused(comparison: Comparison) -> None:
    found = {
        case.label: outcome
        for case, outcome in ((Case(comparison.name, path, value), it) for path, value, it in CASES)
        if comparison.run(case)[0] is not outcome
    }
    assert found == {}


# Each was found by changing the keys, as a crash or as other logits.
FOUND = [
    ("llama, llama3", ("rope_scaling", "low_freq_factor"), 8, Outcome.REFUSED),
    ("qwen2, yarn", ("rope_theta",), 1, Outcome.BOTH_REFUSE),
    ("phi3, longrope", ("original_max_position_embeddings",), MISSING, Outcome.SAME),
    ("gemma3", ("rope_scaling",), {"rope_theta": 77.0}, Outcome.REFUSED),
    ("gpt_oss", ("rope_parameters",), {}, Outcome.SAME),
    ("gemma4, as E2B", ("layer_types",), ["sliding_attention", *["full_attention"] * 3], Outcome.BOTH_REFUSE),
    ("deepseek_v3", ("norm_topk_prob",), None, Outcome.SAME),
    ("kimi_linear", ("moe_renormalize",), None, Outcome.SAME),
    ("qwen3_next", ("partial_rotary_factor",), None, Outcome.SAME),
    ("mistral4", ("rope_parameters",), {}, Outcome.LENIENT),
    ("bailing_hybrid", ("rope_parameters", "partial_rotary_factor"), 0, Outcome.REFUSED),
]


@pytest.mark.parametrize(("base", "path", "value", "outcome"), FOUND)
def test_keys_that_once_differed_do_not(
    base: str, path: tuple[str, ...], value: object, outcome: Outcome, tmp_path: Path
) -> None:
    assert Comparison(base, tmp_path).run(Case(base, path, value))[0] is outcome


@pytest.mark.parametrize(
    "base", ["bailing_hybrid", "bailing_moe_v2", "internlm2", "minicpm", "minicpm3", "nemotron-nas", "step3p5"]
)
def test_classes_that_transformers_lacks_are_loaded_from_published_tensors(base: str, tmp_path: Path) -> None:
    assert Comparison(base, tmp_path).run(Case(base, ("rms_norm_eps",), 0.1))[0] is Outcome.SAME


def test_a_key_that_changes_transformers_alone_is_a_failure(tmp_path: Path) -> None:
    def read_without_epsilon(folder: Path) -> ModelConfig:
        return replace(load_config(folder), norm_eps=1e-6)

    blind = Comparison("llama", tmp_path, read_without_epsilon)
    assert blind.run(Case("llama", ("rms_norm_eps",), 1e-6))[0] is Outcome.SAME
    assert blind.run(Case("llama", ("rms_norm_eps",), 0.5))[0] in FAILURES


def test_every_family_has_a_base() -> None:
    bases = {base.family for base in BASES.values()}
    parts = {
        "qwen2_vl_text": "qwen2 vl",
        "qwen2_5_vl_text": "qwen2.5 vl",
        "qwen3_vl_text": "qwen3 vl",
        "qwen3_vl_moe_text": "qwen3 vl, moe",
        "glm4v_moe_text": "glm4v, moe",
        "glm_ocr_text": "glm ocr",
        "paddleocr_vl_text": "paddleocr vl",
        "hunyuan_vl_text": "hunyuan vl",
        "deepseek_ocr2_text": "deepseek ocr 2",
        "ernie4_5_vl_moe_text": "ernie 4.5 vl",
        "llama4_text": "llama4_text",
        "qwen3_5_text": "qwen3.5",
        "qwen3_5_moe_text": "qwen3.5, moe",
        "muse_glimmer_text": "muse glimmer",
        "bailing_moe": "bailing_moe_v2",  # its class
        "kimi_k2": "deepseek_v3",  # its class
        "mimo_v2": "mimo_v2_flash",  # the same fields with other defaults; transformers lacks the class
    }
    served = {parts.get(family.model_type, family.model_type.removesuffix("_text")) for family in FAMILIES}
    assert served <= bases
