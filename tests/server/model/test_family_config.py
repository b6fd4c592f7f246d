"""config.json of each family: windows layer by layer, the signature that is read without a model, and refusals."""

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForImageTextToText, DeepseekOcr2Config, MiMoV2FlashConfig
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)

from kernels.fused.activation_kind import Activation
from kernels.fused.capped_kind import CappedSilu
from kernels.vocabulary.shape import Dtype
from kernels.vocabulary.value_shape import Values
from qualification.decision.model_shapes import signature_of
from qualification.model.config import (
    DenseConfig,
    ExpertsConfig,
    ModelConfig,
    QKNorm,
    RopeConfig,
    kv_bytes_per_token,
)
from qualification.model.families.family import Family
from qualification.model.families.image_models import IMAGE_MODELS, ImageModel
from qualification.model.families.reader import read_model, unknown_keys
from qualification.model.families.registry import FAMILIES, family_named
from qualification.model.families.towers import with_known_tower, with_tower
from qualification.model.fields import ModelConfigError
from server.errors import ModelError
from server.model.load.load import load_config
from server.model.vision.weights import tower_shapes
from support.models.tiny_families import BLOCKS, longrope

OWN_SIZE = r"head_dim must be absent or hidden_size / num_attention_heads \(64 / 4\)"
SHARED: dict[str, object] = {
    "vocab_size": 64000,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
}
# As transformers names the classes of its models; as published files do where it has none, or another one.
ARCHITECTURES: dict[str, str] = {
    **MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    **MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    "bailing_hybrid": "BailingMoeV2_5ForCausalLM",
    "bailing_moe": "BailingMoeV2ForCausalLM",
    "deepseek_vl_v2": "DeepseekOCRForCausalLM",
    "ernie4_5_moe_vl": "Ernie4_5_VLMoeForConditionalGeneration",
    "glm4v_x": "Glm4vXForConditionalGeneration",
    "internlm2": "InternLM2ForCausalLM",
    "minicpm": "MiniCPMForCausalLM",
    "internvl_chat": "InternVLChatModel",
    "mimo_v2": "MiMoV2ForCausalLM",
    "nemotron-nas": "DeciLMForCausalLM",
    "step3p5": "Step3p5ForCausalLM",
}
# Keys of the published file of InternVL 3.5 8B; transformers has no such class.
OPENGVLAB: dict[str, object] = {
    "_commit_hash": None, "architectures": ["InternVLChatModel"], "auto_map": {}, "downsample_ratio": 0.5,
    "dynamic_image_size": True, "eos_token_id": 151645, "force_image_size": 448, "hidden_size": 4096,
    "image_fold": None,
    "llm_config": {"model_type": "qwen3"}, "max_dynamic_patch": 12, "min_dynamic_patch": 1,
    "output_attentions": False, "pad2square": False, "pad_token_id": 151643, "ps_version": "v2", "select_layer": -1,
    "system_message": None, "template": "internvl2_5", "tie_word_embeddings": False, "torch_dtype": "bfloat16",
    "transformers_version": None, "use_backbone_lora": 0, "use_llm_lora": 0, "use_thumbnail": True, "vision_config": {},
}  # fmt: skip
OMNI = "NemotronH_Nano_Omni_Reasoning_V3"
# Keys of the published files of Nemotron Nano VL and Omni, which transformers reads under other names.
NVIDIA_IMAGES: dict[str, object] = {
    "architectures": ["NemotronH_Nano_VL_V2"], "auto_map": {}, "downsample_ratio": 0.5, "eos_token_id": 12,
    "force_image_size": 512, "image_tag_type": "internvl", "img_context_token": "<image>", "img_context_token_id": 18,
    "img_end_token": "</img>", "img_start_token": "<img>", "llm_config": {"model_type": "nemotron_h"},
    "max_sequence_length": 131072, "norm_mean": [0.5] * 3, "norm_std": [0.5] * 3, "patch_size": 16,
    "projector_hidden_size": 20480, "ps_version": "v2", "sound_config": {}, "sound_context_token_id": 27,
    "template": "nemotron5h-aligned", "torch_dtype": "bfloat16", "use_thumbnail": True,
    "video_context_token_id": 131081, "video_pruning_rate": 0.7, "vision_config": {}, "vit_hidden_size": 1280,
}  # fmt: skip
# As the published files have it.
MIMO: dict[str, object] = {
    "hybrid_layer_pattern": [0, 1, 1, 0], "moe_layer_freq": [0, 1, 1, 1], "layernorm_epsilon": 1e-5,
    "swa_num_key_value_heads": 4, "swa_rope_theta": 10_000, "rope_theta": 5_000_000, "sliding_window": 128,
    "sliding_window_size": 128, "attention_value_scale": 0.707, "rope_scaling": None, "swa_head_dim": 192,
    "add_swa_attention_sink_bias": True, "n_shared_experts": None, "routed_scaling_factor": None, "head_dim": 192,
}  # fmt: skip
BLOCKS_OF_FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}
ON = {"use_sliding_window": True, "sliding_window": 512}
MIXED = ["full_attention", "sliding_attention", "sliding_attention", "full_attention"]
# As the published file has it, with a layer behind the last one.
STEP: dict[str, object] = {
    "num_nextn_predict_layers": 1,
    "num_attention_groups": 2,
    "head_dim": 16,
    "layer_types": [*MIXED, "full_attention"],
    "sliding_window": 512,
    "attention_other_setting": {"attention_type": "sliding_attention", "num_attention_heads": 6, "head_dim": 16},
    "rope_theta": [5e6, 1e4, 1e4, 5e6, 5e6],
    "partial_rotary_factors": [0.5, 1.0, 1.0, 0.5, 0.5],
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 2.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 32.0,
        "original_max_position_embeddings": 4096,
    },
    "yarn_only_types": ["full_attention"],
    "moe_layers_enum": "1,2,3,4",
    "moe_num_experts": 8,
    "moe_top_k": 3,
    "moe_router_scaling_factor": 3.0,
    "swiglu_limits": [0.0, 0.0, 7.0, 7.0, 0.0],
    "swiglu_limits_shared": [16.0, 0.0, 0.0, 16.0, 0.0],
}
_LATENT = ("deepseek_v3", "deepseek_v32", "glm4_moe_lite", "glm_moe_dsa", "kimi_k2", "mistral4")
OF_LAYERS: dict[str, dict[str, object]] = {
    "bailing_hybrid": {"head_dim": 128, "partial_rotary_factor": 0.5, "layer_group_size": 2},
    "bamba": {"attn_layer_indices": [1]},
    "minicpm3": {"num_key_value_heads": 4},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"] * 2},
    "kimi_linear": {"num_key_value_heads": 4, "layer_types": ["linear_attention", "full_attention"] * 2},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2},
    "nemotron_h": {"hybrid_override_pattern": "M-*-"},
    "nemotron-nas": {"block_configs": BLOCKS[:4]},
    "step3p5": STEP,
    "dots1": {"n_routed_experts": 8, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "youtu": {"num_key_value_heads": 4, "head_dim": 64},
    **{it: {"head_dim": 24, "v_head_dim": 12, "sliding_window": 9} for it in ("mimo_v2", "mimo_v2_flash")},
    **{it: {"num_key_value_heads": 4} for it in _LATENT},
    "deepseek_ocr2_text": {"num_experts_per_tok": 6},
    "deepseek_v2": {"num_key_value_heads": 4, "num_experts_per_tok": 6},
}
LINEAR = {"attention": {"replace_with_linear": True, "no_op": False}, "ffn": {"ffn_mult": 2.0}}
EMPTY = {"attention": {"no_op": True, "n_heads_in_group": None}, "ffn": {"no_op": True}}
Windows = tuple[int | None, ...]
WINDOWS: list[tuple[str, dict[str, object], Windows]] = [
    ("mistral", {"sliding_window": 4096}, (4096,) * 4),
    ("mistral", {"sliding_window": None}, (None,) * 4),
    ("mistral", {}, (4096,) * 4),
    ("mistral", {"sliding_window": 8, "use_sliding_window": False}, (8,) * 4),  # Mistral has no such switch
    ("mistral", {"sliding_window": None, "head_dim": 128}, (None,) * 4),
    ("phi3", {"sliding_window": 2047}, (2047,) * 4),
    ("phi3", {"sliding_window": None}, (None,) * 4),
    ("phi3", {}, (None,) * 4),
    ("qwen2", {"sliding_window": 512, "max_window_layers": 2}, (None,) * 4),
    ("qwen2", {"sliding_window": 512, "max_window_layers": 2, "use_sliding_window": False}, (None,) * 4),
    ("qwen2", {**ON, "max_window_layers": 2}, (None, None, 512, 512)),
    ("qwen2", {**ON, "max_window_layers": 0}, (512,) * 4),
    ("qwen2", {**ON, "max_window_layers": 4}, (None,) * 4),
    ("qwen2", {**ON}, (None,) * 4),  # the windows begin at layer 28
    ("qwen2", {"use_sliding_window": True, "max_window_layers": 3}, (None, None, None, 4096)),
    ("qwen2", {**ON, "sliding_window": None, "max_window_layers": 0}, (None,) * 4),
    ("qwen2", {"layer_types": ["full_attention"] * 4}, (None,) * 4),
    ("qwen3", {"head_dim": 128, "sliding_window": None, "use_sliding_window": False}, (None,) * 4),
    ("qwen3", {"head_dim": 128, **ON, "max_window_layers": 3}, (None, None, None, 512)),
    ("qwen3", {"head_dim": 128, **ON, "layer_types": MIXED, "max_window_layers": 0}, (None, 512, 512, None)),
    ("qwen2_moe", {"max_window_layers": 3}, (None,) * 4),
    ("qwen2_moe", {**ON, "max_window_layers": 3}, (512, None, 512, None)),
    ("qwen2_moe", {**ON, "layer_types": MIXED}, (None, 512, 512, None)),
    ("exaone4", {"sliding_window": 512}, (512, 512, 512, None)),
    (
        "exaone4",
        {"sliding_window": 512, "sliding_window_pattern": "LLLG", "layer_types": MIXED},
        (None, 512, 512, None),
    ),
    ("mellum", {"head_dim": 16, "layer_types": MIXED}, (None, 1024, 1024, None)),
    ("olmo3", {}, (4096, 4096, 4096, None)),
    ("smollm3", {**ON, "no_rope_layers": [1, 0, 1, 1, 1]}, (None, 512, None, None)),
    ("gpt_oss", {"head_dim": 16}, (128, None, 128, None)),
    ("gpt_oss", {"head_dim": 16, "sliding_window": 512, "layer_types": MIXED}, (None, 512, 512, None)),
]


def config_of(folder: Path, family: str, changes: Mapping[str, object]) -> ModelConfig:
    values = {**SHARED, "model_type": family, "architectures": [ARCHITECTURES[family]], **changes}
    (folder / "config.json").write_text(json.dumps(values))
    return load_config(folder)


@pytest.mark.parametrize(("family", "changes", "windows"), WINDOWS)
def test_the_windows_of_the_layers_are_those_of_transformers(
    family: str, changes: dict[str, object], windows: Windows, tmp_path: Path
) -> None:
    config = config_of(tmp_path, family, changes)
    assert config.windows == windows
    signature = signature_of(config)
    assert set(signature.windows) == set(windows)
    assert (signature.num_heads, signature.num_kv_heads, signature.head_dim) == (4, 2, changes.get("head_dim", 16))
    reference = AutoConfig.from_pretrained(tmp_path)
    kinds = getattr(reference, "layer_types", None) or ["sliding_attention"] * 4
    assert tuple(reference.sliding_window if kind == "sliding_attention" else None for kind in kinds) == windows


def test_what_sets_the_families_apart(tmp_path: Path) -> None:
    def switches(family: str, **changes: object) -> tuple[bool, bool, bool, bool]:
        layer = config_of(tmp_path, family, changes).layers[0]
        attention = layer.attention
        assert isinstance(layer.feed_forward, DenseConfig)
        has_norms = attention.qk_norm is QKNorm.EACH_HEAD
        return attention.has_bias, attention.has_output_bias, layer.feed_forward.has_bias, has_norms

    assert switches("qwen2") == (True, False, False, False)
    assert switches("qwen3", head_dim=16) == (False, False, False, True)
    assert switches("qwen3", head_dim=16, attention_bias=True) == (True, True, False, True)
    assert switches("mistral") == (False, False, False, False)
    assert switches("phi3") == (False, False, False, False)


@pytest.mark.parametrize(
    "changes",
    [
        {"is_causal": False},
        {"is_causal": 0},
        {"is_causal": None},
        {"use_bidirectional_attention": True},
        {"bidirectional": True},
        {"is_bidirectional": "yes"},
    ],
)
@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.model_type)
def test_attention_to_later_tokens_is_refused(family: Family, changes: dict[str, object]) -> None:
    """Embedding models on Qwen 2 ask for it: https://github.com/vllm-project/vllm/pull/14609."""
    (name,) = changes
    given = {**SHARED, "model_type": family.model_type, "head_dim": 16, **OF_LAYERS.get(family.model_type, {})}
    with pytest.raises(ModelConfigError, match=f"{name} must be absent or"):
        read_model({**given, **changes})
    read_model({**given, "is_causal": True})


@pytest.mark.parametrize("beside", [{"is_causal": False}, {"text_config": {"is_causal": False}}])
def test_an_image_models_attention_to_later_tokens_is_refused(beside: dict[str, object]) -> None:
    text = {**SHARED, "model_type": "qwen2_5_vl_text", **beside.pop("text_config", {})}
    with pytest.raises(ModelConfigError, match="is_causal must be absent or true"):
        read_model({"model_type": "qwen2_5_vl", "text_config": text, **beside})


_GLM_TOWER: dict[str, object] = {
    "hidden_size": 1536, "depth": 24, "num_heads": 12, "attention_bias": False, "intermediate_size": 13696,
    "hidden_act": "silu", "hidden_dropout_prob": 0.0, "attention_dropout": 0.0, "initializer_range": 0.02,
    "image_size": 336, "in_channels": 3, "patch_size": 14, "out_hidden_size": 512, "rms_norm_eps": 1e-05,
    "spatial_merge_size": 2, "temporal_patch_size": 2,
}  # fmt: skip
_INTERN_TOWER: dict[str, object] = {
    "architectures": ["InternVisionModel"], "attention_bias": True, "attention_dropout": 0.0, "dropout": 0.0,
    "hidden_act": "gelu", "hidden_dropout_prob": 0.0, "hidden_size": 1024, "image_size": [448, 448],
    "initializer_factor": 0.1, "initializer_range": 1e-10, "intermediate_size": 4096, "layer_norm_eps": 1e-06,
    "layer_scale_init_value": 0.1, "model_type": "internvl_vision", "norm_type": "layer_norm",
    "num_attention_heads": 16, "num_channels": 3, "num_hidden_layers": 24, "patch_size": [14, 14],
    "projection_dropout": 0.0, "torch_dtype": "bfloat16", "use_absolute_position_embeddings": True,
    "use_mask_token": False, "use_mean_pooling": True, "use_qk_norm": False,
}  # fmt: skip


@pytest.mark.parametrize(
    ("model_type", "vision", "rope"),
    [
        (
            "qwen2_vl",
            {"depth": 32, "embed_dim": 1280, "mlp_ratio": 4, "num_heads": 16, "in_chans": 3, "hidden_size": 512,
             "patch_size": 14, "spatial_merge_size": 2, "spatial_patch_size": 14, "temporal_patch_size": 2},
            {"mrope_section": [16, 24, 24]},
        ),
        (
            "glm4v",
            {**_GLM_TOWER, "model_type": "glm4v_vision"},
            {"mrope_section": [8, 12, 12], "partial_rotary_factor": 0.5},
        ),
        (
            "glm_ocr",
            {**_GLM_TOWER, "model_type": "glm_ocr_vision", "hidden_size": 1024, "num_heads": 16,
             "attention_bias": True, "intermediate_size": 4096},
            {"mrope_section": [16, 24, 24], "partial_rotary_factor": 1.0},
        ),
        (
            "paddleocr_vl",
            {"architectures": ["SiglipVisionModel"], "attention_dropout": 0.0, "hidden_act": "gelu_pytorch_tanh",
             "hidden_size": 1152, "image_size": 384, "intermediate_size": 4304, "layer_norm_eps": 1e-06,
             "model_type": "paddleocr_vl", "num_attention_heads": 16, "num_channels": 3, "num_hidden_layers": 27,
             "pad_token_id": 0, "patch_size": 14, "spatial_merge_size": 2, "temporal_patch_size": 2,
             "tokens_per_second": 2, "torch_dtype": "bfloat16"},
            {"mrope_section": [16, 24, 24]},
        ),
        ("internvl", _INTERN_TOWER, {}),
        (
            "internvl",
            {**_INTERN_TOWER, "attention_bias": False, "hidden_size": 3200, "intermediate_size": 12800,
             "norm_type": "rms_norm", "num_attention_heads": 25, "num_hidden_layers": 45, "use_qk_norm": True},
            {},
        ),
    ],
)  # fmt: skip
def test_published_towers_have_the_tensors_of_transformers(
    model_type: str, vision: dict[str, object], rope: dict[str, object]
) -> None:
    """The keys are those of the files, before a small text."""
    text = {**SHARED, "hidden_size": 512, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, **rope}}
    text |= {"model_type": "qwen2"} if model_type == "internvl" else {}
    config = {"model_type": model_type, "text_config": text, "vision_config": vision}
    tower = with_known_tower(read_model(config), config).tower
    with torch.device("meta"):
        model = AutoModelForImageTextToText.from_config(
            AutoConfig.for_model(model_type, text_config=text, vision_config=vision)
        )
    assert tower is not None
    named = {tower.names.own(name): tuple(it.shape) for name, it in model.named_parameters()}
    assert tower_shapes(tower) == {name: shape for name, shape in named.items() if name is not None}


def test_paddleocr_vl_is_read_as_published_and_as_saved(tmp_path: Path) -> None:
    text = {**SHARED, "head_dim": 128, "use_bias": False, "compression_ratio": 1.0, "rope_is_neox_style": True}
    sections = {"mrope_section": [16, 24, 24], "rope_type": "default"}
    vision = {"model_type": "paddleocr_vl", "image_size": 384}
    flat = {**text, "rope_theta": 500000, "rope_scaling": {**sections, "type": "default"}, "vision_config": vision}
    published = config_of(tmp_path, "paddleocr_vl", {**flat, "use_3d_rope": True, "tie_word_embeddings": False})
    saved = {**text, "rope_parameters": {**sections, "rope_theta": 500000.0}}
    nested = {"text_config": saved, "vision_config": vision, "tie_word_embeddings": False}
    assert config_of(tmp_path, "paddleocr_vl", nested) == published
    assert not published.tie_embeddings
    for name, value in (("compression_ratio", 2.0), ("rope_is_neox_style", False), ("use_3d_rope", False)):
        with pytest.raises(ModelError, match=f"{name} must be absent or"):
            config_of(tmp_path, "paddleocr_vl", {**flat, name: value})


def test_hunyuan_ocr_is_read_as_published_and_as_saved(tmp_path: Path) -> None:
    rope = {"alpha": 1000.0, "factor": 1.0, "mscale": 1.0, "xdrope_section": [16, 16, 16, 16]}
    text = {**SHARED, "head_dim": 128, "attention_head_dim": 128, "use_qk_norm": True, "pad_id": 0}
    flat = {**text, "rope_theta": 10_000.0, "rope_scaling": {"type": "xdrope", **rope}}
    published = config_of(tmp_path, "hunyuan_vl", {**flat, "vision_config": {}, "im_start_id": 7})
    saved = {**text, "rope_parameters": {"rope_type": "dynamic", "rope_theta": 10_000.0, **rope}}
    assert config_of(tmp_path, "hunyuan_vl", {"text_config": saved, "vision_config": {}}) == published
    assert published.layers[0].attention.rope.theta == pytest.approx(10_000 * 1000 ** (128 / 126))
    assert published.tie_embeddings


ERNIE_VL: dict[str, object] = {
    **SHARED, "moe_num_experts": [8, 8], "moe_intermediate_size": [48, 16], "moe_k": 3, "moe_num_shared_experts": 2,
    "moe_layer_start_index": [1, 1], "moe_layer_end_index": [29, 28], "moe_layer_interval": 1, "rope_theta": 500000,
    "rms_norm_eps": 1e-05, "moe_capacity": [128, 128, 128], "rope_3d": True, "freq_allocation": 20, "use_bias": False,
    "im_patch_id": 100295, "pixel_hidden_size": 1280, "modality_detach": True, "vision_config": {"embed_dim": 1280},
}  # fmt: skip


def test_ernie_4_5_vl_is_read_as_first_published_and_as_saved(tmp_path: Path) -> None:
    published = config_of(tmp_path, "ernie4_5_moe_vl", {**ERNIE_VL, "tie_word_embeddings": True})
    text = {
        **SHARED, "moe_num_experts": 8, "moe_intermediate_size": [48, 16], "moe_k": 3, "moe_num_shared_experts": 2,
        "mlp_layer_types": ["dense", *["sparse"] * (len(published.layers) - 1)],
        "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0, "mrope_section": [22, 22, 20]},
    }  # fmt: skip
    assert config_of(tmp_path, "ernie4_5_vl_moe", {"text_config": text, "vision_config": {}}) == published
    without = {name: it for name, it in ERNIE_VL.items() if name != "moe_num_shared_experts"}
    other = config_of(tmp_path, "ernie4_5_moe_vl", without)
    assert not other.tie_embeddings
    experts = [it.feed_forward for it in other.layers if isinstance(it.feed_forward, ExpertsConfig)]
    assert [(it.width, it.num_experts, it.shared) for it in experts] == [(48, 8, None)] * (len(other.layers) - 1)


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("moe_num_experts", [8, 4], "as many for text as for images, found"),
        ("moe_intermediate_size", [48, 16, 16], "a positive integer, or a list of 2"),
        ("moe_layer_start_index", [1, 2], "the same for text and for images"),
        ("moe_layer_end_index", [29, 1], "the same for text and for images, or .* and above"),
        ("moe_layer_interval", None, "given where model_type is ernie4_5_moe_vl"),
        ("moe_gate_act", "sigmoid", "absent or softmax"),
        ("quantization_config", {"quant_method": "fp8"}, "absent"),
    ],
)
def test_what_ernie_4_5_vl_cannot_be_read_with_is_named(
    name: str, value: object, expected: str, tmp_path: Path
) -> None:
    with pytest.raises(ModelError, match=f"{name} must be {expected}"):
        config_of(tmp_path, "ernie4_5_moe_vl", {**ERNIE_VL, name: value})


# The text of DeepSeek-OCR, which its file has twice.
DEEPSEEK_OCR: dict[str, object] = {
    "bos_token_id": 0, "eos_token_id": 1, "first_k_dense_replace": 1, "hidden_size": 1280, "intermediate_size": 6848,
    "kv_lora_rank": None, "lm_head": True, "max_position_embeddings": 8192, "moe_intermediate_size": 896, "n_group": 1,
    "n_routed_experts": 64, "n_shared_experts": 2, "num_attention_heads": 10, "num_experts_per_tok": 6,
    "num_hidden_layers": 12, "num_key_value_heads": 10, "q_lora_rank": None, "qk_nope_head_dim": 0,
    "qk_rope_head_dim": 0, "rm_head": False, "topk_group": 1, "topk_method": "greedy", "torch_dtype": "bfloat16",
    "use_mla": False, "v_head_dim": 0, "vocab_size": 129280,
}  # fmt: skip
DEEPSEEK_OCR_WHOLE: dict[str, object] = {
    **DEEPSEEK_OCR, "language_config": DEEPSEEK_OCR, "vision_config": {}, "candidate_resolutions": [[1024, 1024]],
    "global_view_pos": "head", "projector_config": {}, "tile_tag": "2D",
}  # fmt: skip


def test_deepseek_ocr_is_read_as_published_and_as_saved(tmp_path: Path) -> None:
    published = config_of(tmp_path, "deepseek_vl_v2", DEEPSEEK_OCR_WHOLE)
    of_latents = (
        "kv_lora_rank", "q_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "use_mla", "lm_head",
        "rm_head", "first_k_dense_replace",
    )  # fmt: skip
    text = {name: it for name, it in DEEPSEEK_OCR.items() if name not in of_latents}
    text |= {"mlp_layer_types": ["dense", *["sparse"] * 11]}
    saved = DeepseekOcr2Config(text_config=text, eos_token_id=1, architectures=["DeepseekOcr2ForConditionalGeneration"])
    saved.save_pretrained(tmp_path)
    assert load_config(tmp_path) == published
    assert not published.tie_embeddings
    assert isinstance(published.layers[0].feed_forward, DenseConfig)


@pytest.mark.parametrize(
    ("model_type", "architecture", "changes", "message"),
    [
        ("deepseek_vl_v2", "DeepseekOCRForCausalLM", {"use_mla": True}, "use_mla must be absent or false"),
        (
            "deepseek_vl_v2",
            "DeepseekOCRForCausalLM",
            {"sliding_window_size": 128},
            "sliding_window_size must be absent",
        ),
        ("deepseek_vl_v2", "DeepseekOCRForCausalLM", {"head_dim": 64}, r"head_dim must be absent or .* \(1280 / 10\)"),
        ("deepseek_vl_v2", "DeepseekVLV2ForCausalLM", {}, r"architectures \['DeepseekVLV2ForCausalLM'\] are not supp"),
        ("mamba2", "Mamba2ForCausalLM", {}, "is not supported: no layer of it attends, and prompts are cached by"),
        ("jamba", "JambaForCausalLM", {}, "is not supported: its state space decays each channel by a vector of its"),
        ("falcon_mamba", "FalconMambaForCausalLM", {}, r"by a vector of its own \(Mamba 1\), which no kernel computes"),
        ("zamba2", "Zamba2ForCausalLM", {}, "is not supported: its layers share blocks of attention"),
        (
            "minimax",
            "MiniMaxForCausalLM",
            {},
            r"is not supported: its residual is what each norm has made \(DeepNorm\)",
        ),
        ("unlimited-ocr", "UnlimitedOCRForCausalLM", {}, "is not supported: an answer's tokens see its prompt and 128"),
    ],
)
def test_what_deepseek_ocr_cannot_be_read_with_is_named(
    model_type: str, architecture: str, changes: dict[str, object], message: str, tmp_path: Path
) -> None:
    whole = {**DEEPSEEK_OCR_WHOLE, "model_type": model_type, "architectures": [architecture]}
    whole["language_config"] = {**DEEPSEEK_OCR, **changes}
    (tmp_path / "config.json").write_text(json.dumps(whole))
    with pytest.raises(ModelError, match=message):
        load_config(tmp_path)


# Pixtral 12B's, in the form of Hugging Face.
PIXTRAL: dict[str, object] = {
    "ignore_index": -100, "image_seq_length": 1, "image_token_index": 10, "projector_hidden_act": "gelu",
    "text_config": {
        "head_dim": 128, "hidden_size": 5120, "intermediate_size": 14336, "max_position_embeddings": 1024000,
        "model_type": "mistral", "num_hidden_layers": 40, "num_key_value_heads": 8, "rms_norm_eps": 1e-05,
        "rope_theta": 1e9, "sliding_window": None, "vocab_size": 131072,
    },
    "torch_dtype": "bfloat16",
    "vision_config": {
        "head_dim": 64, "hidden_act": "silu", "image_size": 1024, "model_type": "pixtral", "patch_size": 16,
        "rope_theta": 10000.0,
    },
    "vision_feature_layer": -1, "vision_feature_select_strategy": "full",
}  # fmt: skip


def test_pixtral_is_read_with_the_heads_of_its_class(tmp_path: Path) -> None:
    model = config_of(tmp_path, "llava", PIXTRAL)
    assert {(it.num_heads, it.num_kv_heads, it.head_dim, it.window) for it in model.attentions} == {(32, 8, 128, None)}
    assert not model.tie_embeddings
    (tmp_path / "config.json").write_text(json.dumps({**PIXTRAL, "model_type": "llava"}))
    with torch.device("meta"):
        whole = AutoModelForImageTextToText.from_config(AutoConfig.from_pretrained(tmp_path))
    tower = with_tower(model, {**PIXTRAL, "model_type": "llava"}, "config.json").tower
    assert tower is not None
    named = {tower.names.own(name): tuple(it.shape) for name, it in whole.named_parameters()}
    assert tower_shapes(tower) == {name: shape for name, shape in named.items() if name is not None}


@pytest.mark.parametrize(
    ("part", "changes", "message"),
    [
        ("text_config", {"model_type": "llama"}, "text_config: model_type must be one of mistral, found 'llama'"),
        ("vision_config", {"model_type": "clip_vision_model"}, "vision_config: model_type must be one of pixtral"),
        (None, {"vision_feature_select_strategy": None}, "vision_feature_select_strategy must be one of full"),
        (None, {"vision_feature_layer": [-2, -1]}, "vision_feature_layer must be one layer"),
    ],
)
def test_another_llava_is_refused_by_name(
    part: str | None, changes: dict[str, object], message: str, tmp_path: Path
) -> None:
    config: dict[str, Any] = {**PIXTRAL, "model_type": "llava"}
    config = {**config, **changes} if part is None else {**config, part: {**config[part], **changes}}
    with pytest.raises((ModelError, ModelConfigError), match=message):
        with_tower(config_of(tmp_path, "llava", config), config, "config.json")


def test_minicpm_v_of_another_text_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="text_config: model_type must be one of qwen3_5_text, found 'qwen3'"):
        config_of(tmp_path, "minicpmv4_6", {"text_config": {**SHARED, "model_type": "qwen3"}, "vision_config": {}})


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.model_type)
def test_every_key_of_transformers_class_is_known(family: Family) -> None:
    of_one_class = {"kimi_k2": "deepseek_v3", "bailing_moe": "bailing_moe_v2", "mimo_v2": "mimo_v2_flash"}
    model_type = of_one_class.get(family.model_type, family.model_type)
    keys = AutoConfig.for_model(model_type).to_dict()
    assert unknown_keys(keys, family) == []


@pytest.mark.parametrize("model", IMAGE_MODELS, ids=lambda model: model.model_type)
def test_every_key_of_an_image_model_is_known(model: ImageModel) -> None:
    as_saved = "internvl" if model.model_type == "interns1" else model.model_type  # which transformers lacks
    published = {
        "internvl_chat": OPENGVLAB,
        "ernie4_5_moe_vl": ERNIE_VL,
        "deepseek_vl_v2": DEEPSEEK_OCR_WHOLE,
        "llava": PIXTRAL,
    } | dict.fromkeys(("NemotronH_Nano_VL_V2", OMNI), NVIDIA_IMAGES)
    keys = published.get(as_saved) or AutoConfig.for_model(as_saved).to_dict()
    keys = {**keys, "model_type": model.model_type}
    assert unknown_keys(keys, family_named(model.text_family(keys, "config.json"), "config.json")) == []


def test_a_missing_tie_of_an_image_model_is_its_class_own(tmp_path: Path) -> None:
    text = {**SHARED, "model_type": "mistral", "head_dim": 16}
    for said, tied in (({}, True), ({"tie_word_embeddings": False}, False)):
        assert config_of(tmp_path, "mistral3", {"text_config": text, **said}).tie_embeddings is tied
        assert AutoConfig.from_pretrained(tmp_path).tie_word_embeddings is tied


def test_step_3_5_is_read_as_published_and_as_saved(tmp_path: Path) -> None:
    published = config_of(tmp_path, "step3p5", STEP)
    AutoConfig.from_pretrained(tmp_path).save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "config.json").read_text())
    assert STEP["attention_other_setting"] not in saved.values()
    assert load_config(tmp_path) == published
    given = {**SHARED, "model_type": "step3p5", **STEP}
    assert read_model({name: it for name, it in given.items() if name != "num_key_value_heads"}) == read_model(given)
    assert [(it.num_heads, it.window, it.rope.theta) for it in published.attentions] == [
        (4, None, 5e6), (6, 512, 1e4), (6, 512, 1e4), (4, None, 5e6),
    ]  # fmt: skip
    experts = [it.feed_forward for it in published.layers[1:] if isinstance(it.feed_forward, ExpertsConfig)]
    bounds, none = [(it.activation, it.shared_activation) for it in experts], Activation.SILU
    assert bounds == [(none, none), (CappedSilu(7.0), none), (CappedSilu(7.0), CappedSilu(16.0))]
    assert published.layers[0].feed_forward == DenseConfig(96, CappedSilu(16.0))


@pytest.mark.parametrize(("family", "eps"), [("mistral", 1e-6), ("phi3", 1e-5), ("qwen2", 1e-6)])
def test_a_missing_epsilon_is_that_of_transformers(family: str, eps: float, tmp_path: Path) -> None:
    assert config_of(tmp_path, family, {"rms_norm_eps": None}).norm_eps == eps


@pytest.mark.parametrize("scaling", [None, {"type": "default"}])
def test_phi3_is_served_with_a_plain_rotation(scaling: object, tmp_path: Path) -> None:
    changes = {"rope_theta": 500.0, "rope_scaling": scaling, "original_max_position_embeddings": 4096}
    assert config_of(tmp_path, "phi3", {**changes, "partial_rotary_factor": 1.0}).layers[
        0
    ].attention.rope == RopeConfig(500.0)


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        ("phi3", {"rope_scaling": {"type": "longrope"}}, "short_factor must be a list of 8 positive numbers, found"),
        ("phi3", {"rope_scaling": {"type": "su", "short_factor": [1.0] * 8}}, "long_factor must be a list of 8 pos"),
        ("phi3", {"rope_scaling": {"type": "llama3"}}, "one of default, longrope, su, yarn, found 'llama3'"),
        ("phi3", {"partial_rotary_factor": 1.75}, "partial_rotary_factor must be at most 1, found 1.75"),
        ("qwen2", {"partial_rotary_factor": 0.75}, "this family rotates whole heads.*found 0.75"),
        ("gemma2", {"use_bidirectional_attention": True}, "use_bidirectional_attention must be absent or false"),
        ("gemma2", {"attn_logit_softcapping": -1}, "attn_logit_softcapping must be a positive number, found -1"),
        ("gemma2", {"final_logit_softcapping": 0}, "final_logit_softcapping must be a positive number, found 0"),
        ("gemma2", {"hidden_activation": "relu"}, "hidden_activation must be one of gelu_pytorch_tanh, gelu, silu"),
        (
            "qwen2",
            {"model_type": "idefics3", "text_config": {}},
            "'idefics3' also sees images, .*; `hallmark models` lists",
        ),
        ("internvl", {"text_config": {"model_type": "phi3"}}, "text_config: model_type must be one of qwen2, qwen3"),
        (
            "internvl",
            {"model_type": "minimax_m3_vl", "text_config": {}},
            "not supported: its attention reads blocks of keys that an indexer chooses, which no path computes: serve",
        ),
        (
            "muse_glimmer",
            {"text_config": {**SHARED, "layer_rope_theta": [0, 500.0, 500.0, 0]}},
            r"layer_rope_theta must be a list of 4 numbers that are 0 or rope_theta \(10000\)",
        ),
        ("internvl_chat", {"llm_config": {"model_type": "internlm2"}}, "llm_config: model_type must be one of qwen2"),
        (
            "internvl_chat",
            {"llm_config": {"model_type": "qwen3"}, "use_llm_lora": 16},
            "use_llm_lora must be absent or 0",
        ),
        ("qwen3_vl_moe", {"text_config": {"norm_topk_prob": False}}, "norm_topk_prob must be absent or true"),
        ("qwen3_vl", {"text_config": {"use_sliding_window": True}}, "use_sliding_window must be absent or false"),
        ("glm4v_moe", {"text_config": {"use_qk_norm": True}}, "use_qk_norm must be absent or false"),
        (
            "glm4v_x",
            {"text_config": {}},
            "'glm4v_x' also sees images, .*; nearest: .*glm4v_moe .Glm4vMoeForCondi",
        ),
        ("glm4v", {"text_config": {**SHARED, "head_dim": 32}}, OWN_SIZE),
        ("mistral3", {"text_config": {"model_type": "other"}}, "text_config: model_type must be one of mistral"),
        ("phi3", {"layer_types": MIXED}, "layer_types must be absent"),
        ("mistral", {"layer_types": MIXED}, "layer_types must be absent"),
        ("mistral", {"sliding_window": 0}, "sliding_window must be a positive integer, found 0"),
        ("mistral", {"sliding_window": "4096"}, "sliding_window must be a positive integer, found '4096'"),
        ("mistral", {"architectures": ["LlamaForCausalLM"]}, "supported: MistralForCausalLM"),
        ("mistral", {"rope_scaling": {"type": "dynamic"}}, "one of default, linear, llama3, yarn, found 'dynamic'"),
        ("gemma2", {"hidden_activation": "relu"}, "gelu, silu, swish"),
        ("qwen2", {"rope_scaling": {"type": "mrope"}}, "one of default, linear, llama3, yarn, found 'mrope'"),
        ("qwen2", {"use_sliding_window": "no"}, "use_sliding_window must be true or false, found 'no'"),
        ("qwen2", {**ON, "max_window_layers": -1}, "max_window_layers must be an integer from 0 on, found -1"),
        ("qwen2", {"layer_types": MIXED, "sliding_window": 8}, "layer_types must be all full_attention where"),
        ("qwen3", {}, "head_dim must be a positive integer, found nothing"),
        ("qwen3", {"head_dim": 16, **ON, "layer_types": ["chunked_attention"] * 4}, "a list of 4 of full_attention"),
        ("qwen3", {"head_dim": 16, **ON, "layer_types": MIXED[:3]}, "layer_types must be a list of 4"),
        (
            "qwen3",
            {"head_dim": 16, "model_type": "qwen3_omni"},
            "'qwen3_omni' .*; nearest: qwen3.* lists all",
        ),
        ("glm4", {"quantization_config": {"quant_method": "fp8"}}, "quantization_config must be absent"),
        ("ernie4_5_moe", {"moe_norm_min": 0.1}, "moe_norm_min must be absent or 1e-12"),
        ("mellum", {"mlp_layer_types": ["sparse", "dense"]}, "mlp_layer_types must be a list of 4 of sparse, dense"),
        ("minimax_m2", {"rotary_dim": 7}, "rotary_dim must be whole pairs of dimensions .it is 7 of 128"),
        ("minimax_m2", {"attn_type_list": [1, 0, 1, 1]}, "attn_type_list must be a list of 4 times 1"),
        ("hunyuan_v1_dense", {"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "alpha must be a positive number"),
        ("hunyuan_v1_moe", {"use_cla": True}, "use_cla must be absent or false"),
        ("hunyuan_v1_moe", {"num_shared_expert": [1, 2, 1, 1]}, "num_shared_expert must be 1 in all 4 layers"),
        (
            "laguna",
            {"num_attention_heads_per_layer": [4, 4, 3, 4]},
            "per_layer must be multiples of num_key_value_heads",
        ),
        ("afmoe", {"route_norm": False}, "route_norm must be absent or true"),
        ("afmoe", {"global_attn_every_n_layers": 0}, "global_attn_every_n_layers must be a positive integer"),
        ("gemma", {"hidden_act": "relu"}, "hidden_act must be one of gelu_pytorch_tanh, gelu, silu"),
        ("gemma", {"hidden_activation": "gelu"}, "hidden_activation must be absent or gelu_pytorch_tanh"),
        ("laguna", {"gating_types": ["per_element"] * 4}, "gating_types must be per_head in all layers"),
        ("laguna", {"moe_router_logit_softcapping": 5.0}, "moe_router_logit_softcapping must be absent or 0.0"),
        (
            "mimo_v2_flash",
            {**MIMO, "hybrid_layer_pattern": [0, 2, 1, 1]},
            "pattern must be a list of 4 of 0",
        ),
        (
            "mimo_v2_flash",
            {**MIMO, "layer_types": ["full_attention"] * 4},
            "must be what layer_types says",
        ),
        ("mimo_v2_flash", {**MIMO, "rms_norm_eps": 1e-6}, "layernorm_epsilon must be what rms_norm_eps says"),
        ("mimo_v2_flash", {**MIMO, "v_head_dim": 200}, "v_head_dim must be at most 192"),
        ("mimo_v2_flash", {**MIMO, "swa_v_head_dim": 64}, "swa_v_head_dim must be 128, as in layers without a window"),
        ("mimo_v2_flash", {**MIMO, "swa_num_key_value_heads": 3}, "swa_num_key_value_heads must be a divisor of 4"),
        ("mimo_v2_flash", {**MIMO, "partial_rotary_factor": 0.33}, "partial_rotary_factor must be a share of head_dim"),
        ("mimo_v2_flash", {**MIMO, "rope_scaling": {"type": "yarn"}}, "type must be one of default, found 'yarn'"),
        ("mimo_v2_flash", {**MIMO, "add_swa_attention_sink_bias": False}, "sink_bias must be absent or true"),
        (
            "mimo_v2",
            {**MIMO, "attention_projection_layout": "fused_qkv"},
            "must be absent or split, but of weights of fp8",
        ),
        ("mimo_v2", {**MIMO, "rope_parameters": {"rope_theta": 1e4}}, "rope_theta must be 5000000.0, as beside rope_p"),
        (
            "mimo_v2",
            {
                **MIMO,
                "quantization_config": {**BLOCKS_OF_FP8, "store_dtype": "mxfp4"},
                "attention_projection_layout": "fused_qkv",
            },
            "store_dtype must be absent .experts of another format",
        ),
        ("mimo_v2", {**MIMO, "sliding_window": None}, "layer_types must be all full_attention where"),
        ("step3p5", {**STEP, "layer_types": None}, "layer_types must be a list of 4 of full_attention, sliding"),
        ("step3p5", {**STEP, "use_head_wise_attn_gate": False}, "use_head_wise_attn_gate must be absent or true"),
        ("step3p5", {**STEP, "num_key_value_heads": 4}, "num_attention_groups must be 4, as num_key_value_heads says"),
        ("step3p5", {**STEP, "swiglu_limits": [7.0]}, "swiglu_limits must be a list of 4 numbers from 0 on, or null"),
        ("step3p5", {**STEP, "moe_layers_enum": "1,9"}, "moe_layers_enum must be numbers of layers below 5 where"),
        ("step3p5", {**STEP, "yarn_only_types": None}, r"yarn_only_types must be \['full_attention'\], whose rotation"),
        (
            "step3p5",
            {**STEP, "rope_theta": [1e4, 1e4, 1e3, 1e4]},
            "rope_theta must be the same number for all layers of",
        ),
        (
            "step3p5",
            {**STEP, "attention_other_setting": {"num_attention_groups": 1}},
            "attention_other_setting: num_attention_groups must be 2, as in the other layers, found 1",
        ),
        ("llama4_text", {"num_experts_per_tok": 2}, "num_experts_per_tok must be absent or 1"),
        (
            "llama4_text",
            {"attention_chunk_size": None, "layer_types": ["chunked_attention"] * 4},
            "layer_types must be all full_attention where attention_chunk_size is null",
        ),
        (
            "nemotron_h",
            {"hybrid_override_pattern": "M*-E", "mlp_bias": True},
            "mlp_bias must be false, or missing, where layers have experts",
        ),
        (
            "nemotron_h",
            {"hybrid_override_pattern": "M*-E", "n_shared_experts": 2},
            "n_shared_experts must be 1, or mis",
        ),
        (
            "nemotron_h",
            {"hybrid_override_pattern": "M*-E", "num_experts_per_tok": 9},
            "num_experts_per_tok must be at most 8, found 9",
        ),
        (
            "nemotron_h",
            {"hybrid_override_pattern": "M-M-"},
            "hybrid_override_pattern must be such that a layer",
        ),
        ("nemotron_h", {"hybrid_override_pattern": "M-*"}, "num_hidden_layers must be 3, the layers that hybrid_over"),
        ("kimi_linear", {"mla_use_nope": False}, "mla_use_nope must be absent or true"),
        (
            "kimi_linear",
            {"num_experts": 8, "num_local_experts": 6},
            "num_local_experts must be 8, as num_experts, or m",
        ),
        (
            "kimi_linear",
            {"num_key_value_heads": 4, "linear_attn_config": {"full_attn_layers": [0, 2], "kda_layers": [1, 3]}},
            "full_attn_layers must be a list which with kda_layers has each number from 1 to 4 once",
        ),
        (
            "kimi_linear",
            {"num_key_value_heads": 4, "linear_attn_config": {"gate_lower_bound": -5.0}},
            "gate_lower_bound",
        ),
        ("nemotron-nas", {}, "block_configs must be a list of 4 objects, found nothing"),
        (
            "nemotron-nas",
            {"block_configs": [LINEAR] * 4},
            "replace_with_linear must be absent, null or false .*found True",
        ),
        ("nemotron-nas", {"block_configs": [EMPTY] * 4}, "block_configs must be such that a layer attends"),
        ("hy_v3", {"first_k_dense_replace": 2}, "first_k_dense_replace must be absent or 1"),
        ("ministral3", {"rope_parameters": {"rope_type": "default"}}, "original_max_position_embeddings must be a pos"),
        ("bailing_moe", {"architectures": ["BailingMoeForCausalLM"]}, "supported: BailingMoeV2ForCausalLM"),
        ("bailing_moe", {"rotary_dim": 7}, r"rotary_dim must be whole pairs of dimensions \(it is 7 of 128\)"),
        (
            "bailing_moe",
            {"rotary_dim": 64, "partial_rotary_factor": 0.25},
            "rotary_dim must be what partial_rotary_factor says: 32 of 128",
        ),
        (
            "bailing_hybrid",
            {"architectures": ["BailingMoeV3ForCausalLM"]},
            "supported: BailingMoeV2_5ForCausalLM; that class is Ling 3.0's, whose decays are bounded",
        ),
        ("bailing_hybrid", {"kda_lower_bound": -5.0}, "kda_lower_bound must be absent"),
        ("bailing_hybrid", {"linear_silu": True}, "linear_silu must be absent or false"),
        (
            "bailing_hybrid",
            {"partial_rotary_factor": 0.25},
            r"such that qk_rope_head_dim \(64\) of head_dim \(128\) are",
        ),
        ("bailing_hybrid", {"rotary_dim": 32}, r"rotary_dim must be qk_rope_head_dim \(64\)"),
        ("bailing_hybrid", {"group_norm_size": 7}, r"a divisor of num_attention_heads times head_dim \(512\)"),
        ("bailing_hybrid", {"num_kv_heads_for_linear_attn": 2}, r"must be num_attention_heads \(4\)"),
        ("bailing_moe", {"norm_topk_prob": False}, "norm_topk_prob must be absent or true"),
        ("bailing_moe", {"moe_shared_expert_intermediate_size": 64}, r"must be moe_intermediate_size \(512\)"),
        ("arcee", {"hidden_act": "silu"}, "hidden_act must be one of relu2, found 'silu'"),
        ("cohere", {"use_qk_norm": True}, "use_qk_norm must be absent or false"),
        ("cohere", {"quantization_config": {"quant_method": "fp8"}}, "quantization_config must be absent"),
        ("cwm", {"attention_bias": True}, "attention_bias must be absent or false"),
        ("dots1", {"n_routed_experts": None}, "n_shared_experts must be a positive integer, found nothing"),
        (
            "granite_swa",
            {"layer_rope_theta": [1, 2]},
            "must be a list of 4 numbers, each 0 or above 1",
        ),
        ("olmoe", {"clip_qkv": 8.0}, "clip_qkv must be absent"),
        ("stablelm", {"qk_layernorm": True}, "qk_layernorm must be absent or false"),
        ("stablelm", {"head_dim": 8}, OWN_SIZE),
        ("stablelm", {"partial_rotary_factor": 0.2}, "partial_rotary_factor must be a share of head_dim"),
        ("nemotron", {"hidden_act": "silu"}, "hidden_act must be one of relu2, found 'silu'"),
        ("olmo", {"clip_qkv": 8.0}, "clip_qkv must be absent"),
        ("starcoder2", {"hidden_act": "silu"}, "hidden_act must be one of gelu_pytorch_tanh, gelu_new, gelu_fast, "),
        ("gpt2", {"n_embd": 32}, r"hidden_size must be absent beside n_embd, or the same \(32\), found 64"),
        ("gpt2", {"hidden_size": None, "n_embd": 0}, "n_embd must be a positive integer, found 0"),
        ("gpt2", {"n_inner": 0.5}, "n_inner must be a positive integer, found 0.5"),
        ("gpt2", {"activation_function": "silu"}, "activation_function must be one of gelu_pytorch_tanh"),
        ("gpt2", {"quantization_config": {"quant_method": "gptq"}}, "quantization_config must be absent"),
        ("apertus", {"hidden_act": "silu"}, "hidden_act must be one of xielu, found 'silu'"),
        ("apertus", {"qk_norm": False}, "qk_norm must be absent or true"),
        ("apertus", {"post_norm": True}, "post_norm must be absent or false"),
        ("gpt_bigcode", {"multi_query": 1}, "multi_query must be true or false, found 1"),
        ("gpt_bigcode", {"n_layer": 3}, r"num_hidden_layers must be absent beside n_layer, or the same \(3\), found 4"),
        ("gpt_neox", {"head_dim": 8}, OWN_SIZE),
        ("gpt_neox", {"rotary_pct": 0.2}, "rotary_pct must be a share of head_dim"),
        ("gpt_neox", {"rotary_emb_base": -1}, "rotary_emb_base must be a positive number"),
        ("gpt_neox", {"hidden_act": "silu"}, "hidden_act must be one of gelu_pytorch_tanh, gelu_new, gelu_fast, gelu,"),
        ("gpt_neox", {"quantization_config": {"quant_method": "gptq"}}, "quantization_config must be absent"),
        ("phimoe", {"num_experts_per_tok": 3}, "num_experts_per_tok must be 2: a sparse mixer"),
        ("phimoe", {"router_jitter_noise": 0}, "router_jitter_noise must be a positive number"),
        (
            "phimoe",
            {
                "rope_scaling": {**longrope(8), "short_mscale": 1.2, "long_mscale": 1.3},
                "original_max_position_embeddings": 4096,
            },
            r"long_mscale must be short_mscale \(1.2\)",
        ),
        ("opt", {"do_layer_norm_before": False}, "do_layer_norm_before must be absent or true"),
        ("opt", {"word_embed_proj_dim": 32}, r"word_embed_proj_dim must be hidden_size \(64\) or absent"),
        ("opt", {"activation_function": "silu"}, "activation_function must be one of gelu_pytorch_tanh"),
        ("opt", {"ffn_dim": 0}, "ffn_dim must be a positive integer, found 0"),
        ("opt", {"_remove_final_layer_norm": True}, "_remove_final_layer_norm must be absent or false"),
        ("opt", {"layer_norm_elementwise_affine": False}, "layer_norm_elementwise_affine must be absent or true"),
        ("phi", {"qk_layernorm": True}, "qk_layernorm must be absent or false"),
        ("bamba", {"attn_layer_indices": None}, "attn_layer_indices must be such that a layer attends"),
        ("bamba", {"attn_layer_indices": [4]}, r"attn_layer_indices must be a list of integers in \[0, 4\)"),
        ("bamba", {"attn_rotary_emb": 24}, "attn_rotary_emb must be 8, the rotated dimensions of a head, or missing"),
        ("bamba", {"partial_rotary_factor": 0.25}, "partial_rotary_factor must be 0.5, which its class takes"),
        ("bamba", {"mamba_conv_bias": False}, "mamba_conv_bias must be absent or true"),
        ("bamba", {"attn_layer_indices": [1], "mamba_d_head": 63}, 'mamba_d_head must be "auto" or 1,'),
        ("internlm2", {"head_dim": 32}, OWN_SIZE),
        ("minicpm", {"head_dim": 32}, OWN_SIZE),
        ("internlm3", {"qkv_bias": True}, "qkv_bias must be the same as qkv_bias, attention_bias, bias and mlp_bias"),
        ("internlm3", {"bias": True, "qkv_bias": False}, "bias must be the same as qkv_bias"),
        ("minicpm", {"sparse_config": {"block_size": 64}}, "sparse_config must be absent"),
        ("minicpm", {"num_experts": 8}, "num_experts must be absent or 0"),
        ("minicpm3", {"hidden_size": 66}, "hidden_size must be a multiple of num_attention_heads"),
        ("minicpm3", {"attention_bias": True}, "attention_bias must be absent or false"),
        ("falcon_h1", {"mamba_rms_norm": True}, "mamba_norm_before_gate must be false where mamba_rms_norm is true"),
        ("falcon_h1", {"mamba_d_ssm": 1030}, r"mamba_n_heads must be a divisor of mamba_d_ssm \(1030\)"),
        ("falcon_h1", {"ssm_multipliers": [1.0] * 4}, "ssm_multipliers must be a list of 5 positive numbers"),
        ("falcon_h1", {"mlp_multipliers": 0.5}, "mlp_multipliers must be a list of 2 positive numbers"),
        ("falcon_h1", {"projectors_bias": True}, "projectors_bias must be absent or false"),
        (
            "falcon_h1",
            {"attention_bias": True, "attention_in_multiplier": 0.5},
            "attention_in_multiplier must be 1, or missing, where attention_bias",
        ),
        ("youtu", {"head_dim": 2}, r"head_dim must be qk_rope_head_dim \(64\), or missing"),
        ("youtu", {"rope_interleave": False}, "rope_interleave must be absent or true"),
        ("cohere2", {"use_qk_norm": True}, "use_qk_norm must be absent or false"),
        ("cohere2_moe", {"expert_selection_fn": "tanh"}, "expert_selection_fn must be one of softmax, sigmoid"),
        ("cohere2_moe", {"shared_expert_combination_strategy": "max"}, "strategy must be one of average, sum"),
        ("exaone4", {"sliding_window_pattern": "LLLG"}, "sliding_window_pattern must be a positive integer"),
        ("olmo3", {"sliding_window": None, "layer_types": MIXED}, "layer_types must be all full_attention where"),
        (
            "smollm3",
            {"no_rope_layers": [1, 0, 1]},
            "no_rope_layers must be a list of 0 and 1, one for each of 4 layers",
        ),
        ("mixtral", {"num_experts_per_tok": 9}, "num_experts_per_tok must be at most 8"),
        ("qwen3_moe", {"mlp_only_layers": [4]}, r"mlp_only_layers must be a list of integers in \[0, 4\), found \[4\]"),
        ("glm4_moe", {"n_group": 3}, r"n_group must be a number of groups of n_routed_experts \(128\)"),
        ("glm4_moe", {"n_group": 2, "topk_group": 3}, "topk_group must be at most 2"),
        ("glm4_moe", {"n_group": 64, "topk_group": 2}, "num_experts_per_tok must be at most 4"),
        (
            "mixtral",
            {"quantization_config": {"quant_method": "quip"}},
            "quant_method must be one of fp8, .* found 'quip'",
        ),
        ("gpt_oss", {"quantization_config": {"quant_method": "awq"}}, "quant_method must be one of mxfp4, found 'awq'"),
        (
            "qwen3_5_text",
            {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}},
            "linear_attn.in_proj_b and linear_attn.in_proj_a in fp8_blocks are not supported, whose rows are",
        ),
        (
            "qwen3_5_text",
            {"quantization_config": {"quant_method": "fp8", "modules_to_not_convert": ["linear_attn.in_proj_z"]}},
            "layers.0.linear_attn.in_proj_qkv fp8_rows, .*in_proj_z plain: they are multiplied as one, and must all be",
        ),
        (
            "gpt_oss",
            {"quantization_config": {"quant_method": "mxfp4"}, "intermediate_size": 100},
            "intermediate_size must be a multiple of 32, the numbers in a block of mxfp4, found 100",
        ),
    ],
)
def test_what_is_not_supported_is_refused_by_name(
    family: str, changes: dict[str, object], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ModelError, match=message) as caught:
        config_of(tmp_path, family, changes)
    assert str(tmp_path / "config.json") in str(caught.value)


def test_mimo_v2_is_read_as_published_and_as_saved(tmp_path: Path) -> None:
    published = config_of(tmp_path, "mimo_v2_flash", MIMO)
    saved = MiMoV2FlashConfig(
        **{**SHARED, "rms_norm_eps": 1e-5}, layer_types=MIXED, mlp_layer_types=["dense"] + ["sparse"] * 3,
        sliding_window=129,
    )  # fmt: skip
    saved.save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(
        json.dumps(json.loads((tmp_path / "config.json").read_text()) | {"architectures": ["MiMoV2FlashForCausalLM"]})
    )
    assert published == replace(load_config(tmp_path), bos_token_id=None)
    full, local = (published.layers[at].attention for at in (0, 1))
    assert (full.window, full.num_kv_heads, full.has_sinks, full.rope.theta) == (None, 2, False, 5e6)
    assert (local.window, local.num_kv_heads, local.has_sinks, local.rope.theta) == (129, 4, True, 1e4)
    for it in (full, local):
        assert (it.values, it.value_scale, it.scale) == (Values(128), 0.707, pytest.approx(192**-0.5))
    assert full.rope.rotated_dims(192) == 64
    later = config_of(tmp_path, "mimo_v2", {**MIMO, "attention_value_scale": None})
    repeated = {"rope_type": "default", "type": "default", "rope_theta": 5_000_000}
    assert later == config_of(tmp_path, "mimo_v2", {**MIMO, "attention_value_scale": None, "rope_parameters": repeated})
    assert later.windows == (None, 128, 128, None)  # its own class counts the token itself among 128
    assert later.layers[0].attention.value_scale == 1


@pytest.mark.parametrize(
    ("changes", "chunks"),
    [
        ({"attention_chunk_size": 64}, (64, 64, 64, None)),
        (
            {"attention_chunk_size": 64, "layer_types": [*["full_attention"] * 3, "chunked_attention"]},
            (*[None] * 3, 64),
        ),
        ({"attention_chunk_size": None}, (None,) * 4),
        ({"attention_chunk_size": 8192}, (None,) * 4),  # as many as there are positions
    ],
)
def test_chunks_of_positions_are_read(changes: dict[str, object], chunks: Windows, tmp_path: Path) -> None:
    config = config_of(tmp_path, "llama4_text", changes)
    assert config.chunks == chunks
    assert (config.max_position, config.longest_context) == (8192, 8192)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, (True,) * 4),
        ({"index_topk_freq": 2, "index_skip_topk_offset": 1}, (True, False, True, False)),
        ({"index_topk_pattern": "FSFS"}, (True, False, True, False)),
        ({"indexer_types": ["full", "shared", "shared", "full"], "index_topk_freq": 1}, (True, False, False, True)),
        ({"indexer_types": ["full", "shared", "pooled", "full"]}, "indexer_types"),
        ({"index_topk_pattern": "FSCF"}, "index_topk_pattern"),
        ({"indexer_types": ["shared", "full", "full", "full"]}, "'full' of the first layer"),
        ({"indexer_rope_interleave": False}, "indexer_rope_interleave"),
        ({"q_lora_rank": None}, "q_lora_rank"),
        ({"index_head_dim": 4}, "at least qk_rope_head_dim"),
    ],
)
def test_layers_without_an_indexer_are_read(
    changes: dict[str, object], expected: tuple[bool, ...] | str, tmp_path: Path
) -> None:
    given = {**SHARED, **OF_LAYERS["glm_moe_dsa"], **changes}
    if isinstance(expected, str):
        with pytest.raises((ModelConfigError, ModelError), match=expected):
            config_of(tmp_path, "glm_moe_dsa", given)
        return
    config = config_of(tmp_path, "glm_moe_dsa", given)
    indexers = [it.values.indexer for it in config.attentions if it.values is not None]
    assert tuple(it is not None and it.heads > 0 for it in indexers) == expected
    sizes = [1152 + 256 * own for own in expected]  # bytes in 16 bits: 512 and 64 numbers, and 128 of an indexer
    assert kv_bytes_per_token(config, Dtype.BF16, Dtype.BF16) == sum(sizes)
