"""Two and four processes that compute a model together have the logits of one."""

from pathlib import Path

import pytest
import torch

from support.models.paged_runner import PagedRunner
from support.models.tiny_families import (
    AFMOE,
    BAILING,
    BAMBA,
    COHERE,
    COHERE_MOE,
    COMMAND_R,
    DEEPSEEK_V3,
    DEEPSEEK_V32,
    DOTS,
    EXAONE_4,
    EXAONE_MOE,
    FALCON_H1,
    FALCON_H1_NORMED,
    GEMMA_2,
    GEMMA_4_MOE,
    GEMMA_4_SMALL,
    GLM,
    GLM_5,
    GPT_OSS,
    GRANITE_HYBRID,
    HUNYUAN_MOE,
    KIMI_LINEAR,
    LAGUNA,
    LATENT,
    LFM_2,
    LFM_2_MOE,
    LING_2_6,
    LLAMA_4,
    MIMO,
    MINICPM,
    MINICPM_3,
    MINIMAX,
    MIXTRAL,
    MULTIPLIERS,
    NEMOTRON,
    NEMOTRON_3_SUPER,
    OLMOE,
    QWEN_2_MOE,
    QWEN_3_NEXT,
    RECURRENT,
    SEED,
    STEP,
    SWASH_MOE,
    YOUTU,
    load,
    save_joined,
    save_mxfp4,
    save_reference,
)
from support.ranks.forks import Forks
from support.ranks.rank_program import CHUNKS, WORLDS

WIDE = {"num_attention_heads": 8, "hidden_size": 64}
# Of families that ranks divide as another one, by the same names, the other one stands here.
MODELS: dict[str, tuple[str, dict[str, object]]] = {
    "qwen2-biases": ("qwen2", WIDE),
    "qwen3-tied": ("qwen3", {"head_dim": 12, "tie_word_embeddings": True, "attention_bias": True}),
    "phi3-merged": ("phi3", {"sliding_window": 9}),
    "gemma2": ("gemma2", GEMMA_2),
    "afmoe": ("afmoe", AFMOE),
    "gemma4-26b-a4b": ("gemma4", GEMMA_4_MOE),
    "gemma4-e2b": ("gemma4", {**GEMMA_4_SMALL, "use_double_wide_mlp": True}),
    "granite": ("granite", MULTIPLIERS),
    "qwen2-moe": ("qwen2_moe", {**QWEN_2_MOE, "mlp_only_layers": [1]}),
    "mixtral": ("mixtral", MIXTRAL),
    "gpt-oss": ("gpt_oss", GPT_OSS),
    "glm": ("glm4_moe", {**GLM, "n_group": 4, "topk_group": 2}),
    "deepseek-v3": ("deepseek_v3", DEEPSEEK_V3),
    "deepseek-v3.2": ("deepseek_v32", DEEPSEEK_V32),
    "glm-5": ("glm_moe_dsa", GLM_5),
    "deepseek-v2": ("deepseek_v2", {**LATENT, "q_lora_rank": None}),
    "kimi-linear": ("kimi_linear", KIMI_LINEAR),
    "ling-2.6": ("bailing_hybrid", {**LING_2_6, "group_norm_size": 4}),
    "minimax-m2": ("minimax_m2", MINIMAX),
    "bailing": ("bailing_moe_v2", {**BAILING, "use_qkv_bias": True, "use_bias": True}),
    "arcee": ("arcee", {"mlp_bias": True, "attention_bias": True}),
    "cohere": ("cohere", COMMAND_R),
    "granite-swash": ("granitemoe_swa", SWASH_MOE),
    "dots": ("dots1", DOTS),
    "k-exaone": ("exaone_moe", EXAONE_MOE),
    "flex-olmo": ("flex_olmo", OLMOE),
    "olmoe": ("olmoe", OLMOE),
    "stablelm": ("stablelm", {"use_qkv_bias": True}),
    "stablelm-one-norm": ("stablelm", {"use_parallel_residual": True}),
    "nemotron 4": ("nemotron", {"mlp_bias": True, "attention_bias": True}),
    "jais 2": ("jais2", {}),
    "olmo": ("olmo", {"attention_bias": True}),
    "starcoder2": ("starcoder2", {}),
    "phi2": ("phi", {}),
    "youtu": ("youtu", YOUTU),
    "cohere2": ("cohere2", COHERE),
    "cohere2-moe": ("cohere2_moe", COHERE_MOE),
    "bamba": ("bamba", {**BAMBA, "mamba_n_groups": 4, "mamba_n_heads": 8}),
    "falcon-h1": ("falcon_h1", {**FALCON_H1_NORMED, "mamba_n_groups": 4, "mamba_n_heads": 8, "mamba_d_ssm": 56}),
    "falcon-h1, no norm": ("falcon_h1", {**FALCON_H1, "mamba_n_groups": 4, "mamba_n_heads": 8, "mamba_d_ssm": 56}),
    "minicpm": ("minicpm", {**MINICPM, "attention_bias": True}),
    "minicpm3": ("minicpm3", MINICPM_3),
    "internlm2": ("internlm2", {"attention_bias": True}),
    "granite-hybrid": ("granitemoehybrid", {**GRANITE_HYBRID, "mamba_n_groups": 4}),
    "nemotron": ("nemotron-nas", NEMOTRON),
    "nemotron-3-super": ("nemotron_h", {**NEMOTRON_3_SUPER, "n_groups": 4, "mamba_num_heads": 8}),
    "seed-oss": ("seed_oss", {**SEED, "attention_out_bias": True}),
    "exaone4": ("exaone4", EXAONE_4),
    "laguna": ("laguna", {**LAGUNA, "num_attention_heads_per_layer": [8, 4, 8]}),
    "mimo-v2": ("mimo_v2_flash", MIMO),
    "step-3.5": ("step3p5", {**STEP, "num_sliding_attention_heads": 8}),
    "llama-4": ("llama4_text", LLAMA_4),
    "hunyuan-moe": ("hunyuan_v1_moe", HUNYUAN_MOE),
    "lfm2": ("lfm2", {**LFM_2, "intermediate_size": 72, "block_multiple_of": 8, "conv_bias": True}),
    "lfm2-experts": ("lfm2_moe", {**LFM_2_MOE, "intermediate_size": 72}),
    # Gates of each rank are made by the first product, and, where they are no multiple of 8, by one of their own.
    "qwen3-next": ("qwen3_next", {**QWEN_3_NEXT, "linear_num_value_heads": 16}),
    "qwen3.5-tied": ("qwen3_5_text", {**RECURRENT, "attention_bias": True, "tie_word_embeddings": True}),
    "one-kv-head": ("mistral", {"sliding_window": None, "num_key_value_heads": 1}),
}
# Of two ranks each has keys of its own where of four two share them, and other parts of what they divide unevenly.
ON_TWO = (
    "deepseek-v2", "glm-5", "qwen2-biases", "gemma4-e2b", "gpt-oss", "laguna", "mxfp4", "qwen3-next", "qwen3-vl-moe"
)  # fmt: skip
JOINED = {"qwen3-vl-moe": True, "qwen3-vl-moe-saved-anew": False}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of a folder for each model."""
    folder = tmp_path_factory.mktemp("models")
    for name, (family, changes) in MODELS.items():
        save_reference(folder / name, family, changes)
    save_mxfp4(folder / "mxfp4", {"hidden_size": 64, "intermediate_size": 128})
    for name, as_published in JOINED.items():
        save_joined(folder / name, as_published=as_published)
    return folder


@pytest.mark.first
def test_ranks_together_have_the_logits_of_one(forks: Forks, models: Path) -> None:
    assert forks.run("support.ranks.rank_program", str(models), *ON_TWO) == 0
    token_ids = torch.randint(97, (sum(CHUNKS),), generator=torch.Generator().manual_seed(3))
    runners = {name: PagedRunner(load(models / name)) for name in (*MODELS, *JOINED, "mxfp4")}
    for world, names in zip(WORLDS, (ON_TWO, runners), strict=True):
        together = torch.load(models / f"logits-{world}.pt")
        assert together.keys() == set(names)
        for name in names:
            alone = runners[name].logits(token_ids, CHUNKS)
            assert (together[name] - alone).abs().max() <= 1e-4, name
            assert torch.equal(together[name].argmax(dim=1), alone.argmax(dim=1)), name
