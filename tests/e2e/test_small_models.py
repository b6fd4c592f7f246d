"""Small models start with an empty cache under the default policy, and write what transformers writes.

A start proves every attention shape of its model on this CPU: a right kernel that fails a check refuses the model.
"""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from qualification.decision.decision import Policy, Status
from qualification.model.families.image_models import IMAGE_MODELS
from qualification.model.families.registry import FAMILIES
from server.engine.startup.builder import BuiltEngine, build_engine
from server.protocol.messages import SamplingParams, Submit
from server.settings import DeviceChoice, Settings
from support.models.tiny_families import OLDER, classes_of

pytestmark = pytest.mark.timeout(900)  # one that takes 60 s alone took 325 on a machine with a load of 12
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 24}
RECURRENT = {
    "full_attention_interval": 2,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 12,
    "linear_value_head_dim": 20,
}
QWEN_3_NEXT = {**RECURRENT, "num_experts": 6, "shared_expert_intermediate_size": 24, **EXPERTS}
LATENT: dict[str, object] = {
    "kv_lora_rank": 20,
    "q_lora_rank": 24,
    "qk_rope_head_dim": 6,
    "qk_nope_head_dim": 10,
    "v_head_dim": 14,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    **EXPERTS,
}
INDEXER = {"index_topk": 24, "index_n_heads": 12, "index_head_dim": 16}
MORE: dict[str, dict[str, object]] = {
    "deepseek_v2": {**LATENT, "first_k_dense_replace": 1},
    "deepseek_v3": {**LATENT, "first_k_dense_replace": 1, "n_group": 4, "topk_group": 2},
    "deepseek_v32": {**LATENT, **INDEXER, "first_k_dense_replace": 1, "n_group": 4, "topk_group": 2},
    "glm_moe_dsa": {**LATENT, **INDEXER, "first_k_dense_replace": 1, "indexer_types": ["full", "shared"]},
    "glm4_moe_lite": LATENT,
    "mistral4": LATENT,
    "kimi_linear": {
        **{name: it for name, it in LATENT.items() if name not in ("q_lora_rank", "n_routed_experts")},
        "num_experts": 8,
        "first_k_dense_replace": 0,  # transformers 5.24 saves dense layers under the name of mixtures
        "linear_head_dim": 20,
        "linear_num_heads": 4,
        "layer_types": ["linear_attention", "full_attention"],
    },
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1, "num_experts": 6, **EXPERTS},
    "qwen3_next": QWEN_3_NEXT,
    "qwen3_5_text": RECURRENT,
    "qwen3_5_moe_text": QWEN_3_NEXT,
    "nemotron_h": {
        "layers_block_type": ["linear_attention", "full_attention", "mlp", "moe", "linear_attention", "moe"],
        "num_hidden_layers": 6,
        "n_routed_experts": 6,
        "moe_shared_expert_intermediate_size": 28,
        "moe_latent_size": 16,
        **EXPERTS,
        "n_groups": 2,
        "mamba_num_heads": 4,
        "mamba_head_dim": 20,
        "ssm_state_size": 12,
        "time_step_min": 1e-9,
    },
    "gemma3": {"sliding_window": 64, "layer_types": ["sliding_attention", "full_attention"]},
    "gemma4": {
        "sliding_window": 64,
        "num_hidden_layers": 4,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "global_head_dim": 40,
        "num_kv_shared_layers": 2,
        "hidden_size_per_layer_input": 12,
        "vocab_size_per_layer_input": 101,
        "enable_moe_block": True,
        "num_experts": 6,
        "top_k_experts": 2,
        "moe_intermediate_size": 24,
        "rms_norm_eps": 0.01,  # or the norms of small numbers make roundings large
    },
    "gemma4_unified": {
        "sliding_window": 64,
        "layer_types": ["sliding_attention", "full_attention"],
        "global_head_dim": 512,
        "attention_k_eq_v": True,
        "num_global_key_value_heads": 1,
        "rms_norm_eps": 0.01,
    },
    "gemma2": {"sliding_window": 64, "attn_logit_softcapping": 20.0, "final_logit_softcapping": 30.0},
    "gpt_oss": {"sliding_window": 64, "num_local_experts": 6, "num_experts_per_tok": 2},
    "mixtral": {"num_local_experts": 5, "num_experts_per_tok": 2},
    "qwen2_moe": {"num_experts": 6, "shared_expert_intermediate_size": 28, **EXPERTS},
    "qwen3_moe": {"num_experts": 6, "norm_topk_prob": True, **EXPERTS},
    "glm4_moe": {"n_routed_experts": 12, "first_k_dense_replace": 1, **EXPERTS},
    "phimoe": {"num_local_experts": 5},
    "opt": {**OLDER, "ffn_dim": 88, "init_std": 0.2},
    "apertus": {"dtype": "float32"},
    "gpt2": {**OLDER, "n_inner": 88},
    "gpt_bigcode": {**OLDER, "n_inner": 88},
    "glm": {"eos_token_id": []},  # its class has tokens for None
    "glm4": {"eos_token_id": []},
    "ernie4_5_moe": {"moe_num_experts": 6, "moe_k": 2, "moe_intermediate_size": 24},
    "mellum": {
        "num_experts": 6,
        "sliding_window": 64,
        "layer_types": ["sliding_attention", "full_attention"],
        **EXPERTS,
    },
    "cohere2": {"sliding_window": 64, "sliding_window_pattern": 2, "eos_token_id": [], "pad_token_id": 0},
    "bailing_hybrid": {
        "kv_lora_rank": 24,
        "q_lora_rank": 20,
        "qk_nope_head_dim": 10,
        "qk_rope_head_dim": 8,
        "v_head_dim": 12,
        "head_dim": 16,
        "layer_group_size": 2,
        "num_experts": 16,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 20,
    },
    "bailing_moe_v2": {
        "num_experts": 16,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 20,
        "partial_rotary_factor": 0.5,
    },
    "cohere2_moe": {
        "sliding_window": 64,
        "sliding_window_pattern": 2,
        "eos_token_id": [],
        "pad_token_id": 0,
        "num_experts": 6,
        "num_shared_experts": 2,
        "num_experts_per_tok": 3,
        "expert_selection_fn": "sigmoid",
    },
    "granitemoe": {"num_local_experts": 6, "attention_multiplier": 0.2},
    "bamba": {"attn_layer_indices": [1], "mamba_n_heads": 4, "mamba_d_state": 12, "pad_token_id": 0},
    "falcon_h1": {
        "mamba_d_ssm": 72,
        "mamba_n_heads": 6,
        "mamba_d_state": 12,
        "mamba_n_groups": 2,
        "key_multiplier": 0.5,
        "ssm_multipliers": [0.8, 1.2, 0.9, 1.1, 1.4],
        "mlp_multipliers": [0.7, 0.6],
        "pad_token_id": 0,
    },
    "minicpm": {"scale_emb": 3, "scale_depth": 1.2, "dim_model_base": 12},
    "minicpm3": {
        **{name: it for name, it in LATENT.items() if name.endswith("_dim") or name.endswith("_rank")},
        "scale_emb": 3,
        "scale_depth": 1.2,
        "dim_model_base": 12,
    },
    "granitemoehybrid": {
        "num_local_experts": 6,
        "attention_multiplier": 0.2,
        "shared_intermediate_size": 24,
        "layer_types": ["linear_attention", "full_attention"],
        "mamba_n_heads": 4,
        "mamba_d_state": 12,
    },
    "granitemoeshared": {"num_local_experts": 6, "attention_multiplier": 0.2, "shared_intermediate_size": 24},
    "minimax_m2": {"num_local_experts": 6, "num_experts_per_tok": 2, "rotary_dim": 8},
    "hunyuan_v1_dense": {"rope_scaling": {"type": "dynamic", "alpha": 1000.0, "factor": 1.0}},
    "hunyuan_v1_moe": {"num_experts": 6, "moe_topk": [2, 3], "eod_token_id": None, "sep_token_id": None},
    "laguna": {
        "num_experts": 6,
        "sliding_window": 64,
        "layer_types": ["sliding_attention", "full_attention"],
        **EXPERTS,
    },
    "llama4_text": {
        "num_local_experts": 6,
        "moe_layers": [1],
        "intermediate_size_mlp": 64,
        "floor_scale": 100,
        "no_rope_layer_interval": 2,
        "attention_chunk_size": 128,
    },
    "mimo_v2_flash": {
        "v_head_dim": 14,
        "sliding_window": 64,
        "layer_types": ["sliding_attention", "full_attention"],
        "mlp_layer_types": ["dense", "sparse"],
        "n_routed_experts": 6,
        **EXPERTS,
    },
    "hy_v3": {"num_experts": 6, **EXPERTS},
    "afmoe": {"num_experts": 6, "sliding_window": 64, "global_attn_every_n_layers": 2, "mup_enabled": True, **EXPERTS},
    "step3p5": {
        "pad_token_id": 0,
        "sliding_window": 64,
        "layer_types": ["sliding_attention", "full_attention"],
        "num_sliding_attention_heads": 9,
        "mlp_layer_types": ["dense", "sparse"],
        "n_routed_experts": 6,
        "share_expert_dim": 28,
        "swiglu_limits": [0, 0.5],
        "swiglu_limits_shared": [0.7, 0.6],
        **EXPERTS,
    },
    "nemotron-nas": {
        "num_hidden_layers": 3,
        "block_configs": [
            {"attention": {"no_op": True}, "ffn": {"ffn_mult": 2.0}},
            {"attention": {"n_heads_in_group": 2}, "ffn": {"no_op": True}},
            {"attention": {"n_heads_in_group": 4}, "ffn": {"ffn_mult": 4.0}},
        ],
    },
    "granite_swa": {"sliding_window": 64, "layer_rope_theta": [10_000.0, 0], "attention_multiplier": 0.2},
    "granitemoe_swa": {"num_local_experts": 6, "sliding_window": 64, "attention_multiplier": 0.2},
    "cohere": {"logit_scale": 0.3, "pad_token_id": 0},
    "cwm": {
        "bos_token_id": 0,
        "eos_token_id": [],
        "sliding_window": 64,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "dots1": {"n_routed_experts": 6, "n_shared_experts": 1, "first_k_dense_replace": 1, **EXPERTS},
    "exaone_moe": {"num_experts": 6, "sliding_window": 64, "sliding_window_pattern": 2, "pad_token_id": 0, **EXPERTS},
    "flex_olmo": {"num_experts": 6, "num_experts_per_tok": 2, "pad_token_id": 0},
    "ministral": {"sliding_window": 64, "layer_types": ["sliding_attention", "full_attention"]},
    "olmoe": {"num_experts": 6, "num_experts_per_tok": 2, "pad_token_id": 0},
    "solar_open": {"n_routed_experts": 6, **EXPERTS},
    "starcoder2": {"sliding_window": 64},
    "youtu": {name: it for name, it in LATENT.items() if name.endswith("_dim") or name.endswith("_rank")},
    "smollm3": {"no_rope_layer_interval": 2},
    "olmo3": {"sliding_window": 64, "layer_types": ["sliding_attention", "full_attention"]},
    "exaone4": {"sliding_window": 64, "sliding_window_pattern": 2},
    "granite": {"embedding_multiplier": 3.0, "residual_multiplier": 0.5, "logits_scaling": 2.0},
}
HEAD_DIM_IS_GIVEN = {
    "cwm",
    "helium",
    "ministral",
    "solar_open",
    "llama",
    "mistral",
    "qwen2",
    "qwen3",
    "qwen3_moe",
    "qwen3_next",
    "qwen3_5_text",
    "qwen3_5_moe_text",
    "nemotron_h",
    "gemma2",
    "gemma3",
    "gemma4",
    "gemma4_unified",
    "gpt_oss",
    "glm4_moe",
    "ernie4_5",
    "glm",
    "glm4",
    "mellum",
    "internlm3",
    "minimax_m2",
    "ministral3",
    "seed_oss",
    "hunyuan_v1_dense",
    "hunyuan_v1_moe",
    "hy_v3",
    "laguna",
    "afmoe",
    "bailing_moe_v2",
    "cohere2_moe",
    "gemma",
    "llama4_text",
    "step3p5",
    "mimo_v2_flash",
}
# family, query heads, KV heads, head dim
MODELS = (
    ("llama", 1, 1, 6), ("gpt_oss", 2, 1, 8), ("llama", 3, 3, 10), ("glm4_moe", 4, 2, 16), ("llama", 15, 5, 64),
    ("llama", 9, 3, 64), ("llama", 16, 4, 32), ("granite", 8, 8, 24), ("olmo2", 6, 2, 48), ("llama", 4, 1, 128),
    ("gemma2", 2, 2, 256), ("llama", 2, 1, 320), ("mistral", 8, 2, 20), ("mistral", 4, 4, 80), ("olmo2", 12, 4, 40),
    ("mistral", 2, 1, 192), ("qwen2", 14, 2, 64), ("granite", 2, 2, 128), ("qwen2_moe", 7, 1, 12),
    ("gemma4", 4, 2, 20), ("gemma4_unified", 2, 2, 64),
    ("gemma3", 4, 2, 96), ("gemma3", 16, 16, 14), ("qwen3", 16, 8, 32), ("qwen3", 4, 2, 128), ("mixtral", 1, 1, 64),
    ("qwen3_moe", 6, 3, 22), ("qwen3", 5, 5, 36), ("phi3", 4, 4, 96), ("phi3", 2, 1, 100), ("phi3", 8, 4, 32),
    ("phi3", 3, 1, 160), ("seed_oss", 10, 2, 36), ("smollm3", 4, 1, 40), ("olmo3", 5, 1, 64), ("exaone4", 6, 2, 20),
    ("ernie4_5", 4, 2, 28), ("ernie4_5_moe", 6, 1, 16), ("glm4", 8, 2, 44), ("glm", 4, 2, 28), ("mellum", 4, 4, 24),
    ("minimax_m2", 6, 2, 28), ("ministral3", 4, 2, 36), ("nemotron-nas", 4, 2, 36), ("nemotron_h", 4, 1, 24),
    ("bamba", 4, 2, 28), ("falcon_h1", 6, 2, 20),
    ("internlm2", 4, 2, 28), ("internlm3", 6, 2, 20), ("minicpm", 4, 2, 20), ("minicpm3", 4, 4, 12),
    ("cohere2", 6, 2, 36), ("cohere2_moe", 6, 2, 24), ("granitemoe", 4, 2, 24), ("granitemoehybrid", 4, 2, 24),
    ("granitemoeshared", 6, 3, 20), ("bailing_moe_v2", 4, 2, 24), ("bailing_hybrid", 4, 4, 12),
    ("hunyuan_v1_dense", 4, 1, 36), ("hunyuan_v1_moe", 6, 2, 18), ("hy_v3", 8, 4, 12), ("laguna", 6, 3, 20),
    ("llama4_text", 4, 2, 32), ("step3p5", 6, 3, 20), ("afmoe", 4, 2, 24), ("gemma", 2, 1, 28),
    ("lfm2", 4, 2, 20), ("lfm2_moe", 6, 2, 16), ("deepseek_v2", 4, 4, 12), ("deepseek_v3", 6, 6, 8),
    ("deepseek_v32", 4, 4, 12), ("glm_moe_dsa", 6, 6, 8), ("glm4_moe_lite", 3, 3, 16), ("mistral4", 4, 4, 10),
    ("kimi_linear", 4, 4, 12), ("mimo_v2_flash", 8, 2, 20),
    ("arcee", 6, 2, 20), ("cohere", 6, 2, 28), ("cwm", 4, 2, 24), ("dots1", 4, 2, 36), ("exaone_moe", 6, 2, 20),
    ("flex_olmo", 4, 2, 12), ("helium", 4, 4, 20), ("ministral", 4, 1, 36), ("olmoe", 6, 3, 16),
    ("granite_swa", 4, 2, 28), ("granitemoe_swa", 6, 2, 20), ("solar_open", 8, 2, 12), ("youtu", 4, 4, 12),
    ("stablelm", 4, 2, 40), ("nemotron", 4, 2, 20), ("jais2", 4, 2, 20), ("olmo", 4, 2, 20),
    ("starcoder2", 4, 2, 28), ("phi", 4, 2, 20), ("opt", 4, 4, 20), ("gpt2", 3, 3, 28),
    ("apertus", 4, 2, 28), ("gpt_bigcode", 6, 1, 20), ("gpt_neox", 4, 4, 40), ("phimoe", 4, 2, 28),
    ("qwen3_next", 4, 2, 24), ("qwen3_5_text", 6, 2, 20), ("qwen3_5_moe_text", 4, 1, 32),
)  # fmt: skip
NUM_NEW = 12
LENGTHS = (1, 2, 17, 64, 130, 300)
NEAR_TIE = 1e-3  # of two logits: what roundings of fp32 may turn


def config_of(family: str, num_heads: int, num_kv_heads: int, head_dim: int) -> object:
    hidden_size = num_heads * head_dim
    sizes: dict[str, object] = {"head_dim": head_dim} if family in HEAD_DIM_IS_GIVEN else {}
    tokens = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    more = {**tokens, "num_hidden_layers": 2, **MORE.get(family, {})}
    given: dict[str, object] = {
        "vocab_size": 101,
        "hidden_size": hidden_size,
        "intermediate_size": 2 * hidden_size,
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_kv_heads,
        "max_position_embeddings": 1024,
        "initializer_range": 0.2,
        "tie_word_embeddings": False,
    }
    return classes_of(family)[0](**(given | sizes | more))


def start(folder: Path, cache: Path) -> BuiltEngine:
    settings = Settings(model=str(folder), device=DeviceChoice.CPU, cache_dir=str(cache), max_model_len=512)
    assert settings.on_unproven is Policy.QUALIFY
    return build_engine(settings, frozenset(), lambda *_: None)


def greedy_of(built: BuiltEngine, prompts: list[list[int]]) -> list[list[int]]:
    found: dict[str, list[int]] = {f"{index}": [] for index in range(len(prompts))}
    for name, prompt in zip(found, prompts, strict=True):
        built.engine.submit(Submit(name, prompt, SamplingParams(max_tokens=NUM_NEW, temperature=0.0)))
    while built.engine.has_work:
        output = built.engine.step()
        for delta in output.deltas if output else ():
            found[delta.request_id] += delta.token_ids
    return list(found.values())


def test_every_family_that_is_served_is_among_them() -> None:
    of_text = {family.model_type for family in FAMILIES if family.architectures}  # others are parts of an image model
    # With DeepSeek V3, the second name of Ling 2.0, and MiMo V2 Flash, whose fields the last one has.
    of_one_class = {"kimi_k2", "bailing_moe", "mimo_v2"}
    of_text -= of_one_class
    started = {family.removesuffix("_text") for family, *_ in MODELS}
    assert started == {model_type.removesuffix("_text") for model_type in of_text}
    parts = {family for model in IMAGE_MODELS for family in model.families}
    assert {family.model_type for family in FAMILIES} == of_text | parts | of_one_class


@pytest.mark.starts
@pytest.mark.parametrize(("family", "num_heads", "num_kv_heads", "head_dim"), MODELS)
def test_a_small_model_is_proven_and_right(
    family: str, num_heads: int, num_kv_heads: int, head_dim: int, tmp_path: Path
) -> None:
    torch.manual_seed(num_heads * 1000 + head_dim)
    model = AutoModelForCausalLM.from_config(config_of(family, num_heads, num_kv_heads, head_dim)).float().eval()
    for name, weight in model.named_parameters():
        if name.endswith("router.gate.weight") and not weight.any():  # AFMoE's: all experts would be equally good
            torch.nn.init.normal_(weight, std=0.2)
    model.save_pretrained(tmp_path / "model")
    prompts = [torch.randint(0, 101, (length,)).tolist() for length in LENGTHS]

    built = start(tmp_path / "model", tmp_path / "cache")

    decisions = built.runner.dispatcher.decisions.values()
    assert {decision.status for decision in decisions} == {Status.PROVISIONAL}
    for prompt, tokens in zip(prompts, greedy_of(built, prompts), strict=True):
        assert len(tokens) == NUM_NEW
        with torch.inference_mode():
            logits = model(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
        # Each token is the likeliest after those before it, or as likely as roundings can tell.
        chosen = logits.gather(1, torch.tensor(tokens)[:, None])[:, 0]
        assert (logits.amax(dim=-1) - chosen).max() < NEAR_TIE
