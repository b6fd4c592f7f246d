"""Models of other families than Llama for an engine: prompts around their window, tokens of transformers."""

from collections.abc import Mapping
from pathlib import Path

import torch
from transformers import PreTrainedModel

from support.models import tiny_families as tiny
from support.models.tiny_families import longrope, save_reference

WINDOW = 12
NUM_TOKENS = 12
PROMPT_LENGTHS = (1, 9, 40)  # below the window; crossing it while decoding; beyond it
SIZES = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "max_position_embeddings": 256,
    "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip
PART = {**longrope(6), "partial_rotary_factor": 0.75, "original_max_position_embeddings": 8}
FAMILIES: Mapping[str, tuple[str, Mapping[str, object]]] = {
    # No path of a CPU has a softcap of scores: that is shown by the decoder's own tests, and on a GPU.
    "gemma 2": ("gemma2", {**tiny.GEMMA, "attn_logit_softcapping": None, "final_logit_softcapping": 9.0}),
    "gemma 3": ("gemma3", {**tiny.GEMMA, "sliding_window_pattern": 2}),
    "gemma 4": (
        "gemma4",
        {**tiny.GEMMA_4_SMALL, **tiny.GEMMA_4_MOE, "hidden_size_per_layer_input": 6, "sliding_window": WINDOW},
    ),
    "olmo 3": ("olmo3", {"sliding_window": WINDOW}),
    "exaone 4": ("exaone4", {**tiny.EXAONE_4, "sliding_window": WINDOW}),
    "smollm 3": ("smollm3", tiny.SMOLLM),
    "ernie 4.5": ("ernie4_5", tiny.ERNIE),
    "ernie 4.5 moe": ("ernie4_5_moe", tiny.ERNIE_MOE),
    "glm 4": ("glm4", tiny.GLM_4),
    "mellum 2": ("mellum", {**tiny.MELLUM, "sliding_window": WINDOW, "layer_types": tiny.MIXED[:2]}),
    "minimax m2": ("minimax_m2", {**tiny.MINIMAX, "head_dim": 16, "rotary_dim": 8}),
    "granite moe": ("granitemoeshared", {**tiny.GRANITE_SHARED, "embedding_multiplier": 3.0}),
    "bailing": ("bailing_moe_v2", {**tiny.BAILING, "head_dim": 16}),
    "arcee": ("arcee", {}),
    "command r": ("cohere", tiny.COMMAND_R),
    "granite swash": (
        "granitemoe_swa",
        {**tiny.SWASH_MOE, "sliding_window": WINDOW, "layer_types": tiny.MIXED[:2], "layer_rope_theta": [50.0, 0]},
    ),
    "dots": ("dots1", {**tiny.DOTS, "head_dim": 16, "sliding_window": WINDOW, "max_window_layers": 1}),
    "k-exaone": ("exaone_moe", {**tiny.EXAONE_MOE, "head_dim": 16, "sliding_window": WINDOW}),
    "flex olmo": ("flex_olmo", tiny.OLMOE),
    "helium": ("helium", {"head_dim": 16}),
    "olmoe": ("olmoe", tiny.OLMOE),
    "solar open": ("solar_open", {**tiny.GLM, "head_dim": 16}),
    "stablelm": ("stablelm", {"use_qkv_bias": True}),
    "nemotron 4": ("nemotron", {"mlp_bias": True, "attention_bias": True}),
    "jais 2": ("jais2", {}),
    "olmo": ("olmo", {"attention_bias": True}),
    "starcoder 2": ("starcoder2", {"sliding_window": WINDOW}),
    "internlm 2": ("internlm2", {"attention_bias": True}),
    "internlm 3": ("internlm3", {"head_dim": 16}),
    "minicpm": ("minicpm", tiny.MINICPM),
    "minicpm 3": ("minicpm3", tiny.MINICPM_3),
    "phi 2": ("phi", {}),
    "opt": ("opt", tiny.OPT),
    "gpt 2": ("gpt2", tiny.GPT_2),
    "apertus": ("apertus", {**tiny.APERTUS, "head_dim": 16}),
    "gpt bigcode": ("gpt_bigcode", tiny.GPT_2),
    "gpt neox": ("gpt_neox", tiny.NEOX),
    "phi 3.5 moe": ("phimoe", {**tiny.PHI_MOE, "sliding_window": WINDOW, "lm_head_bias": True}),
    "youtu": ("youtu", tiny.YOUTU),
    "cohere 2": ("cohere2", {**tiny.COHERE, "sliding_window": WINDOW}),
    "cohere 2 moe": ("cohere2_moe", {**tiny.COHERE_MOE, "head_dim": 16, "sliding_window": WINDOW}),
    "ministral 3": ("ministral3", tiny.MINISTRAL),
    "nemotron": ("nemotron-nas", tiny.NEMOTRON),
    "seed-oss": ("seed_oss", tiny.SEED),
    "laguna": (
        "laguna",
        {
            **tiny.LAGUNA, "sliding_window": WINDOW, "layer_types": tiny.MIXED[:2],
            "num_attention_heads_per_layer": [6, 4],
        },
    ),
    "mimo v2": (
        "mimo_v2_flash",
        {**tiny.MIMO, "sliding_window": WINDOW, "layer_types": tiny.MIXED[:2], "mlp_layer_types": ["dense", "sparse"]},
    ),
    "step 3.5": (
        "step3p5",
        {
            **tiny.STEP,
            "sliding_window": WINDOW,
            "layer_types": tiny.MIXED[:2],
            "mlp_layer_types": ["dense", "sparse"],
            "swiglu_limits": [0, 0.5],
            "swiglu_limits_shared": [0.7, 0.6],
        },
    ),
    "afmoe": ("afmoe", {**tiny.AFMOE, "sliding_window": WINDOW, "global_attn_every_n_layers": 2}),
    "llama 4": ("llama4_text", {**tiny.LLAMA_4, "moe_layers": [1]}),
    "hunyuan moe": ("hunyuan_v1_moe", {**tiny.HUNYUAN_MOE, "moe_topk": [3, 1]}),
    "hy 3": ("hy_v3", tiny.HY_3),
    "granite": (
        "granite", {"embedding_multiplier": 3.0, "attention_multiplier": 0.3, "residual_multiplier": 0.6}
    ),
    "qwen 3 moe": ("qwen3_moe", {**tiny.QWEN_3_MOE, "mlp_only_layers": [0], "norm_topk_prob": True}),
    "qwen 2 moe": ("qwen2_moe", tiny.QWEN_2_MOE),
    "mixtral": ("mixtral", {**tiny.MIXTRAL, "num_experts_per_tok": 1, "sliding_window": WINDOW}),
    "gpt-oss": (
        "gpt_oss", {"num_local_experts": 5, "num_experts_per_tok": 5, "head_dim": 16, "sliding_window": WINDOW}
    ),
    "glm": ("glm4_moe", {**tiny.GLM, "head_dim": 16, "n_group": 4, "topk_group": 2}),
    "deepseek v3.2": ("deepseek_v32", tiny.DEEPSEEK_V32),
    "glm 5": ("glm_moe_dsa", {**tiny.GLM_5, "indexer_types": ["full", "shared"]}),
    "glm 4 lite": ("glm4_moe_lite", tiny.GLM_LITE),
    "mistral 4": ("mistral4", {**tiny.MISTRAL_4, "q_lora_rank": None}),
    "phi 3, longrope": ("phi3", {"rope_parameters": PART, "original_max_position_embeddings": 8}),
}  # fmt: skip


def saved(folder: Path, family: str, **changes: object) -> PreTrainedModel:
    return save_reference(folder, family, {**SIZES, **changes})


def family_model(folder: Path, family: str) -> PreTrainedModel:
    """Save a model of FAMILIES."""
    name, changes = FAMILIES[family]
    return saved(folder, name, **changes)


def qwen2_with_one_windowed_layer(folder: Path) -> PreTrainedModel:
    return saved(folder, "qwen2", sliding_window=WINDOW, use_sliding_window=True, max_window_layers=1)


def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(0, 97, (n,), generator=generator).tolist() for n in PROMPT_LENGTHS]


def reference_tokens(model: PreTrainedModel) -> list[list[int]]:
    found = []
    for prompt in prompts():
        ids = torch.tensor([prompt])
        output = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=NUM_TOKENS, do_sample=False)
        found.append(output[0, len(prompt) :].tolist())
    return found
