"""Tiny random models of every family, as transformers itself makes and saves them (fp32, CPU)."""

import copy
import json
import re
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import (
    CONFIG_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    AutoModelForCausalLM,
    Mistral4Config,
    Mistral4ForCausalLM,
    PreTrainedModel,
)
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from server.model.decoder import Decoder
from server.model.load.load import load_config, load_decoder
from server.settings import LoadFormat
from support.models import bailing, bailing_hybrid, internlm2, minicpm, nemotron_nas, step3p5

CPU = torch.device("cpu")
TOLERANCE = 1e-4
NUM_TOKENS = 60  # several windows
REGISTERED = (
    bailing,
    bailing_hybrid,
    internlm2,
    minicpm,
    nemotron_nas,
    step3p5,
)  # families of which transformers has no class
AutoModelForCausalLM.register(Mistral4Config, Mistral4ForCausalLM, exist_ok=True)  # its class, but no AutoModel's
ALSO_OF_IMAGES = ("gemma3", "gemma4", "gemma4_unified")  # transformers calls the class of the text another name
TINY = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": None,
    "initializer_range": 0.3,  # wide, so that a wrong weight is a wrong logit
}
SWITCHED_ON = {"use_sliding_window": True, "sliding_window": 9}
MIXED = ["sliding_attention", "full_attention", "sliding_attention"]
YARN = {"rope_type": "yarn", "rope_theta": 10_000.0, "factor": 8.0, "original_max_position_embeddings": 16}
LATENT: dict[str, object] = {
    "num_key_value_heads": 4, "kv_lora_rank": 20, "q_lora_rank": 24, "qk_rope_head_dim": 6, "qk_nope_head_dim": 10,
    "v_head_dim": 14, "moe_intermediate_size": 20, "n_routed_experts": 8, "num_experts_per_tok": 3,
    "n_shared_experts": 1, "first_k_dense_replace": 1,
}  # fmt: skip
LATENT_YARN = {**YARN, "mscale": 0.8, "mscale_all_dim": 0.7}
DEEPSEEK_V3 = {**LATENT, "n_group": 4, "topk_group": 2, "rope_parameters": LATENT_YARN}
KIMI_LINEAR: dict[str, object] = {
    "num_key_value_heads": 4, "kv_lora_rank": 20, "qk_rope_head_dim": 6, "qk_nope_head_dim": 10, "v_head_dim": 14,
    "moe_intermediate_size": 20, "num_experts": 8, "num_experts_per_token": 3, "num_shared_experts": 1,
    "first_k_dense_replace": 1, "num_hidden_layers": 4, "linear_head_dim": 10, "linear_num_heads": 4,
    "layer_types": ["linear_attention", "linear_attention", "full_attention", "linear_attention"],
}  # fmt: skip
# Two layers of lightning attention, then latent attention in the last layer of a group, and behind the last group.
LING_2_6: dict[str, object] = {
    "num_hidden_layers": 4, "layer_group_size": 3, "group_norm_size": 2, "head_dim": 12, "kv_lora_rank": 20,
    "q_lora_rank": 24, "qk_rope_head_dim": 6, "qk_nope_head_dim": 10, "v_head_dim": 14, "moe_intermediate_size": 20,
    "num_experts": 8, "num_experts_per_tok": 3, "n_group": 4, "topk_group": 2, "first_k_dense_replace": 1,
    "routed_scaling_factor": 2.5, "rope_parameters": {"rope_type": "default", "rope_theta": 500.0},
}  # fmt: skip
MINICPM: dict[str, object] = {"scale_emb": 3, "scale_depth": 1.2, "dim_model_base": 12}
MINICPM_3: dict[str, object] = {
    "num_key_value_heads": 4, "kv_lora_rank": 20, "q_lora_rank": 24, "qk_rope_head_dim": 6, "qk_nope_head_dim": 10,
    "v_head_dim": 14, **MINICPM,
}  # fmt: skip
DYNAMIC = {"rope_type": "dynamic", "factor": 6.0, "rope_theta": 500.0}  # plain up to the limit of positions
GLM_LITE = {name: it for name, it in LATENT.items() if name != "first_k_dense_replace"}
# Many heads of an indexer, so that no key has a score of 0; few keys of a query, so that most are left out.
INDEXER: dict[str, object] = {"index_topk": 7, "index_n_heads": 12, "index_head_dim": 16}
DEEPSEEK_V32 = {**DEEPSEEK_V3, **INDEXER}
GLM_5 = {**LATENT, **INDEXER, "n_group": 1, "topk_group": 1, "index_topk_freq": 2}  # the last layer has no indexer
MISTRAL_4 = {**LATENT, "rope_parameters": {**LATENT_YARN, "llama_4_scaling_beta": 0.3}}
GEMMA = {"head_dim": 12, "query_pre_attn_scalar": 7, "sliding_window": 9}
GEMMA_2 = {**GEMMA, "attn_logit_softcapping": 5.0, "final_logit_softcapping": 3.0}
GEMMA_4 = {
    "head_dim": 12,
    "global_head_dim": 24,
    "sliding_window": 9,
    "layer_types": MIXED[:2] + MIXED[:2],
    "num_hidden_layers": 4,
    "hidden_size_per_layer_input": 0,
    "final_logit_softcapping": 3.0,
    "rms_norm_eps": 0.01,  # with 1e-6 the norms make errors of small numbers larger than the tolerance
    "pad_token_id": 0,
}
GEMMA_4_WIDE = {**GEMMA_4, "attention_k_eq_v": True, "num_global_key_value_heads": 1}
GEMMA_4_MOE = {
    **GEMMA_4_WIDE, "enable_moe_block": True, "num_experts": 7, "top_k_experts": 3, "moe_intermediate_size": 20
}  # fmt: skip
GEMMA_4_SMALL = {
    **GEMMA_4, "hidden_size_per_layer_input": 6, "vocab_size_per_layer_input": 101, "num_kv_shared_layers": 2,
}  # fmt: skip
LOCAL = {"rope_type": "default", "rope_theta": 50.0}
TWO_ROPES = {"full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 500.0}, "sliding_attention": LOCAL}
MULTIPLIERS = {
    "embedding_multiplier": 3.0,
    "attention_multiplier": 0.2,
    "residual_multiplier": 0.6,
    "logits_scaling": 2.5,
}
QWEN_MOE = {"num_experts": 7, "num_experts_per_tok": 3, "moe_intermediate_size": 20}
QWEN_2_MOE = {**QWEN_MOE, "shared_expert_intermediate_size": 28}
QWEN_3_MOE = {**QWEN_MOE, "head_dim": 12}
# Odd sizes: 3 value heads read a key head, and no dim is a power of two.
RECURRENT = {
    "head_dim": 12,
    "num_hidden_layers": 5,
    "full_attention_interval": 2,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 12,
    "linear_key_head_dim": 10,
    "linear_value_head_dim": 7,
    "rope_parameters": {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.5},
    "initializer_range": 0.1,
}
# Odd sizes likewise: 3 heads read a group, and each group is normed by itself.
NEMOTRON_H: dict[str, object] = {
    "layers_block_type": ["linear_attention", "mlp", "full_attention", "linear_attention", "mlp"],
    "num_hidden_layers": 5,
    "head_dim": 12,
    "n_groups": 2,
    "mamba_num_heads": 6,
    "mamba_head_dim": 7,
    "ssm_state_size": 10,
    "chunk_size": 16,
    "time_step_min": 1e-9,  # which its class holds steps above in prompts, and not in answers
    "initializer_range": 0.1,
}
# Experts without a gate, and then such as read a latent.
NEMOTRON_3: dict[str, object] = {
    **NEMOTRON_H,
    "layers_block_type": ["linear_attention", "moe", "full_attention", "moe", "mlp"],
    "n_routed_experts": 12,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 20,
    "moe_shared_expert_intermediate_size": 28,
    "n_group": 4,
    "topk_group": 2,
    "routed_scaling_factor": 2.5,
}
NEMOTRON_3_SUPER = {**NEMOTRON_3, "moe_latent_size": 12, "n_group": 1, "topk_group": 1}
BAMBA: dict[str, object] = {
    "attn_layer_indices": [1],
    "head_dim": 12,
    "mamba_n_heads": 8,
    "mamba_d_state": 10,
    "mamba_chunk_size": 16,
    "initializer_range": 0.1,
}
# A head of Mamba2 is wider than one of attention, and no multiplier is 1.
FALCON_H1: dict[str, object] = {
    "head_dim": 12,
    "mamba_d_ssm": 42,
    "mamba_n_heads": 6,
    "mamba_d_state": 10,
    "mamba_n_groups": 2,
    "mamba_chunk_size": 16,
    "attention_in_multiplier": 1.3,
    "attention_out_multiplier": 0.7,
    "key_multiplier": 0.4,
    "ssm_in_multiplier": 1.25,
    "ssm_out_multiplier": 0.6,
    "ssm_multipliers": [0.8, 1.2, 0.9, 1.1, 1.4],
    "mlp_multipliers": [0.7, 0.6],
    "embedding_multiplier": 3.0,
    "lm_head_multiplier": 0.4,
    "initializer_range": 0.1,
}
FALCON_H1_NORMED = {**FALCON_H1, "mamba_rms_norm": True, "mamba_norm_before_gate": False}
RECURRENT_FAMILIES = (
    "bailing_hybrid",
    "bamba",
    "falcon_h1",
    "granitemoehybrid",
    "kimi_linear",
    "nemotron_h",
    "qwen3_next",
    "qwen3_5_text",
    "qwen3_5_moe_text",
)
QWEN_3_NEXT = {**QWEN_MOE, "shared_expert_intermediate_size": 20, **RECURRENT}  # what all visit is one more expert
MIXTRAL = {"num_local_experts": 5, "num_experts_per_tok": 2}
GPT_OSS = {"num_local_experts": 5, "num_experts_per_tok": 3, "head_dim": 12, "sliding_window": 9}
MXFP4 = {"hidden_size": 64, "intermediate_size": 96}
GLM = {"n_routed_experts": 12, "num_experts_per_tok": 3, "moe_intermediate_size": 20, "head_dim": 12}

LFM_2 = {
    "num_hidden_layers": 4,
    "layer_types": ["conv", "conv", "full_attention", "conv"],
    "intermediate_size": 50,
    "block_multiple_of": 6,
    "initializer_range": 0.1,
}
LFM_2_MOE = {
    **{name: it for name, it in LFM_2.items() if name != "block_multiple_of"},
    **QWEN_MOE,
    "num_dense_layers": 1,
}
SMOLLM = {"no_rope_layer_interval": 2, "tie_word_embeddings": False}
OLMO_3 = {"sliding_window": 9, "layer_types": MIXED, "rope_parameters": TWO_ROPES}
EXAONE_4 = {"head_dim": 12, "sliding_window": 9, "sliding_window_pattern": 2}
ERNIE = {"head_dim": 18, "tie_word_embeddings": False}
ERNIE_MOE = {"moe_num_experts": 7, "moe_k": 3, "moe_intermediate_size": 20, "tie_word_embeddings": False}
GLM_4 = {"head_dim": 20, "eos_token_id": [], "pad_token_id": 0}  # its class has tokens for None
MELLUM = {**QWEN_3_MOE, "sliding_window": 9, "layer_types": MIXED, "rope_parameters": TWO_ROPES}
MINIMAX = {"num_local_experts": 7, "num_experts_per_tok": 3, "head_dim": 12, "rotary_dim": 6}
MINISTRAL = {"head_dim": 16, "rope_parameters": {**YARN, "llama_4_scaling_beta": 0.7}}
COHERE = {"sliding_window": 9, "sliding_window_pattern": 2, "logit_scale": 0.3, "pad_token_id": 0}
COMMAND_R = {"logit_scale": 0.3, "pad_token_id": 0}
OLMOE = {"num_experts": 7, "num_experts_per_tok": 3, "intermediate_size": 20}
CWM_TOKENS: dict[str, object] = {"bos_token_id": 0, "eos_token_id": []}  # its class has tokens for None
CWM = {"head_dim": 12, "sliding_window": 9, "layer_types": MIXED}
MINISTRAL_8B = {"head_dim": 12, "sliding_window": 9, "layer_types": MIXED}
DOTS = {**GLM, "n_shared_experts": 2, "first_k_dense_replace": 1}
EXAONE_MOE = {**EXAONE_4, **QWEN_MOE}
YOUTU = {
    name: it for name, it in LATENT.items() if name.endswith("_dim") or name.endswith("_rank") or "key_value" in name
}
BAILING = {
    "head_dim": 12, "moe_intermediate_size": 20, "num_experts": 8, "num_experts_per_tok": 3, "n_group": 4,
    "topk_group": 2, "routed_scaling_factor": 2.5, "partial_rotary_factor": 0.5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 500.0},
}  # fmt: skip
COHERE_MOE = {  # as North Mini Code is, with what Command A+ has beside it
    **COHERE, "head_dim": 12, "intermediate_size": 20, "first_k_dense_replace": 1, "prefix_dense_intermediate_size": 44,
    "num_experts": 7, "num_experts_per_tok": 3, "expert_selection_fn": "sigmoid", "norm_topk_prob": False,
    "num_shared_experts": 2,
}  # fmt: skip
GRANITE_MOE = {**MULTIPLIERS, **MIXTRAL, "intermediate_size": 20}
GRANITE_SHARED = {**GRANITE_MOE, "shared_intermediate_size": 28}
SWASH = {**MULTIPLIERS, "sliding_window": 9, "layer_types": MIXED, "layer_rope_theta": [50.0, 0, 500.0]}
SWASH_MOE = {**SWASH, **GRANITE_SHARED}
GRANITE_HYBRID = {
    **GRANITE_SHARED,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "mamba_n_heads": 8,
    "mamba_d_state": 10,
    "mamba_chunk_size": 16,
    "initializer_range": 0.1,
}
# Layers without a feed-forward, without attention (of another width), and without both, between whole ones.
BLOCKS = [
    {"attention": {"n_heads_in_group": heads, "no_op": heads is None}, "ffn": {"ffn_mult": it, "no_op": it is None}}
    for heads, it in ((2, None), (None, 13.0), (1, 1.0), (None, None), (4, 2.0))
]
NEMOTRON = {"num_hidden_layers": 5, "block_configs": BLOCKS}
SEED = {"head_dim": 18}
ALPHA = {"type": "dynamic", "alpha": 50.0, "factor": 1.0, "rope_theta": 100.0}
HUNYUAN = {"head_dim": 18, "rope_scaling": ALPHA}
HUNYUAN_MOE = {**HUNYUAN, "num_experts": 7, "moe_topk": [3, 1, 7], "intermediate_size": 20}
HY_3 = {**QWEN_MOE, "head_dim": 18}
LLAMA_4 = {
    "head_dim": 12,
    "num_local_experts": 5,
    "intermediate_size_mlp": 28,
    "moe_layers": [0, 2],
    "no_rope_layer_interval": 2,
    "floor_scale": 16,
    "attn_scale": 0.5,
    "attention_chunk_size": 16,
}
MIMO = {
    "head_dim": 20,
    "v_head_dim": 14,
    "num_attention_heads": 8,
    "sliding_window": 9,
    "layer_types": MIXED,
    "mlp_layer_types": ["dense", "sparse", "sparse"],
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 20,
    "rope_parameters": {
        "full_attention": {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.334},
        "sliding_attention": {**LOCAL, "partial_rotary_factor": 0.334},
    },
}
LAGUNA = {
    **QWEN_MOE,
    "head_dim": 12,
    "shared_expert_intermediate_size": 28,
    "moe_routed_scaling_factor": 2.5,
    "sliding_window": 9,
    "layer_types": MIXED,
    "num_attention_heads_per_layer": [6, 4, 8],
    "rope_parameters": {"full_attention": {**YARN, "partial_rotary_factor": 0.5}, "sliding_attention": LOCAL},
}
AFMOE = {
    **QWEN_MOE,
    "head_dim": 12,
    "sliding_window": 9,
    "global_attn_every_n_layers": 3,
    "num_dense_layers": 1,
    "num_shared_experts": 2,
    "route_scale": 2.5,
    "mup_enabled": True,
    "rms_norm_eps": 0.01,  # with 1e-5 the norms make errors of small numbers larger than the tolerance
}
STEP = {
    "head_dim": 12,
    "pad_token_id": 0,
    "sliding_window": 9,
    "layer_types": MIXED,
    "num_sliding_attention_heads": 6,
    "mlp_layer_types": ["dense", "sparse", "sparse"],
    "n_routed_experts": 7,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 20,
    "share_expert_dim": 28,
    "moe_router_scaling_factor": 2.5,
    "initializer_range": 0.2,  # norms of 1.5 to 2.5 make logits and their roundings large with 0.3
    "swiglu_limits": [0, 0.5, None],  # about half of what they bound is beyond them
    "swiglu_limits_shared": [0.7, 0, 0.6],
    "rope_parameters": {"full_attention": {**YARN, "partial_rotary_factor": 0.5}, "sliding_attention": LOCAL},
}


def longrope(num_pairs: int) -> dict[str, object]:
    factors = {
        "short_factor": [1.0 + n / 9 for n in range(num_pairs)],
        "long_factor": [2.0 + n for n in range(num_pairs)],
    }
    return {"rope_type": "longrope", "rope_theta": 500.0, **factors}


WINDOWED: Mapping[str, tuple[str, Mapping[str, object]]] = {
    "qwen2, windows in the later layers": ("qwen2", {**SWITCHED_ON, "max_window_layers": 1}),
    "qwen3, windows by layer types": ("qwen3", {"head_dim": 12, **SWITCHED_ON, "layer_types": MIXED}),
    "mistral, window": ("mistral", {"sliding_window": 9}),
    "mistral, window of one": ("mistral", {"sliding_window": 1}),
    "phi3, window": ("phi3", {"sliding_window": 9}),
    "gemma2": ("gemma2", GEMMA_2),
    "afmoe": ("afmoe", AFMOE),
    "gemma3": ("gemma3", {**GEMMA, "layer_types": MIXED, "rope_parameters": TWO_ROPES}),
    "gemma4, as 31B": ("gemma4", GEMMA_4_WIDE),
    "gpt_oss": ("gpt_oss", GPT_OSS),
    "cohere2, untied": ("cohere2", {**COHERE, "layer_types": MIXED, "tie_word_embeddings": False}),
    "cohere2_moe": ("cohere2_moe", COHERE_MOE),
    "qwen3_moe, window": ("qwen3_moe", {**QWEN_3_MOE, **SWITCHED_ON}),
    "olmo3": ("olmo3", OLMO_3),
    "mellum": ("mellum", MELLUM),
    "laguna": ("laguna", LAGUNA),
    "mimo_v2_flash": ("mimo_v2_flash", MIMO),
    "step3p5": ("step3p5", STEP),
    "exaone4, windows by layer types": ("exaone4", {**EXAONE_4, "layer_types": MIXED}),
    "smollm3, windows where nothing is rotated": ("smollm3", {**SMOLLM, **SWITCHED_ON}),
    "cwm": ("cwm", CWM),
    "granite_swa": ("granite_swa", SWASH),
    "granitemoe_swa": ("granitemoe_swa", SWASH_MOE),
    "ministral": ("ministral", MINISTRAL_8B),
    "starcoder2, a window": ("starcoder2", {"sliding_window": 9, "rope_parameters": {**LOCAL}}),
    "dots1, windows in the later layers": ("dots1", {**DOTS, "sliding_window": 9, "max_window_layers": 1}),
    "exaone_moe, windows by layer types": ("exaone_moe", {**EXAONE_MOE, "layer_types": MIXED}),
    "mixtral, window": ("mixtral", {**MIXTRAL, "sliding_window": 9}),
}
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 500.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}  # fmt: skip
APERTUS: dict[str, object] = {"dtype": "float32"}  # of the numbers of its activation
# Keys of TINY that classes older than Llama's do not read.
OLDER = {"num_key_value_heads": None, "intermediate_size": None}
OPT = {**OLDER, "ffn_dim": 52, "init_std": 0.3}
GPT_2 = {**OLDER, "n_inner": 52}
NEOX = {"num_key_value_heads": None, "hidden_size": 64}
PHI_MOE: dict[str, object] = {"num_local_experts": 7}
BETAS = {"truncate": False, "beta_fast": 8.0, "beta_slow": 2.0}
ROTATED: Mapping[str, tuple[str, Mapping[str, object]]] = {
    "llama, linear": ("llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 1000.0, "factor": 3.0}}),
    "llama, llama3": ("llama", {"rope_parameters": LLAMA3, "head_dim": 16}),
    "llama, yarn": ("llama", {"rope_parameters": YARN, "head_dim": 16}),
    "llama, attention factor": ("llama", {"rope_parameters": {**YARN, "attention_factor": 0.7}, "head_dim": 16}),
    "llama, two scales": ("llama", {"rope_parameters": {**YARN, "mscale": 1.5, "mscale_all_dim": 0.5}, "head_dim": 16}),
    "ministral3": ("ministral3", MINISTRAL),
    "bailing_moe_v2, yarn of half a head": ("bailing_moe_v2", {**BAILING, "rope_parameters": YARN, "head_dim": 24}),
    "llama, no truncation": ("llama", {"rope_parameters": {**YARN, **BETAS}, "head_dim": 16}),
    "smollm3": ("smollm3", {"no_rope_layers": [0, 1, 0]}),
    "gemma4_unified, as 12B": ("gemma4_unified", GEMMA_4_WIDE),
    "cwm, as its class rotates": ("cwm", {"head_dim": 12, "num_hidden_layers": 5, "sliding_window": 9}),
    "youtu, yarn": ("youtu", {**YOUTU, "rope_parameters": LATENT_YARN}),
    "exaone_moe": ("exaone_moe", EXAONE_MOE),
    "exaone4, full layers rotate nothing": ("exaone4", EXAONE_4),
}
VARIANTS: Mapping[str, tuple[str, Mapping[str, object]]] = {
    **WINDOWED,
    **ROTATED,
    "gemma4, as 26B-A4B": ("gemma4", GEMMA_4_MOE),
    "gemma4, as E4B": ("gemma4", GEMMA_4_SMALL),
    "gemma4, as E2B": ("gemma4", {**GEMMA_4_SMALL, "use_double_wide_mlp": True, "num_key_value_heads": 1}),
    "gemma4, all at once": (
        "gemma4",
        {
            **GEMMA_4_SMALL,
            **GEMMA_4_MOE,
            "hidden_size_per_layer_input": 6,
            "use_double_wide_mlp": True,
            "attention_bias": True,
            "hidden_activation": "gelu",
            "num_hidden_layers": 7,
            "num_kv_shared_layers": 1,
            "layer_types": None,
            "tie_word_embeddings": False,
        },
    ),
    "llama": ("llama", {}),
    "llama, tied": ("llama", {"tie_word_embeddings": True}),
    "llama, biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama, one kv head": ("llama", {"num_key_value_heads": 1}),
    "llama, no groups": ("llama", {"num_key_value_heads": 4}),
    "llama, wide heads": ("llama", {"head_dim": 18}),  # 4 * 18 is not the hidden size, and 9 is no power of two
    "qwen2": ("qwen2", {}),
    "qwen2, tied, yarn": ("qwen2", {"tie_word_embeddings": True, "rope_parameters": YARN, "hidden_size": 64}),
    "qwen2, a window that is not switched on": ("qwen2", {"sliding_window": 9, "max_window_layers": 0}),
    "qwen3, wide heads": ("qwen3", {"head_dim": 18}),  # 4 * 18 is not the hidden size, and 9 is no power of two
    "qwen3, tied, biases": ("qwen3", {"head_dim": 8, "tie_word_embeddings": True, "attention_bias": True}),
    "mistral, no window": ("mistral", {"sliding_window": None}),
    "mistral, wide heads": ("mistral", {"sliding_window": None, "head_dim": 18}),
    "phi3": ("phi3", {}),
    "phi3, part of a head": ("phi3", {"rope_parameters": {"rope_theta": 500.0, "partial_rotary_factor": 0.75}}),
    "gemma2, no softcaps": ("gemma2", {**GEMMA_2, "attn_logit_softcapping": None, "final_logit_softcapping": None}),
    "gemma2, gelu, biases": ("gemma2", {**GEMMA_2, "hidden_activation": "gelu", "attention_bias": True}),
    "gemma3, as its class has it": ("gemma3", {**GEMMA, "num_hidden_layers": 7}),
    "olmo2": ("olmo2", {}),
    "olmo2, biases, tied": ("olmo2", {"attention_bias": True, "tie_word_embeddings": True}),
    "granite": ("granite", MULTIPLIERS),
    "granite, biases, tied": ("granite", {**MULTIPLIERS, "mlp_bias": True, "tie_word_embeddings": True}),
    "cohere2": ("cohere2", {**COHERE, "attention_bias": True}),
    "cohere2_moe, LayerNorms, a window in the dense layer": (
        "cohere2_moe",
        {**COHERE_MOE, "rms_norm_eps": None, "prefix_dense_sliding_window_pattern": 2, "norm_topk_prob": True},
    ),
    "cohere2_moe, softmax, a sum": (
        "cohere2_moe",
        {
            **COHERE_MOE,
            "expert_selection_fn": "softmax",
            "shared_expert_combination_strategy": "sum",
            "layer_types": MIXED,
            "mlp_layer_types": ["sparse", "dense", "sparse"],
            "attention_bias": True,
            "tie_word_embeddings": False,
        },
    ),
    "cohere": ("cohere", COMMAND_R),
    "cohere, biases, untied": ("cohere", {**COMMAND_R, "attention_bias": True, "tie_word_embeddings": False}),
    "arcee": ("arcee", {}),
    "arcee, biases, wide heads, tied": (
        "arcee",
        {"attention_bias": True, "mlp_bias": True, "head_dim": 18, "tie_word_embeddings": True},
    ),
    "cwm, biases": ("cwm", {**CWM, "mlp_bias": True, "rope_parameters": LLAMA3}),
    "dots1": ("dots1", DOTS),
    "dots1, groups, biases": (
        "dots1",
        {**DOTS, "n_group": 4, "topk_group": 2, "norm_topk_prob": True, "attention_bias": True},
    ),
    "exaone_moe, dense by its list, two shared": (
        "exaone_moe",
        {
            **EXAONE_MOE,
            "mlp_layer_types": ["sparse", "dense", "sparse"],
            "num_shared_experts": 2,
            "norm_topk_prob": False,
        },
    ),
    "flex_olmo": ("flex_olmo", OLMOE),
    "helium": ("helium", {"head_dim": 8}),
    "helium, biases, tied": (
        "helium",
        {"head_dim": 8, "attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
    ),
    "ministral, a window in every layer": ("ministral", {"sliding_window": 9, "head_dim": 18}),
    "olmoe": ("olmoe", OLMOE),
    "olmoe, biases, weights normed, tied": (
        "olmoe",
        {**OLMOE, "attention_bias": True, "norm_topk_prob": True, "tie_word_embeddings": True},
    ),
    "solar_open": ("solar_open", GLM),
    "solar_open, groups, biases": (
        "solar_open",
        {**GLM, "n_group": 4, "topk_group": 2, "routed_scaling_factor": 2.5, "attention_bias": True},
    ),
    "stablelm": ("stablelm", {}),
    "stablelm, half of each head, biases, tied": (
        "stablelm",
        {
            "use_qkv_bias": True,
            "rope_parameters": {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.5},
            "layer_norm_eps": 0.01,
            "tie_word_embeddings": True,
        },
    ),
    "stablelm, one norm for both parts, yarn": (
        "stablelm",
        {"use_parallel_residual": True, "hidden_size": 64, "rope_parameters": {**YARN, "partial_rotary_factor": 0.75}},
    ),
    "nemotron": ("nemotron", {"num_attention_heads": 2, "head_dim": 12}),
    "nemotron, whole heads, biases, tied": (
        "nemotron",
        {
            "attention_bias": True,
            "mlp_bias": True,
            "rope_parameters": {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 1.0},
            "norm_eps": 0.01,
            "tie_word_embeddings": True,
        },
    ),
    "jais2": ("jais2", {"layer_norm_eps": 0.01}),
    "jais2, wide heads, no biases of products, tied": (
        "jais2",
        {"attention_bias": False, "mlp_bias": False, "head_dim": 18, "tie_word_embeddings": True},
    ),
    "olmo": ("olmo", {}),
    "olmo, biases, wide heads, tied": (
        "olmo",
        {"attention_bias": True, "head_dim": 18, "tie_word_embeddings": True, "rope_parameters": LLAMA3},
    ),
    "starcoder2": ("starcoder2", {"norm_epsilon": 0.01}),
    "starcoder2, no biases, wide heads, erf, untied": (
        "starcoder2",
        {"use_bias": False, "head_dim": 18, "hidden_act": "gelu", "tie_word_embeddings": False},
    ),
    "phi": ("phi", {}),
    "phi, whole heads, wide, erf, tied": (
        "phi",
        {
            "head_dim": 18,
            "hidden_act": "gelu",
            "layer_norm_eps": 0.01,
            "rope_parameters": {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 1.0},
            "tie_word_embeddings": True,
        },
    ),
    "opt": ("opt", {**OPT, "tie_word_embeddings": False}),
    "opt, gelu, no biases, tied": ("opt", {**OPT, "activation_function": "gelu", "enable_bias": False}),
    "gpt2": ("gpt2", {**GPT_2, "tie_word_embeddings": False}),
    "gpt2, gelu, scores that fall, tied": (
        "gpt2",
        {**GPT_2, "n_inner": None, "activation_function": "gelu", "scale_attn_by_inverse_layer_idx": True},
    ),
    "gpt2, scores as they are": ("gpt2", {**GPT_2, "activation_function": "relu", "scale_attn_weights": False}),
    "apertus": ("apertus", APERTUS),
    "apertus, biases, wide heads, plain, tied": (
        "apertus",
        {**APERTUS, "head_dim": 18, "attention_bias": True, "rope_parameters": LOCAL, "tie_word_embeddings": True},
    ),
    "gpt_bigcode": ("gpt_bigcode", {**GPT_2, "tie_word_embeddings": False}),
    "gpt_bigcode, keys of each head, relu, tied": (
        "gpt_bigcode",
        {**GPT_2, "n_inner": None, "multi_query": False, "activation_function": "relu", "scale_attn_weights": False},
    ),
    "gpt_neox": ("gpt_neox", NEOX),
    "gpt_neox, one after the other, half of each head, no biases, tied": (
        "gpt_neox",
        {
            **NEOX,
            "use_parallel_residual": False,
            "hidden_act": "gelu_fast",
            "attention_bias": False,
            "layer_norm_eps": 0.01,
            "rope_parameters": {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.5},
            "tie_word_embeddings": True,
        },
    ),
    "phimoe": ("phimoe", PHI_MOE),
    "phimoe, biases, longrope, a window, a wide jitter": (
        "phimoe",
        {
            **PHI_MOE,
            "attention_bias": True,
            "lm_head_bias": True,
            "sliding_window": 9,
            "router_jitter_noise": 0.2,
            "rope_parameters": {
                **longrope(4),
                "short_mscale": 1.2,
                "long_mscale": 1.2,
                "original_max_position_embeddings": 128,
            },
        },
    ),
    "youtu": ("youtu", YOUTU),
    "youtu, no query latent, an own head": ("youtu", {**YOUTU, "q_lora_rank": None, "tie_word_embeddings": False}),
    "bailing_hybrid": ("bailing_hybrid", LING_2_6),
    "bailing_hybrid, six heads normed as one group, no norms of heads, no query latent, two shared, yarn": (
        "bailing_hybrid",
        {
            **LING_2_6,
            "num_attention_heads": 6,
            "group_norm_size": 1,
            "use_qk_norm": False,
            "q_lora_rank": None,
            "num_shared_experts": 2,
            "rope_parameters": {**YARN, "partial_rotary_factor": 0.5, "mscale": 0.8, "mscale_all_dim": 0.7},
        },
    ),
    "bailing_moe_v2": ("bailing_moe_v2", BAILING),
    "bailing_moe_v2, biases, no norms of heads, two shared, tied": (
        "bailing_moe_v2",
        {
            **BAILING,
            "use_qkv_bias": True,
            "use_bias": True,
            "use_qk_norm": False,
            "num_shared_experts": 2,
            "first_k_dense_replace": 2,
            "partial_rotary_factor": 1.0,
            "tie_word_embeddings": True,
        },
    ),
    "granite_swa, as its class has it, biases, untied": (
        "granite_swa",
        {"num_hidden_layers": 5, "attention_bias": True, "mlp_bias": True, "tie_word_embeddings": False},
    ),
    "granitemoe_swa, nothing shared, yarn": (
        "granitemoe_swa",
        {**SWASH, **GRANITE_MOE, "rope_parameters": YARN, "head_dim": 16},
    ),
    "granitemoe, biases": ("granitemoe", {**GRANITE_MOE, "attention_bias": True}),
    "granitemoehybrid": ("granitemoehybrid", GRANITE_HYBRID),
    "granitemoehybrid, groups, no experts, steps in limits, tied": (
        "granitemoehybrid",
        {
            **GRANITE_HYBRID,
            "mamba_n_groups": 2,
            "num_local_experts": 0,
            "time_step_limit": [0.3, 0.9],
            "tie_word_embeddings": True,
        },
    ),
    "granitemoehybrid, rotated": (
        "granitemoehybrid",
        {**GRANITE_HYBRID, "position_embedding_type": "rope", "layer_types": ["full_attention"] * 3},
    ),
    "granitemoeshared, tied": ("granitemoeshared", {**GRANITE_SHARED, "tie_word_embeddings": True}),
    "granitemoeshared, as wide as the model": ("granitemoeshared", {**GRANITE_SHARED, "intermediate_size": 32}),
    "qwen3_moe": ("qwen3_moe", QWEN_3_MOE),
    "qwen3_moe, one expert, tied": ("qwen3_moe", {**QWEN_3_MOE, "num_experts_per_tok": 1, "tie_word_embeddings": True}),
    "qwen3_moe, all experts": ("qwen3_moe", {**QWEN_3_MOE, "num_experts_per_tok": 7, "norm_topk_prob": True}),
    "qwen3_moe, a dense layer": ("qwen3_moe", {**QWEN_3_MOE, "mlp_only_layers": [1], "norm_topk_prob": True}),
    "qwen3_moe, every other layer": ("qwen3_moe", {**QWEN_3_MOE, "decoder_sparse_step": 2}),
    "qwen2_moe": ("qwen2_moe", QWEN_2_MOE),
    "qwen2_moe, a dense layer": ("qwen2_moe", {**QWEN_2_MOE, "mlp_only_layers": [0], "norm_topk_prob": True}),
    "qwen3_next": ("qwen3_next", QWEN_3_NEXT),
    "lfm2": ("lfm2", LFM_2),
    "lfm2, a wider convolution, biases, an own head": (
        "lfm2",
        {**LFM_2, "conv_L_cache": 4, "conv_bias": True, "tie_word_embeddings": False},
    ),
    "lfm2_moe": ("lfm2_moe", LFM_2_MOE),
    "qwen3_next, a dense layer, biases, tied": (
        "qwen3_next",
        {**QWEN_3_NEXT, "mlp_only_layers": [1], "attention_bias": True, "tie_word_embeddings": True},
    ),
    "qwen3_5": ("qwen3_5_text", RECURRENT),
    "qwen3_5, a wider convolution, two heads a key, tied": (
        "qwen3_5_text",
        {
            **RECURRENT,
            "linear_conv_kernel_dim": 5,
            "linear_num_value_heads": 4,
            "layer_types": ["full_attention", "linear_attention", "linear_attention"],
            "num_hidden_layers": 3,
            "tie_word_embeddings": True,
        },
    ),
    "qwen3_5_moe": ("qwen3_5_moe_text", QWEN_3_NEXT),
    "mixtral": ("mixtral", MIXTRAL),
    "mixtral, all experts": ("mixtral", {**MIXTRAL, "num_experts_per_tok": 5}),
    "gpt_oss, one expert": ("gpt_oss", {**GPT_OSS, "num_experts_per_tok": 1, "swiglu_limit": 0.7}),
    "gpt_oss, no biases of attention": ("gpt_oss", {**GPT_OSS, "attention_bias": False}),
    "glm4_moe": ("glm4_moe", GLM),
    "glm4_moe, groups": ("glm4_moe", {**GLM, "n_group": 4, "topk_group": 2, "routed_scaling_factor": 2.5}),
    "glm4_moe, norms of heads, biases": (
        "glm4_moe",
        {**GLM, "use_qk_norm": True, "attention_bias": True, "norm_topk_prob": False},
    ),
    "deepseek_v3": ("deepseek_v3", DEEPSEEK_V3),
    "deepseek_v3, no query latent, no group, weights not normed": (
        "deepseek_v3",
        {
            **LATENT,
            "q_lora_rank": None,
            "n_group": 1,
            "topk_group": 1,
            "norm_topk_prob": False,
            "tie_word_embeddings": True,
        },
    ),
    "deepseek_v2, no query latent": ("deepseek_v2", {**LATENT, "q_lora_rank": None, "rope_parameters": LATENT_YARN}),
    "deepseek_v2": ("deepseek_v2", {**LATENT, "n_shared_experts": 2, "routed_scaling_factor": 1.5}),
    "glm4_moe_lite": ("glm4_moe_lite", {**GLM_LITE, "mlp_layer_types": ["dense", "sparse", "dense"]}),
    "deepseek_v32": ("deepseek_v32", DEEPSEEK_V32),
    "glm_moe_dsa": ("glm_moe_dsa", GLM_5),
    "glm_moe_dsa, no shared choice, one group": (
        "glm_moe_dsa",
        {**GLM_5, "indexer_types": ["full"] * 3, "index_topk": 20, "mlp_layer_types": ["sparse", "dense", "sparse"]},
    ),
    "mistral4": ("mistral4", MISTRAL_4),
    "glm4_moe, two dense layers": ("glm4_moe", {**GLM, "first_k_dense_replace": 2, "n_shared_experts": 2}),
    "ernie4_5": ("ernie4_5", ERNIE),
    "ernie4_5, biases, tied": ("ernie4_5", {"head_dim": 12, "use_bias": True}),
    "ernie4_5_moe": ("ernie4_5_moe", ERNIE_MOE),
    "ernie4_5_moe, every other layer, no shared experts": (
        "ernie4_5_moe",
        {**ERNIE_MOE, "moe_layer_interval": 2, "moe_num_shared_experts": 0},
    ),
    "glm, no groups": ("glm", {**GLM_4, "num_key_value_heads": 4}),
    "glm4": ("glm4", GLM_4),
    "glm4, no biases, one kv head": ("glm4", {**GLM_4, "attention_bias": False, "num_key_value_heads": 1}),
    "mellum, a dense layer": ("mellum", {**QWEN_3_MOE, "mlp_layer_types": ["sparse", "dense", "sparse"]}),
    "kimi_linear": ("kimi_linear", KIMI_LINEAR),
    "kimi_linear, a query latent, groups, a wider convolution": (
        "kimi_linear",
        {**KIMI_LINEAR, "q_lora_rank": 24, "num_expert_group": 4, "topk_group": 2, "linear_conv_kernel_dim": 5},
    ),
    "minimax_m2": ("minimax_m2", MINIMAX),
    "minimax_m2, one kv head": ("minimax_m2", {**MINIMAX, "num_key_value_heads": 1, "rotary_dim": 12}),
    "ministral3, window, tied": ("ministral3", {**MINISTRAL, "sliding_window": 9, "tie_word_embeddings": True}),
    "bamba": ("bamba", BAMBA),
    "bamba, groups, another share, biases, steps in limits, tied": (
        "bamba",
        {
            **BAMBA,
            "attn_layer_indices": [0, 2],
            "mamba_n_groups": 2,
            "rope_parameters": {
                "rope_type": "linear",
                "factor": 2.0,
                "rope_theta": 500.0,
                "partial_rotary_factor": 0.67,
            },
            "attention_bias": True,
            "mlp_bias": True,
            "time_step_limit": [0.3, 0.9],
            "tie_word_embeddings": True,
        },
    ),
    "falcon_h1": ("falcon_h1", FALCON_H1),
    "falcon_h1, a norm, one group, biases, steps in limits, tied": (
        "falcon_h1",
        {
            **FALCON_H1_NORMED,
            "mamba_n_groups": 1,
            "mamba_d_ssm": None,
            "mamba_n_heads": 8,
            "attention_in_multiplier": 1.0,
            "attention_bias": True,
            "mlp_bias": True,
            "time_step_limit": [0.3, 0.9],
            "tie_word_embeddings": True,
        },
    ),
    "internlm2": ("internlm2", {"rope_parameters": DYNAMIC}),
    "internlm2, biases, one kv head, tied": (
        "internlm2",
        {"attention_bias": True, "num_key_value_heads": 1, "tie_word_embeddings": True},
    ),
    "internlm3": ("internlm3", {"head_dim": 12, "rope_parameters": DYNAMIC}),
    "internlm3, biases, wider heads, tied": (
        "internlm3",
        {"head_dim": 18, "attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
    ),
    "minicpm": ("minicpm", MINICPM),
    "minicpm, longrope, biases, an own head": (
        "minicpm",
        {
            **MINICPM,
            "rope_parameters": longrope(4),
            "attention_bias": True,
            "tie_word_embeddings": False,
        },
    ),
    "minicpm3": ("minicpm3", MINICPM_3),
    "minicpm3, no query latent, longrope, biases, an own head": (
        "minicpm3",
        {
            **MINICPM_3,
            "q_lora_rank": None,
            "rope_parameters": longrope(3),
            "mlp_bias": True,
            "tie_word_embeddings": False,
        },
    ),
    "nemotron_h": ("nemotron_h", NEMOTRON_H),
    "nemotron_h, biases, a wider convolution": ("nemotron_h", {**NEMOTRON_H, "mlp_bias": True, "conv_kernel": 5}),
    "nemotron_h, experts": ("nemotron_h", NEMOTRON_3),
    "nemotron_h, experts of a latent": ("nemotron_h", NEMOTRON_3_SUPER),
    "nemotron_h, as many experts as latents, weights that sum up to anything": (
        "nemotron_h",
        {**NEMOTRON_3_SUPER, "moe_latent_size": 32, "moe_intermediate_size": 32, "norm_topk_prob": False},
    ),
    "nemotron-nas": ("nemotron-nas", NEMOTRON),
    "nemotron-nas, ends without sublayers, tied": (
        "nemotron-nas",
        {
            "block_configs": [BLOCKS[it] for it in (3, 0, 1)],
            "rope_parameters": LLAMA3,
            "attention_bias": True,
            "mlp_bias": True,
            "tie_word_embeddings": True,
        },
    ),
    "seed_oss": ("seed_oss", SEED),
    "seed_oss, other biases": (
        "seed_oss",
        {**SEED, "attention_bias": False, "attention_out_bias": True, "mlp_bias": True},
    ),
    "smollm3, biases": ("smollm3", {**SMOLLM, "attention_bias": True, "mlp_bias": True, "head_dim": 12}),
    "olmo3, as its class has it": ("olmo3", {"sliding_window": 9, "num_hidden_layers": 5, "attention_bias": True}),
    "exaone4, no windows": ("exaone4", {"sliding_window": None, "layer_types": ["full_attention"] * 3, "head_dim": 18}),
    "hunyuan_v1_dense": ("hunyuan_v1_dense", HUNYUAN),
    "hunyuan_v1_dense, biases, tied": (
        "hunyuan_v1_dense",
        {"head_dim": 12, "attention_bias": True, "tie_word_embeddings": True},
    ),
    "hunyuan_v1_moe": ("hunyuan_v1_moe", HUNYUAN_MOE),
    "afmoe, all dense, biases": (
        "afmoe",
        {"head_dim": 18, "num_dense_layers": 3, "attention_bias": True, "layer_types": MIXED, "sliding_window": 9},
    ),
    "gemma": ("gemma", {"head_dim": 12}),
    "hy_v3": ("hy_v3", HY_3),
    "hy_v3, two dense layers": (
        "hy_v3",
        {**HY_3, "mlp_layer_types": ["dense", "sparse", "dense"], "num_shared_experts": 2},
    ),
    "step3p5, bounds in other layers, tied": (
        "step3p5",
        {
            **STEP,
            "swiglu_limits": None,
            "swiglu_limits_shared": [0.7, 0.6, 0],
            "query_pre_attn_scalar": 7,
            "tie_word_embeddings": True,
            "rope_parameters": {"full_attention": LLAMA3, "sliding_attention": {**LOCAL, "partial_rotary_factor": 0.5}},
        },
    ),
    "mimo_v2_flash, values as wide as keys, biases, no factor": (
        "mimo_v2_flash",
        {**MIMO, "v_head_dim": 20, "attention_bias": True, "attention_value_scale": None, "norm_topk_prob": False},
    ),
    "laguna, gates of dimensions, biases": (
        "laguna",
        {**QWEN_MOE, "head_dim": 12, "gating": "per-element", "attention_bias": True},
    ),
    "llama4_text": ("llama4_text", LLAMA_4),
    "llama4_text, no norms of heads, no growth": (
        "llama4_text",
        {
            "head_dim": 12,
            "num_local_experts": 3,
            "use_qk_norm": False,
            "attn_temperature_tuning": False,
            "rope_parameters": LLAMA3,
        },
    ),
    "phi3, no groups, tied": ("phi3", {"num_key_value_heads": 4, "tie_word_embeddings": True}),
}


FILLED = (
    "norm.weight",
    "norm_f.weight",
    ".sinks",
    "bias",
    ".A_log",
    ".D",
    "layernorm_1.weight",
    "layernorm_2.weight",
    "router.scale",
    "per_expert_scale",
    ".alpha_p",
    ".alpha_n",
    "ln_1.weight",
    "ln_2.weight",
    "ln_f.weight",
)


def classes_of(family: str) -> tuple[type, type]:
    """Return the classes of a family's config and of its text model."""
    config_class = CONFIG_MAPPING[f"{family}_text" if family in ALSO_OF_IMAGES else family]
    return config_class, MODEL_FOR_CAUSAL_LM_MAPPING[config_class]


def save_reference(folder: Path, family: str, changes: Mapping[str, object]) -> PreTrainedModel:
    torch.manual_seed(0)
    config_class, model_class = classes_of(family)
    given = copy.deepcopy({**TINY, **changes})  # some classes write into the dictionaries that they are given
    model: PreTrainedModel = model_class(config_class(**given)).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith(FILLED):  # transformers starts them at 1 and 0, which would hide them
                weight.uniform_(0.5, 1.5)
            elif not weight.any():  # a router's, of AFMoE
                weight.normal_(std=0.3)
        for name, buffer in model.named_buffers():
            if name.endswith(("correction_bias", "expert_bias")):
                buffer.uniform_(-0.5, 0.5)
            elif name.endswith("layer_scalar"):
                buffer.uniform_(0.6, 1.1)
    model.save_pretrained(folder)
    if family == "kimi_linear":  # transformers 5.24 names dense feed-forwards as if they were mixtures
        wrong = re.compile(r"\.block_sparse_moe\.(?=(gate|up|down)_proj\.)")
        tensors = load_file(folder / "model.safetensors")
        save_file({wrong.sub(".mlp.", name): it for name, it in tensors.items()}, folder / "model.safetensors")
    return model


def save_mxfp4(folder: Path, changes: Mapping[str, object]) -> PreTrainedModel:
    """A gpt-oss of random bytes, and transformers' model of the numbers that it unpacks from them."""
    model = save_reference(folder, "gpt_oss", {**GPT_OSS, **changes})
    tensors = load_file(folder / "model.safetensors")
    for name in [it for it in tensors if it.endswith(("gate_up_proj", "down_proj"))]:
        num_experts, size_in, size_out = tensors.pop(name).shape
        blocks = torch.randint(256, (num_experts, size_out, size_in // 32, 16), dtype=torch.uint8)
        scales = torch.randint(120, 127, blocks.shape[:-1], dtype=torch.uint8)
        tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        with torch.no_grad():
            model.get_parameter(name).copy_(convert_moe_packed_tensors(blocks, scales, dtype=torch.float32))
    save_file(tensors, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    quantization = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": quantization}))
    return model


def save_anew(folder: Path, family: str, changes: Mapping[str, object]) -> PreTrainedModel:
    """Save a model's tensors as transformers 5 has them, not as its family is published."""
    model = save_reference(folder, family, changes)
    model.save_pretrained(folder, save_original_format=False)
    return model


def load(folder: Path) -> Decoder:
    return load_decoder(folder, load_config(folder), dtype=torch.float32, device=CPU, load_format=LoadFormat.AUTO)


def tolerance(family: str) -> float:
    """Return the most that logits of a family may differ: a recurrence's norm makes much of the roundings of little."""
    return 10 * TOLERANCE if family in RECURRENT_FAMILIES else TOLERANCE


def prompt(num_tokens: int) -> Tensor:
    return torch.randint(97, (num_tokens,), generator=torch.Generator().manual_seed(num_tokens))


@torch.no_grad()
def reference_logits(model: PreTrainedModel, token_ids: Tensor) -> Tensor:
    logits: Tensor = model(token_ids[None]).logits[0]
    return logits


VISION = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
INTERN_VISION = {**VISION, "image_size": [28, 28], "patch_size": [14, 14]}
SECTIONS: dict[str, object] = {"rope_type": "default", "rope_theta": 500.0, "mrope_section": [2, 1, 1]}
QWEN_VISION: dict[str, object] = {
    "depth": 1,
    "hidden_size": 16,
    "num_heads": 2,
    "intermediate_size": 16,
    "out_hidden_size": 32,
    "deepstack_visual_indexes": [0],
    "num_position_embeddings": 16,
}
GLM_VISION: dict[str, object] = {
    "depth": 1,
    "hidden_size": 16,
    "num_heads": 2,
    "intermediate_size": 16,
    "out_hidden_size": 32,
}
IMAGE_MODELS: dict[str, tuple[str, dict[str, object], dict[str, object]]] = {  # model_type, text, vision
    "gemma3": (
        "gemma3",
        {**GEMMA, "layer_types": MIXED, "rope_parameters": TWO_ROPES},
        {**VISION, "image_size": 28, "patch_size": 14},
    ),
    "gemma4": (
        "gemma4",
        {**GEMMA_4_SMALL, "attention_k_eq_v": True},
        {**VISION, "head_dim": 8, "position_embedding_size": 16},
    ),
    "gemma4, unified": ("gemma4_unified", GEMMA_4_WIDE, {"mm_embed_dim": 16}),
    "qwen2 vl": (
        "qwen2_vl",
        {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0, "mrope_section": [2, 1, 1]}},
        {"depth": 1, "embed_dim": 16, "num_heads": 2, "hidden_size": 32},
    ),
    "qwen2.5 vl": (
        "qwen2_5_vl",
        {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0, "mrope_section": [2, 1, 1]}},
        {"depth": 1, "hidden_size": 16, "num_heads": 2, "intermediate_size": 16, "out_hidden_size": 32},
    ),
    "qwen3 vl": ("qwen3_vl", {"head_dim": 12, "rope_parameters": {**SECTIONS, "mrope_interleaved": True}}, QWEN_VISION),
    "qwen3 vl, moe": (
        "qwen3_vl_moe",
        {**QWEN_3_MOE, "rope_parameters": {**SECTIONS, "mrope_interleaved": True}, "mlp_only_layers": [1]},
        QWEN_VISION,
    ),
    "glm4v": (
        "glm4v",
        {"rope_parameters": {**SECTIONS, "partial_rotary_factor": 0.5}, "num_attention_heads": 2},
        GLM_VISION,
    ),
    "glm46v": (
        "glm46v",
        {"model_type": "glm4v_text", "rope_parameters": SECTIONS, "tie_word_embeddings": False},
        {"model_type": "glm4v_vision", **GLM_VISION},
    ),
    "qwen3.5": (
        "qwen3_5",
        {**RECURRENT, "rope_parameters": {**SECTIONS, "partial_rotary_factor": 0.7, "mrope_interleaved": True}},
        QWEN_VISION,
    ),
    "qwen3.5, moe": (
        "qwen3_5_moe",
        {**QWEN_3_NEXT, "rope_parameters": {**SECTIONS, "partial_rotary_factor": 0.7, "mrope_interleaved": True}},
        QWEN_VISION,
    ),
    "glm4v, moe": (
        "glm4v_moe",
        {**GLM, "head_dim": 16, "rope_parameters": {**SECTIONS, "partial_rotary_factor": 0.5}},
        GLM_VISION,
    ),
    "glm ocr": ("glm_ocr", {"head_dim": 12, "rope_parameters": {**SECTIONS, "mrope_section": [3, 2, 1]}}, GLM_VISION),
    "paddleocr vl": (
        "paddleocr_vl",
        {"head_dim": 12, "use_bias": True, "rope_parameters": {**SECTIONS, "mrope_section": [3, 2, 1]}},
        {**VISION, "image_size": 28},
    ),
    "deepseek ocr 2": (
        "deepseek_ocr2",
        {
            "n_routed_experts": 7,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 20,
            "routed_scaling_factor": 1.5,
            "mlp_layer_types": ["dense", "sparse", "sparse"],
            "attention_bias": True,
        },
        {
            "sam_config": {
                "hidden_size": 16,
                "output_channels": 8,
                "num_hidden_layers": 1,
                "num_attention_heads": 2,
                "image_size": 32,
                "patch_size": 8,
                "global_attn_indexes": [0],
                "downsample_channels": [8, 16],
            },
            "encoder_config": {
                "hidden_size": 16,
                "intermediate_size": 16,
                "num_hidden_layers": 1,
                "num_attention_heads": 2,
                "num_key_value_heads": 2,
                "vocab_size": 8,
            },
        },
    ),
    "ernie 4.5 vl": (
        "ernie4_5_vl_moe",
        {**ERNIE_MOE, "moe_intermediate_size": [20, 12], "rope_parameters": {**SECTIONS, "mrope_section": [1, 1, 2]}},
        {"depth": 1, "hidden_size": 16, "num_heads": 2, "intermediate_size": 24, "patch_size": 4},
    ),
    "lfm2 vl": ("lfm2_vl", {"model_type": "lfm2", **LFM_2}, {**VISION, "patch_size": 4, "num_patches": 16}),
    "hunyuan vl": (
        "hunyuan_vl",
        {
            "head_dim": 18,
            "rope_parameters": {"rope_type": "xdrope", "rope_theta": 500.0, **ALPHA, "xdrope_section": [3, 2, 2, 2]},
        },
        {**VISION, "patch_size": 4, "out_hidden_size": 32, "max_image_size": 32},
    ),
    "minicpm-v 4.6": (
        "minicpmv4_6",
        {"model_type": "qwen3_5_text", **RECURRENT},
        {**VISION, "num_hidden_layers": 2, "image_size": 16, "patch_size": 4},
    ),
    "kimi k2.5": (
        "kimi_k25",
        {"model_type": "deepseek_v3", **DEEPSEEK_V3},
        {**VISION, "patch_size": 4, "pos_emb_height": 4, "pos_emb_width": 4},
    ),
    "muse glimmer": (
        "muse_glimmer",
        {
            "head_dim": 12,
            "sliding_window": 9,
            "num_hidden_layers": 5,
            "final_logit_softcapping": 3.0,
            "rms_norm_eps": 0.01,
            "post_norm_eps": 0.02,
            "qk_scale_factor": 1.7,
            "attention_bias": True,
        },
        {**VISION, "patch_size": 4, "pos_emb_height": 4, "pos_emb_width": 4},
    ),
    "llama 4": (
        "llama4",
        LLAMA_4,
        {
            **VISION,
            "image_size": 28,
            "patch_size": 14,
            "vision_output_dim": 16,
            "projector_input_dim": 16,
            "projector_output_dim": 16,
        },
    ),
    "step 3.7": ("step3p7", STEP, {**VISION, "image_size": 28, "patch_size": 14}),
    "mistral 3": (
        "mistral3",
        {"model_type": "mistral", "head_dim": 12, "sliding_window": None},
        {**VISION, "model_type": "pixtral", "image_size": 28, "patch_size": 14, "head_dim": 8},
    ),
    "llava, pixtral": (
        "llava",
        {"model_type": "mistral", "head_dim": 12, "sliding_window": None},
        {**VISION, "model_type": "pixtral", "image_size": 28, "patch_size": 14, "head_dim": 8},
    ),
    "mistral 3, ministral": (
        "mistral3",
        {"model_type": "ministral3", **MINISTRAL},
        {**VISION, "model_type": "pixtral", "image_size": 28, "patch_size": 14, "head_dim": 8},
    ),
    "mistral 3, latents": (
        "mistral3",
        {"model_type": "mistral4", **MISTRAL_4},
        {**VISION, "model_type": "pixtral", "image_size": 28, "patch_size": 14, "head_dim": 8},
    ),
    "internvl, qwen2": ("internvl", {"model_type": "qwen2"}, INTERN_VISION),
    "internvl, qwen3": ("internvl", {"model_type": "qwen3", "head_dim": 12}, INTERN_VISION),
    "internvl, qwen3_moe": ("internvl", {"model_type": "qwen3_moe", **QWEN_3_MOE}, INTERN_VISION),
    "internvl, gpt_oss": ("internvl", {"model_type": "gpt_oss", **GPT_OSS}, INTERN_VISION),
}
# Models of which transformers has no class, in its words for another one: their own model_type, class, key of the text
# part, and names.
IMAGE_MODELS["nemotron 3 omni"] = (
    "nemotron_h_omni",
    {**NEMOTRON_3, "model_type": "nemotron_h"},
    {**VISION, "model_type": "radio", "patch_size": 4, "image_size": 16, "video_temporal_patch_size": 2},
)
WRITTEN_OTHERWISE: dict[str, tuple[str, str, str, Mapping[str, str]]] = {
    "internvl, as opengvlab": (
        "internvl_chat",
        "InternVLChatModel",
        "llm_config",
        {"vision_tower.": "vision_model.", "multi_modal_projector.": "mlp1."},
    ),
    "deepseek ocr": ("deepseek_vl_v2", "DeepseekOCRForCausalLM", "language_config", {}),
    "intern s1": ("interns1", "InternS1ForConditionalGeneration", "text_config", {}),
    "nemotron nano vl": ("NemotronH_Nano_VL_V2", "NemotronH_Nano_VL_V2", "llm_config", {}),
}
IMAGE_MODELS["nemotron nano vl"] = IMAGE_MODELS["nemotron 3 omni"]
IMAGE_MODELS["internvl, as opengvlab"] = IMAGE_MODELS["internvl, qwen3"]
IMAGE_MODELS["deepseek ocr"] = IMAGE_MODELS["deepseek ocr 2"]
IMAGE_MODELS["intern s1"] = IMAGE_MODELS["internvl, qwen3_moe"]
# Names as the published files have them, and as classes that have one model for all parts save them: they then have a
# mixture's experts in tensors that are not served.
_ONLY_PUBLISHED = ("ernie 4.5 vl", "glm4v, moe", "step 3.7", *WRITTEN_OTHERWISE)
IMAGE_CASES = [
    *((kind, True) for kind in IMAGE_MODELS),
    *((kind, False) for kind in IMAGE_MODELS if "_moe" not in kind and kind not in _ONLY_PUBLISHED),
]


def image_model(kind: str) -> tuple[type, type, dict[str, object], dict[str, object]]:
    """Return the classes of a model of IMAGE_MODELS, and what its text and its tower have."""
    model_type, text, vision = IMAGE_MODELS[kind]
    config_class = CONFIG_MAPPING[model_type]
    return config_class, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING[config_class], text, vision


def save_image_model(folder: Path, kind: str, *, as_published: bool, **changes: object) -> PreTrainedModel:
    """A model that also sees images, its tensors named as in the published files, or as transformers saves them."""
    config_class, model_class, text, vision = image_model(kind)
    torch.manual_seed(0)
    text = {**TINY, **text, **changes}
    config = config_class(text_config=text, vision_config=vision, eos_token_id=2, tie_word_embeddings=False)
    model: PreTrainedModel = model_class(config).eval()
    with torch.no_grad():
        for name, bias in (*model.named_parameters(), *model.named_buffers()):
            if name.endswith("correction_bias"):  # which would be zeros
                bias.uniform_(-0.5, 0.5)
    model.save_pretrained(folder, save_original_format=as_published)
    if kind == "kimi k2.5" and as_published:  # transformers 5.24 calls the text's layers blocks, as its tower's
        tensors = load_file(folder / "model.safetensors")
        named = {name.replace("language_model.model.blocks.", "language_model.model.layers."): name for name in tensors}
        save_file({new: tensors[old] for new, old in named.items()}, folder / "model.safetensors")
    if kind in WRITTEN_OTHERWISE:
        _write_otherwise(folder, *WRITTEN_OTHERWISE[kind])
    # The class of all of Llama 4's parts cannot run without an image (transformers 5.24).
    return model.language_model if kind == "llama 4" else model


def _write_otherwise(folder: Path, model_type: str, architecture: str, text: str, renamed: Mapping[str, str]) -> None:
    config = json.loads((folder / "config.json").read_text())
    config |= {"model_type": model_type, "architectures": [architecture], text: config.pop("text_config")}
    (folder / "config.json").write_text(json.dumps(config))
    tensors = load_file(folder / "model.safetensors")
    for old, new in renamed.items():
        tensors = {new + it.removeprefix(old) if it.startswith(old) else it: values for it, values in tensors.items()}
    save_file(tensors, folder / "model.safetensors")


def save_joined(folder: Path, *, as_published: bool, **changes: object) -> PreTrainedModel:
    """A Qwen 3 VL with experts, whose tensors are transposed as in the published files, or as transformers saves."""
    config_class, model_class, text, vision = image_model("qwen3 vl, moe")
    torch.manual_seed(0)
    config = config_class(text_config={**TINY, **text, **changes}, vision_config=vision, tie_word_embeddings=False)
    model: PreTrainedModel = model_class(config).eval()
    model.save_pretrained(folder)
    if as_published:
        tensors = load_file(folder / "model.safetensors")
        experts = {name: it.mT.contiguous() for name, it in tensors.items() if ".mlp.experts." in name}
        save_file(tensors | experts, folder / "model.safetensors")
    return model
