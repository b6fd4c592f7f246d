"""Attention of well-known models as data, so that a machine can be qualified without their files.

Each holds those keys of the model's public config.json from which its architecture follows.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

from qualification.model.families.quantization_config import CONFIG_KEY
from qualification.model.families.registry import FAMILIES


class Rounding(Enum):
    """Formats of 8 bits that a model of 16 bits is proven in besides its own (docs/quantization.md)."""

    FP8 = "fp8"  # a scale a row of weights and a row of inputs: what `serve --quantization fp8` makes, too
    FP8_STATIC = "fp8-static"  # one scale of all inputs, which the checkpoint has
    FP8_BLOCKS = "fp8-blocks"  # a scale of 128 x 128 numbers of weights, and of 128 of a row of inputs


_ROUNDED: Mapping[Rounding, Mapping[str, object]] = {
    Rounding.FP8: {"quant_method": "fp8", "activation_scheme": "dynamic"},
    Rounding.FP8_STATIC: {"quant_method": "fp8", "activation_scheme": "static"},
    Rounding.FP8_BLOCKS: {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"},
}


_ROUTERS = ["gate", "router"]  # of mixtures, by the last words of their names: they stay in 16 bits


def rounded_config(config: Mapping[str, object], rounding: Rounding) -> Mapping[str, object]:
    """Return a parsed config.json of the same model in 8 bits. Raises ValueError where it is quantised already."""
    if config.get(CONFIG_KEY) is not None:
        raise ValueError(f"--quantization {rounding.value} is for models of 16 bits, and {CONFIG_KEY} is set already")
    return {**config, CONFIG_KEY: {**_ROUNDED[rounding], "modules_to_not_convert": _ROUTERS}}


@dataclass(frozen=True, slots=True)
class Preset:
    name: str  # of the file of evidence
    source: str  # the model on the Hugging Face hub whose config.json it is taken from; "bundled" for our own
    config: Mapping[str, object]
    images: Mapping[str, object] = field(default_factory=dict)  # of a text whose model sees images: what stands beside

    @property
    def whole(self) -> Mapping[str, object]:
        """Return the config.json of the model with its tower, where the text has such."""
        return {**self.images, "text_config": self.config} if self.images else self.config

    @property
    def is_served(self) -> bool:
        """Return whether a server can run the whole model, with random weights."""
        return any(family.model_type == self.config["model_type"] for family in FAMILIES)


def _gemma_4(num_layers: int, **given: object) -> Mapping[str, object]:
    """Return the text part of a Gemma 4, with five layers under a window before each one without."""
    return {
        "model_type": "gemma4_text",
        "architectures": ["Gemma4ForCausalLM"],
        "num_hidden_layers": num_layers,
        "layer_types": ([*["sliding_attention"] * 5, "full_attention"]) * (num_layers // 6),
        "head_dim": 256,
        "global_head_dim": 512,
        "hidden_activation": "gelu_pytorch_tanh",
        "final_logit_softcapping": 30.0,
        "vocab_size": 262144,
        "rms_norm_eps": 1e-06,
        "rope_parameters": {
            "full_attention": {"partial_rotary_factor": 0.25, "rope_theta": 1000000.0, "rope_type": "proportional"},
            "sliding_attention": {"rope_theta": 10000.0, "rope_type": "default"},
        },
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        **given,
    }


_LARGE_TOWER: Mapping[str, object] = {
    "hidden_size": 1152,
    "intermediate_size": 4304,
    "hidden_act": "gelu_pytorch_tanh",
    "patch_size": 16,
}


def _images_of_gemma_4(**given: object) -> Mapping[str, object]:
    vision = {"model_type": "gemma4_vision", "patch_size": 16, "pooling_kernel_size": 3, **given}
    return {"model_type": "gemma4", "architectures": ["Gemma4ForConditionalGeneration"], "vision_config": vision}


_GEMMA_4_LARGE = _images_of_gemma_4(
    hidden_size=1152,
    intermediate_size=4304,
    num_hidden_layers=27,
    num_attention_heads=16,
    num_key_value_heads=16,
    head_dim=72,
    global_head_dim=72,
    standardize=True,
)


def _images_of_qwen(model_type: str, architecture: str, out_size: int, **given: object) -> Mapping[str, object]:
    vision = {
        **_LARGE_TOWER,
        "depth": 27,
        "num_heads": 16,
        "num_position_embeddings": 2304,
        "out_hidden_size": out_size,
    }
    return {"model_type": model_type, "architectures": [architecture], "vision_config": {**vision, **given}}


def _gated_delta(model_type: str, architecture: str, **given: object) -> Mapping[str, object]:
    """Return the text part of a Qwen3-Next or Qwen 3.5, with three layers of a recurrence before each that attends."""
    return {
        "model_type": model_type,
        "architectures": [architecture],
        "head_dim": 256,
        "max_position_embeddings": 262144,
        "partial_rotary_factor": 0.25,
        "rope_theta": 10000000.0,
        "rms_norm_eps": 1e-06,
        "linear_num_key_heads": 16,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4,
        "full_attention_interval": 4,
        "mamba_ssm_dtype": "float32",
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        **given,
    }


def _nemotron_3(pattern: str, **given: object) -> Mapping[str, object]:
    """Return a Nemotron 3 with experts: layers of Mamba2, of attention without positions, and of experts."""
    return {
        "model_type": "nemotron_h",
        "architectures": ["NemotronHForCausalLM"],
        "hybrid_override_pattern": pattern,
        "num_hidden_layers": len(pattern),
        "vocab_size": 131072,
        "num_attention_heads": 32,
        "num_key_value_heads": 2,
        "head_dim": 128,
        "max_position_embeddings": 262144,
        "mamba_head_dim": 64,
        "ssm_state_size": 128,
        "n_groups": 8,
        "conv_kernel": 4,
        "layer_norm_epsilon": 1e-05,
        "mlp_hidden_act": "relu2",
        "n_shared_experts": 1,
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": True,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        **given,
    }


_LLAMA_3_1: Mapping[str, object] = {  # what all sizes have in common
    "model_type": "llama",
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "torch_dtype": "bfloat16",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 128256,
    "rms_norm_eps": 1e-05,
    "rope_theta": 500000.0,
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    "tie_word_embeddings": False,
}
_QWEN_3_MOE: Mapping[str, object] = {
    "model_type": "qwen3_moe",
    "num_key_value_heads": 4,
    "head_dim": 128,
    "max_position_embeddings": 40960,
    "sliding_window": None,
    "use_sliding_window": False,
    "architectures": ["Qwen3MoeForCausalLM"],
    "vocab_size": 151936,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "rope_theta": 1000000.0,
    "torch_dtype": "bfloat16",
}

PRESETS: tuple[Preset, ...] = (
    Preset(
        "demo",
        "bundled",
        {
            "model_type": "llama",
            "hidden_size": 256,
            "num_hidden_layers": 8,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 64,
            "max_position_embeddings": 4096,
            "architectures": ["LlamaForCausalLM"],
            "vocab_size": 4096,
            "intermediate_size": 640,
            "rms_norm_eps": 1e-05,
            "tie_word_embeddings": True,
            "torch_dtype": "bfloat16",
        },
    ),
    Preset(
        "llama-3.1-8b",
        "meta-llama/Llama-3.1-8B",
        {
            **_LLAMA_3_1,
            "hidden_size": 4096,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "intermediate_size": 14336,
        },
    ),
    Preset(
        "llama-3.1-70b",
        "meta-llama/Llama-3.1-70B",
        {
            **_LLAMA_3_1,
            "hidden_size": 8192,
            "num_hidden_layers": 80,
            "num_attention_heads": 64,
            "intermediate_size": 28672,
        },
    ),
    Preset(
        "llama-3.2-1b",
        "meta-llama/Llama-3.2-1B",
        {
            "model_type": "llama",
            "hidden_size": 2048,
            "num_hidden_layers": 16,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "head_dim": 64,
            "max_position_embeddings": 131072,
            "architectures": ["LlamaForCausalLM"],
            "vocab_size": 128256,
            "intermediate_size": 8192,
            "rms_norm_eps": 1e-05,
            "rope_theta": 500000.0,
            "rope_scaling": {
                "rope_type": "llama3",
                "factor": 32.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 8192,
            },
            "tie_word_embeddings": True,
            "torch_dtype": "bfloat16",
        },
    ),
    Preset(
        "qwen3-0.6b",
        "Qwen/Qwen3-0.6B",
        {
            "model_type": "qwen3",
            "hidden_size": 1024,
            "num_hidden_layers": 28,
            "num_attention_heads": 16,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "max_position_embeddings": 40960,
            "max_window_layers": 28,
            "sliding_window": None,
            "use_sliding_window": False,
            "torch_dtype": "bfloat16",
            "architectures": ["Qwen3ForCausalLM"],
            "vocab_size": 151936,
            "intermediate_size": 3072,
            "rms_norm_eps": 1e-06,
            "rope_theta": 1000000,
            "tie_word_embeddings": True,
        },
    ),
    Preset(
        "qwen3-8b",
        "Qwen/Qwen3-8B",
        {
            "model_type": "qwen3",
            "hidden_size": 4096,
            "num_hidden_layers": 36,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "max_position_embeddings": 40960,
            "max_window_layers": 36,
            "sliding_window": None,
            "use_sliding_window": False,
            "architectures": ["Qwen3ForCausalLM"],
            "vocab_size": 151936,
            "intermediate_size": 12288,
            "rope_theta": 1000000,
            "torch_dtype": "bfloat16",
        },
    ),
    Preset(
        "qwen2.5-7b",
        "Qwen/Qwen2.5-7B",
        {
            "model_type": "qwen2",
            "hidden_size": 3584,
            "num_hidden_layers": 28,
            "num_attention_heads": 28,
            "num_key_value_heads": 4,
            "max_position_embeddings": 131072,
            "max_window_layers": 28,
            "sliding_window": 131072,
            "use_sliding_window": False,
            "architectures": ["Qwen2ForCausalLM"],
            "vocab_size": 152064,
            "intermediate_size": 18944,
            "rope_theta": 1000000.0,
            "torch_dtype": "bfloat16",
        },
    ),
    Preset(
        "qwen3-vl-8b",
        "Qwen/Qwen3-VL-8B-Instruct",
        {
            "model_type": "qwen3_vl_text",
            "hidden_size": 4096,
            "num_hidden_layers": 36,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "max_position_embeddings": 262144,
            "vocab_size": 151936,
            "intermediate_size": 12288,
            "rms_norm_eps": 1e-06,
            "rope_theta": 5000000,
            "rope_scaling": {"rope_type": "default", "mrope_section": [24, 20, 20], "mrope_interleaved": True},
            "torch_dtype": "bfloat16",
        },
        _images_of_qwen("qwen3_vl", "Qwen3VLForConditionalGeneration", 4096, deepstack_visual_indexes=[8, 16, 24]),
    ),
    Preset(
        "glm-4.1v-9b",
        "zai-org/GLM-4.1V-9B-Thinking",
        {
            "model_type": "glm4v_text",
            "hidden_size": 4096,
            "num_hidden_layers": 40,
            "num_attention_heads": 32,
            "num_key_value_heads": 2,
            "max_position_embeddings": 65536,
            "vocab_size": 151552,
            "intermediate_size": 13696,
            "rms_norm_eps": 1e-05,
            "rope_theta": 10000.0,
            "partial_rotary_factor": 0.5,
            "rope_scaling": {"rope_type": "default", "mrope_section": [8, 12, 12]},
            "attention_bias": True,
            "torch_dtype": "bfloat16",
        },
        {
            "model_type": "glm4v",
            "architectures": ["Glm4vForConditionalGeneration"],
            "vision_config": {
                "depth": 24,
                "hidden_act": "silu",
                "hidden_size": 1536,
                "image_size": 336,
                "intermediate_size": 13696,
                "num_heads": 12,
                "out_hidden_size": 4096,
                "patch_size": 14,
                "rms_norm_eps": 1e-05,
                "spatial_merge_size": 2,
                "temporal_patch_size": 2,
            },
        },
    ),
    Preset(
        "internvl3.5-8b",
        "OpenGVLab/InternVL3_5-8B-HF",
        {
            "model_type": "qwen3",
            "hidden_size": 4096,
            "num_hidden_layers": 36,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "max_position_embeddings": 40960,
            "max_window_layers": 36,
            "sliding_window": None,
            "use_sliding_window": False,
            "vocab_size": 151936,
            "intermediate_size": 12288,
            "rms_norm_eps": 1e-06,
            "rope_theta": 1000000,
            "torch_dtype": "bfloat16",
        },
        {
            "model_type": "internvl",
            "architectures": ["InternVLForConditionalGeneration"],
            "tie_word_embeddings": False,
            "downsample_ratio": 0.5,
            "vision_config": {
                "attention_bias": True,
                "hidden_act": "gelu",
                "hidden_size": 1024,
                "image_size": [448, 448],
                "intermediate_size": 4096,
                "layer_norm_eps": 1e-06,
                "norm_type": "layer_norm",
                "num_attention_heads": 16,
                "num_hidden_layers": 24,
                "patch_size": [14, 14],
            },
        },
    ),
    Preset(
        "mistral-small-3.1-24b",
        "mistralai/Mistral-Small-3.1-24B-Instruct-2503",
        {
            "model_type": "mistral",
            "hidden_size": 5120,
            "num_hidden_layers": 40,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "max_position_embeddings": 131072,
            "sliding_window": None,
            "vocab_size": 131072,
            "intermediate_size": 32768,
            "rms_norm_eps": 1e-05,
            "rope_theta": 1000000000.0,
            "torch_dtype": "bfloat16",
        },
        {
            "model_type": "mistral3",
            "architectures": ["Mistral3ForConditionalGeneration"],
            "multimodal_projector_bias": False,
            "projector_hidden_act": "gelu",
            "spatial_merge_size": 2,
            "vision_feature_layer": -1,
            "vision_config": {
                "model_type": "pixtral",
                "head_dim": 64,
                "hidden_act": "silu",
                "hidden_size": 1024,
                "image_size": 1540,
                "intermediate_size": 4096,
                "num_attention_heads": 16,
                "num_channels": 3,
                "num_hidden_layers": 24,
                "patch_size": 14,
                "rope_theta": 10000.0,
            },
        },
    ),
    Preset(
        "qwen2.5-vl-7b",
        "Qwen/Qwen2.5-VL-7B-Instruct",
        {
            "model_type": "qwen2_5_vl",
            "hidden_size": 3584,
            "num_hidden_layers": 28,
            "num_attention_heads": 28,
            "num_key_value_heads": 4,
            "max_position_embeddings": 128000,
            "max_window_layers": 28,
            "sliding_window": 32768,
            "use_sliding_window": False,
            # Position triples of images turn queries and keys; attention stays causal in the order of tokens.
            "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]},
            "architectures": ["Qwen2_5_VLForConditionalGeneration"],
            "vocab_size": 152064,
            "intermediate_size": 18944,
            "torch_dtype": "bfloat16",
            "image_token_id": 151655,
            "vision_config": {
                "depth": 32,
                "hidden_act": "silu",
                "hidden_size": 1280,
                "intermediate_size": 3420,
                "num_heads": 16,
                "in_chans": 3,
                "out_hidden_size": 3584,
                "patch_size": 14,
                "spatial_merge_size": 2,
                "spatial_patch_size": 14,
                "window_size": 112,
                "fullatt_block_indexes": [7, 15, 23, 31],
                "tokens_per_second": 2,
                "temporal_patch_size": 2,
            },
        },
    ),
    Preset(
        "mistral-7b-v0.1",
        "mistralai/Mistral-7B-v0.1",
        {
            "model_type": "mistral",
            "hidden_size": 4096,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "max_position_embeddings": 32768,
            "sliding_window": 4096,
            "architectures": ["MistralForCausalLM"],
            "vocab_size": 32000,
            "intermediate_size": 14336,
            "rms_norm_eps": 1e-05,
            "torch_dtype": "bfloat16",
        },
    ),
    Preset(
        "gemma-2-9b",
        "google/gemma-2-9b",
        {
            "model_type": "gemma2",
            "hidden_size": 3584,
            "num_hidden_layers": 42,
            "num_attention_heads": 16,
            "num_key_value_heads": 8,
            "head_dim": 256,
            "max_position_embeddings": 8192,
            "query_pre_attn_scalar": 256,  # a factor on the scores; selects no kernel
            "attn_logit_softcapping": 50.0,
            "sliding_window": 4096,  # of every other layer
            "architectures": ["Gemma2ForCausalLM"],
            "vocab_size": 256000,
            "intermediate_size": 14336,
            "torch_dtype": "float32",
        },
    ),
    Preset(
        "gemma-3-4b",
        "google/gemma-3-4b-it",
        {
            "architectures": ["Gemma3ForConditionalGeneration"],
            "model_type": "gemma3",
            "mm_tokens_per_image": 256,  # the length of a bidirectional span
            "text_config": {
                "model_type": "gemma3_text",
                "vocab_size": 262208,
                "hidden_size": 2560,
                "intermediate_size": 10240,
                "num_hidden_layers": 34,
                "num_attention_heads": 8,  # these three by default of its configuration class
                "num_key_value_heads": 4,
                "head_dim": 256,
                "max_position_embeddings": 131072,
                "query_pre_attn_scalar": 256,
                "sliding_window": 1024,
                "sliding_window_pattern": 6,  # every sixth layer sees everything
            },
            "vision_config": {
                "model_type": "siglip_vision_model",
                "hidden_size": 1152,
                "image_size": 896,
                "intermediate_size": 4304,
                "num_attention_heads": 16,
                "num_hidden_layers": 27,
                "patch_size": 14,
                "vision_use_head": False,
            },
            "torch_dtype": "bfloat16",
        },
    ),
    Preset(
        "phi-3-mini",
        "microsoft/Phi-3-mini-4k-instruct",
        {
            "model_type": "phi3",
            "hidden_size": 3072,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 32,
            "max_position_embeddings": 4096,
            "sliding_window": 2047,
            "architectures": ["Phi3ForCausalLM"],
            "vocab_size": 32064,
            "intermediate_size": 8192,
            "torch_dtype": "bfloat16",
        },
    ),
    Preset(
        "gemma-3-1b",
        "google/gemma-3-1b-it",
        {
            "architectures": ["Gemma3ForCausalLM"],
            "model_type": "gemma3_text",
            "vocab_size": 262144,
            "hidden_size": 1152,
            "intermediate_size": 6912,
            "num_hidden_layers": 26,
            "num_attention_heads": 4,
            "num_key_value_heads": 1,
            "head_dim": 256,
            "max_position_embeddings": 32768,
            "query_pre_attn_scalar": 256,
            "rope_theta": 1000000,
            "rope_local_base_freq": 10000,
            "sliding_window": 512,
            "sliding_window_pattern": 6,
            "torch_dtype": "bfloat16",
        },
    ),
    Preset(
        "olmo-2-7b",
        "allenai/OLMo-2-1124-7B",
        {
            "architectures": ["Olmo2ForCausalLM"],
            "model_type": "olmo2",
            "vocab_size": 100352,
            "hidden_size": 4096,
            "intermediate_size": 11008,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 32,
            "max_position_embeddings": 4096,
            "rms_norm_eps": 1e-06,
            "rope_theta": 500000,
            "torch_dtype": "float32",
        },
    ),
    Preset(
        "granite-3.3-8b",
        "ibm-granite/granite-3.3-8b-instruct",
        {
            "architectures": ["GraniteForCausalLM"],
            "model_type": "granite",
            "vocab_size": 49159,
            "hidden_size": 4096,
            "intermediate_size": 12800,
            "num_hidden_layers": 40,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "max_position_embeddings": 131072,
            "rms_norm_eps": 1e-05,
            "rope_theta": 10000000.0,
            "attention_multiplier": 0.0078125,
            "embedding_multiplier": 12.0,
            "residual_multiplier": 0.22,
            "logits_scaling": 16.0,
            "tie_word_embeddings": True,
            "torch_dtype": "bfloat16",
        },
    ),
    Preset(
        "phi-3.5-mini",
        "microsoft/Phi-3.5-mini-instruct",
        {
            "architectures": ["Phi3ForCausalLM"],
            "model_type": "phi3",
            "vocab_size": 32064,
            "hidden_size": 3072,
            "intermediate_size": 8192,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 32,
            "max_position_embeddings": 131072,
            "original_max_position_embeddings": 4096,
            # LongRoPE, whose factors select no kernel: 1 in place of the published ones.
            "rope_scaling": {"type": "longrope", "short_factor": [1.0] * 48, "long_factor": [1.0] * 48},
            "sliding_window": 262144,  # beyond every position
            "torch_dtype": "bfloat16",
        },
    ),
    Preset(
        "gpt-oss-20b",
        "openai/gpt-oss-20b",
        {
            "model_type": "gpt_oss",
            "hidden_size": 2880,
            "num_hidden_layers": 24,
            "num_attention_heads": 64,
            "num_key_value_heads": 8,
            "head_dim": 64,
            "max_position_embeddings": 131072,
            "sliding_window": 128,
            "layer_types": ["sliding_attention", "full_attention"] * 12,
            "architectures": ["GptOssForCausalLM"],
            "vocab_size": 201088,
            "intermediate_size": 2880,
            "num_local_experts": 32,
            "num_experts_per_tok": 4,
            "rope_theta": 150000,
            "rope_scaling": {
                "rope_type": "yarn",
                "factor": 32.0,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "truncate": False,
                "original_max_position_embeddings": 4096,
            },
            "quantization_config": {"quant_method": "mxfp4"},
            "torch_dtype": "bfloat16",  # of everything but the experts
        },
    ),
    Preset(
        "qwen3-30b-a3b",
        "Qwen/Qwen3-30B-A3B",
        {
            **_QWEN_3_MOE,
            "hidden_size": 2048,
            "num_hidden_layers": 48,
            "num_attention_heads": 32,
            "intermediate_size": 6144,
            "moe_intermediate_size": 768,
        },
    ),
    Preset(
        "qwen3-235b-a22b",
        "Qwen/Qwen3-235B-A22B",
        {
            **_QWEN_3_MOE,
            "hidden_size": 4096,
            "num_hidden_layers": 94,
            "num_attention_heads": 64,
            "intermediate_size": 12288,
            "moe_intermediate_size": 1536,
        },
    ),
    Preset(
        "mixtral-8x7b",
        "mistralai/Mixtral-8x7B-v0.1",
        {
            "model_type": "mixtral",
            "hidden_size": 4096,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "max_position_embeddings": 32768,
            "sliding_window": None,
            "architectures": ["MixtralForCausalLM"],
            "vocab_size": 32000,
            "intermediate_size": 14336,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            "rms_norm_eps": 1e-05,
            "rope_theta": 1000000.0,
            "torch_dtype": "bfloat16",
        },
    ),
    Preset(
        "glm-4.5-air",
        "zai-org/GLM-4.5-Air",
        {
            "model_type": "glm4_moe",
            "hidden_size": 4096,
            "num_hidden_layers": 46,
            "num_attention_heads": 96,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "max_position_embeddings": 131072,
            "partial_rotary_factor": 0.5,
            "attention_bias": True,
            "use_qk_norm": False,
            "architectures": ["Glm4MoeForCausalLM"],
            "vocab_size": 151552,
            "intermediate_size": 10944,
            "first_k_dense_replace": 1,
            "moe_intermediate_size": 1408,
            "n_routed_experts": 128,
            "n_shared_experts": 1,
            "num_experts_per_tok": 8,
            "norm_topk_prob": True,
            "routed_scaling_factor": 1.0,
            "rms_norm_eps": 1e-05,
            "rope_theta": 1000000,
            "torch_dtype": "bfloat16",
        },
    ),
    Preset(
        "glm-4.7-flash",
        "zai-org/GLM-4.7-Flash",
        {
            "architectures": ["Glm4MoeLiteForCausalLM"],
            "model_type": "glm4_moe_lite",
            "vocab_size": 154880,
            "hidden_size": 2048,
            "intermediate_size": 10240,
            "num_hidden_layers": 47,
            "num_attention_heads": 20,
            "num_key_value_heads": 20,
            "max_position_embeddings": 202752,
            "q_lora_rank": 768,
            "kv_lora_rank": 512,
            "qk_nope_head_dim": 192,
            "qk_rope_head_dim": 64,
            "v_head_dim": 256,
            "first_k_dense_replace": 1,
            "moe_intermediate_size": 1536,
            "n_routed_experts": 64,
            "n_shared_experts": 1,
            "num_experts_per_tok": 4,
            "n_group": 1,
            "topk_group": 1,
            "norm_topk_prob": True,
            "routed_scaling_factor": 1.8,
            "rms_norm_eps": 1e-05,
            "rope_theta": 1000000,
            "torch_dtype": "bfloat16",
        },
    ),
    Preset(
        "gemma-4-31b",
        "google/gemma-4-31B",
        _gemma_4(
            60,
            hidden_size=5376,
            intermediate_size=21504,
            num_attention_heads=32,
            num_key_value_heads=16,
            num_global_key_value_heads=4,
            attention_k_eq_v=True,
            sliding_window=1024,
            max_position_embeddings=262144,
            hidden_size_per_layer_input=0,
            use_bidirectional_attention="vision",
        ),
        _GEMMA_4_LARGE,
    ),
    Preset(
        "gemma-4-26b-a4b",
        "google/gemma-4-26B-A4B",
        _gemma_4(
            30,
            hidden_size=2816,
            intermediate_size=2112,
            num_attention_heads=16,
            num_key_value_heads=8,
            num_global_key_value_heads=2,
            attention_k_eq_v=True,
            sliding_window=1024,
            max_position_embeddings=262144,
            hidden_size_per_layer_input=0,
            enable_moe_block=True,
            num_experts=128,
            top_k_experts=8,
            moe_intermediate_size=704,
            use_bidirectional_attention="vision",
        ),
        _GEMMA_4_LARGE,
    ),
    Preset(
        "gemma-4-e4b",
        "google/gemma-4-E4B",
        _gemma_4(
            42,
            hidden_size=2560,
            intermediate_size=10240,
            num_attention_heads=8,
            num_key_value_heads=2,
            num_kv_shared_layers=18,
            sliding_window=512,
            max_position_embeddings=131072,
            hidden_size_per_layer_input=256,
            vocab_size_per_layer_input=262144,
        ),
        _images_of_gemma_4(use_clipped_linears=True),
    ),
    Preset(
        "qwen3.5-35b-a3b",
        "Qwen/Qwen3.5-35B-A3B",
        _gated_delta(
            "qwen3_5_moe_text",
            "Qwen3_5MoeForCausalLM",
            vocab_size=248320,
            hidden_size=2048,
            num_hidden_layers=40,
            num_attention_heads=16,
            num_key_value_heads=2,
            moe_intermediate_size=512,
            shared_expert_intermediate_size=512,
            num_experts=256,
            num_experts_per_tok=8,
            linear_num_value_heads=32,
        ),
        _images_of_qwen("qwen3_5_moe", "Qwen3_5MoeForConditionalGeneration", 2048),
    ),
    Preset(
        "qwen3.5-27b",
        "Qwen/Qwen3.5-27B",
        _gated_delta(
            "qwen3_5_text",
            "Qwen3_5ForCausalLM",
            vocab_size=248320,
            hidden_size=5120,
            intermediate_size=17408,
            num_hidden_layers=64,
            num_attention_heads=24,
            num_key_value_heads=4,
            linear_num_value_heads=48,
        ),
        _images_of_qwen("qwen3_5", "Qwen3_5ForConditionalGeneration", 5120),
    ),
    Preset(
        "qwen3.5-9b",
        "Qwen/Qwen3.5-9B",
        _gated_delta(
            "qwen3_5_text",
            "Qwen3_5ForCausalLM",
            vocab_size=248320,
            hidden_size=4096,
            intermediate_size=12288,
            num_hidden_layers=32,
            num_attention_heads=16,
            num_key_value_heads=4,
            linear_num_value_heads=32,
        ),
        _images_of_qwen("qwen3_5", "Qwen3_5ForConditionalGeneration", 4096),
    ),
    Preset(
        "qwen3-next-80b-a3b",
        "Qwen/Qwen3-Next-80B-A3B-Instruct",
        _gated_delta(
            "qwen3_next",
            "Qwen3NextForCausalLM",
            vocab_size=151936,
            hidden_size=2048,
            intermediate_size=5120,
            num_hidden_layers=48,
            num_attention_heads=16,
            num_key_value_heads=2,
            moe_intermediate_size=512,
            shared_expert_intermediate_size=512,
            num_experts=512,
            num_experts_per_tok=10,
            norm_topk_prob=True,
            linear_num_value_heads=32,
        ),
    ),
    Preset(
        "nemotron-3-nano-30b-a3b",
        "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16",
        _nemotron_3(
            "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME",
            hidden_size=2688,
            mamba_num_heads=64,
            n_routed_experts=128,
            num_experts_per_tok=6,
            moe_intermediate_size=1856,
            moe_shared_expert_intermediate_size=3712,
            routed_scaling_factor=2.5,
        ),
    ),
    Preset(
        "nemotron-3-super-120b-a12b",
        "nvidia/NVIDIA-Nemotron-3-Super-120B-A12B-BF16",
        _nemotron_3(
            "MEMEMEM*EMEMEMEM*EMEMEMEM*EMEMEMEMEM*EMEMEMEMEM*EMEMEMEMEM*EMEMEMEMEM*EMEMEMEM*EMEMEMEME",
            hidden_size=4096,
            mamba_num_heads=128,
            n_routed_experts=512,
            num_experts_per_tok=22,
            moe_latent_size=1024,
            moe_intermediate_size=2688,
            moe_shared_expert_intermediate_size=5376,
            routed_scaling_factor=5.0,
        ),
    ),
)


def preset_named(name: str) -> Preset:
    """Raises ValueError, naming those there are, for another."""
    for preset in PRESETS:
        if preset.name == name:
            return preset
    raise ValueError(f"no preset is named {name!r}; there are {', '.join(preset.name for preset in PRESETS)}")
