"""Families against transformers, on tiny random checkpoints that transformers itself writes (fp32, CPU)."""

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from paged_runner import PagedRunner
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3Config,
    Gemma3ForCausalLM,
    Gemma3ForConditionalGeneration,
    Gemma3TextConfig,
    Glm4MoeConfig,
    Glm4MoeForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    GraniteConfig,
    GraniteForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Olmo2Config,
    Olmo2ForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    PreTrainedModel,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen2MoeConfig,
    Qwen2MoeForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from qualification.model.config import AttentionConfig, RopeConfig, num_parameters
from server.model.decoder import Decoder
from server.model.kv_cache import KVCache
from server.model.load.load import load_config, load_decoder
from server.model.step import Step
from server.settings import LoadFormat

CPU = torch.device("cpu")
TOLERANCE = 1e-4
NUM_TOKENS = 60  # several windows
FAMILIES = {
    "llama": (LlamaConfig, LlamaForCausalLM),
    "gemma2": (Gemma2Config, Gemma2ForCausalLM),
    "gemma3": (Gemma3TextConfig, Gemma3ForCausalLM),
    "olmo2": (Olmo2Config, Olmo2ForCausalLM),
    "granite": (GraniteConfig, GraniteForCausalLM),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
    "mistral": (MistralConfig, MistralForCausalLM),
    "phi3": (Phi3Config, Phi3ForCausalLM),
    "qwen2_moe": (Qwen2MoeConfig, Qwen2MoeForCausalLM),
    "qwen3_moe": (Qwen3MoeConfig, Qwen3MoeForCausalLM),
    "mixtral": (MixtralConfig, MixtralForCausalLM),
    "gpt_oss": (GptOssConfig, GptOssForCausalLM),
    "glm4_moe": (Glm4MoeConfig, Glm4MoeForCausalLM),
}
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
GEMMA = {"head_dim": 12, "query_pre_attn_scalar": 7, "sliding_window": 9}
GEMMA_2 = {**GEMMA, "attn_logit_softcapping": 5.0, "final_logit_softcapping": 3.0}
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
MIXTRAL = {"num_local_experts": 5, "num_experts_per_tok": 2}
GPT_OSS = {"num_local_experts": 5, "num_experts_per_tok": 3, "head_dim": 12, "sliding_window": 9}
MXFP4 = {"hidden_size": 64, "intermediate_size": 96}
GLM = {"n_routed_experts": 12, "num_experts_per_tok": 3, "moe_intermediate_size": 20, "head_dim": 12}


def longrope(num_pairs: int) -> dict[str, object]:
    factors = {
        "short_factor": [1.0 + n / 9 for n in range(num_pairs)],
        "long_factor": [2.0 + n for n in range(num_pairs)],
    }
    return {"rope_type": "longrope", "rope_theta": 500.0, **factors}


WINDOWED: dict[str, tuple[str, dict[str, object]]] = {
    "qwen2, windows in the later layers": ("qwen2", {**SWITCHED_ON, "max_window_layers": 1}),
    "qwen3, windows by layer types": ("qwen3", {"head_dim": 12, **SWITCHED_ON, "layer_types": MIXED}),
    "mistral, window": ("mistral", {"sliding_window": 9}),
    "mistral, window of one": ("mistral", {"sliding_window": 1}),
    "phi3, window": ("phi3", {"sliding_window": 9}),
    "gemma2": ("gemma2", GEMMA_2),
    "gemma3": ("gemma3", {**GEMMA, "layer_types": MIXED, "rope_parameters": TWO_ROPES}),
    "gpt_oss": ("gpt_oss", GPT_OSS),
    "qwen3_moe, window": ("qwen3_moe", {**QWEN_3_MOE, **SWITCHED_ON}),
    "mixtral, window": ("mixtral", {**MIXTRAL, "sliding_window": 9}),
}
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 500.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}  # fmt: skip
BETAS = {"truncate": False, "beta_fast": 8.0, "beta_slow": 2.0}
ROTATED: dict[str, tuple[str, dict[str, object]]] = {
    "llama, linear": ("llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 1000.0, "factor": 3.0}}),
    "llama, llama3": ("llama", {"rope_parameters": LLAMA3, "head_dim": 16}),
    "llama, yarn": ("llama", {"rope_parameters": YARN, "head_dim": 16}),
    "llama, attention factor": ("llama", {"rope_parameters": {**YARN, "attention_factor": 0.7}, "head_dim": 16}),
    "llama, two scales": ("llama", {"rope_parameters": {**YARN, "mscale": 1.5, "mscale_all_dim": 0.5}, "head_dim": 16}),
    "llama, no truncation": ("llama", {"rope_parameters": {**YARN, **BETAS}, "head_dim": 16}),
}
VARIANTS: dict[str, tuple[str, dict[str, object]]] = {
    **WINDOWED,
    **ROTATED,
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
    "qwen3_moe": ("qwen3_moe", QWEN_3_MOE),
    "qwen3_moe, one expert, tied": ("qwen3_moe", {**QWEN_3_MOE, "num_experts_per_tok": 1, "tie_word_embeddings": True}),
    "qwen3_moe, all experts": ("qwen3_moe", {**QWEN_3_MOE, "num_experts_per_tok": 7, "norm_topk_prob": True}),
    "qwen3_moe, a dense layer": ("qwen3_moe", {**QWEN_3_MOE, "mlp_only_layers": [1], "norm_topk_prob": True}),
    "qwen3_moe, every other layer": ("qwen3_moe", {**QWEN_3_MOE, "decoder_sparse_step": 2}),
    "qwen2_moe": ("qwen2_moe", QWEN_2_MOE),
    "qwen2_moe, a dense layer": ("qwen2_moe", {**QWEN_2_MOE, "mlp_only_layers": [0], "norm_topk_prob": True}),
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
    "glm4_moe, two dense layers": ("glm4_moe", {**GLM, "first_k_dense_replace": 2, "n_shared_experts": 2}),
    "phi3, no groups, tied": ("phi3", {"num_key_value_heads": 4, "tie_word_embeddings": True}),
}


def save_reference(folder: Path, family: str, changes: Mapping[str, object]) -> PreTrainedModel:
    torch.manual_seed(0)
    config_class, model_class = FAMILIES[family]
    model: PreTrainedModel = model_class(config_class(**{**TINY, **changes})).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith(("norm.weight", "bias")):  # transformers starts them at 1 and 0, which would hide them
                weight.uniform_(0.5, 1.5)
        for name, buffer in model.named_buffers():
            if name.endswith("correction_bias"):
                buffer.uniform_(-0.5, 0.5)
    model.save_pretrained(folder)
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


def load(folder: Path) -> Decoder:
    return load_decoder(folder, load_config(folder), dtype=torch.float32, device=CPU, load_format=LoadFormat.AUTO)


def prompt(num_tokens: int) -> Tensor:
    return torch.randint(97, (num_tokens,), generator=torch.Generator().manual_seed(num_tokens))


@torch.no_grad()
def reference_logits(model: PreTrainedModel, token_ids: Tensor) -> Tensor:
    logits: Tensor = model(token_ids[None]).logits[0]
    return logits


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_equal_those_of_transformers_also_in_chunks(variant: str, tmp_path: Path) -> None:
    reference = save_reference(tmp_path, *VARIANTS[variant])
    runner = PagedRunner(load(tmp_path))
    for chunks in ([1], [7], [NUM_TOKENS], [13, 1, 3, 32, 1, 1, 9]):
        token_ids = prompt(sum(chunks))
        error = (runner.logits(token_ids, chunks) - reference_logits(reference, token_ids)).abs().max()
        assert error <= TOLERANCE


def test_experts_of_four_bits_equal_unpacked_ones(tmp_path: Path) -> None:
    reference = save_mxfp4(tmp_path, MXFP4)
    token_ids = prompt(NUM_TOKENS)
    logits = PagedRunner(load(tmp_path)).logits(token_ids, [13, 1, 3, 32, 1, 1, 9])
    assert (logits - reference_logits(reference, token_ids)).abs().max() <= TOLERANCE


VISION = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
IMAGE_MODELS: dict[str, tuple[type, type, dict[str, object], dict[str, object]]] = {
    "gemma3": (
        Gemma3Config,
        Gemma3ForConditionalGeneration,
        {**GEMMA, "layer_types": MIXED, "rope_parameters": TWO_ROPES},
        {**VISION, "image_size": 28, "patch_size": 14},
    ),
    "qwen2.5 vl": (
        Qwen2_5_VLConfig,
        Qwen2_5_VLForConditionalGeneration,
        {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0, "mrope_section": [2, 1, 1]}},
        {"depth": 1, "hidden_size": 16, "num_heads": 2, "intermediate_size": 16, "out_hidden_size": 32},
    ),
}


@pytest.mark.parametrize("names", ["as saved", "one model for all parts"])
@pytest.mark.parametrize("kind", IMAGE_MODELS)
def test_the_text_part_of_an_image_model_is_served(kind: str, names: str, tmp_path: Path) -> None:
    config_class, model_class, text, vision = IMAGE_MODELS[kind]
    torch.manual_seed(0)
    config = config_class(text_config={**TINY, **text}, vision_config=vision, eos_token_id=2, tie_word_embeddings=False)
    reference = model_class(config).eval()
    reference.save_pretrained(tmp_path, save_original_format=names == "as saved")
    token_ids = prompt(NUM_TOKENS)
    logits = PagedRunner(load(tmp_path)).logits(token_ids, [7, NUM_TOKENS - 7])
    assert (logits - reference_logits(reference, token_ids)).abs().max() <= TOLERANCE


def unscaled(attention: AttentionConfig) -> AttentionConfig:
    return replace(attention, rope=RopeConfig(attention.rope.theta))


def wider(attention: AttentionConfig) -> AttentionConfig:
    return replace(attention, window=attention.window and attention.window + 1)


@pytest.mark.parametrize(
    ("variant", "change", "num_tokens"),
    [*((it, unscaled, 100) for it in ROTATED.items()), *((it, wider, NUM_TOKENS) for it in WINDOWED.items())],
)
def test_the_comparison_sees_a_changed_rotation_or_window(
    variant: tuple[str, tuple[str, dict[str, object]]],
    change: Callable[[AttentionConfig], AttentionConfig],
    num_tokens: int,
    tmp_path: Path,
) -> None:
    reference = save_reference(tmp_path, *variant[1])
    decoder = load(tmp_path)
    layers = [replace(layer, attention=change(layer.attention)) for layer in decoder.config.layers]
    changed = PagedRunner(Decoder(replace(decoder.config, layers=tuple(layers)), decoder.weights))
    token_ids = prompt(num_tokens)
    error = (changed.logits(token_ids, [num_tokens]) - reference_logits(reference, token_ids)).abs().max()
    assert error > 100 * TOLERANCE


@pytest.mark.parametrize("variant", VARIANTS)
def test_parameters_are_counted_as_transformers_counts_them(variant: str, tmp_path: Path) -> None:
    family, changes = VARIANTS[variant]
    config_class, model_class = FAMILIES[family]
    config = config_class(**{**TINY, **changes})
    config.architectures = [model_class.__name__]
    config.save_pretrained(tmp_path)
    with torch.device("meta"):
        reference = model_class(config)
    num_corrections = sum(it.numel() for name, it in reference.named_buffers() if name.endswith("correction_bias"))
    assert num_parameters(load_config(tmp_path)) == reference.num_parameters() + num_corrections


LONGROPES: dict[str, dict[str, object]] = {
    "whole heads": {"rope_parameters": longrope(4)},
    "part of a head": {"rope_parameters": {**longrope(3), "partial_rotary_factor": 0.75}},
    "attention factor": {"rope_parameters": {**longrope(4), "attention_factor": 1.7}},
}


@pytest.mark.parametrize("variant", LONGROPES)
def test_longrope_is_that_of_the_served_context(variant: str, tmp_path: Path) -> None:
    """Transformers takes the long factors for a longer text, the server where it may become longer."""
    original = {"original_max_position_embeddings": 32}
    changes = {**LONGROPES[variant], **original}
    changes["rope_parameters"] = {**LONGROPES[variant]["rope_parameters"], **original}
    reference = save_reference(tmp_path, "phi3", changes)
    config = load_config(tmp_path)
    for max_position, num_tokens in ((32, 30), (128, NUM_TOKENS)):
        served = replace(config, max_position=max_position)
        decoder = load_decoder(tmp_path, served, dtype=torch.float32, device=CPU, load_format=LoadFormat.AUTO)
        token_ids = prompt(num_tokens)
        logits = PagedRunner(decoder).logits(token_ids, [num_tokens - 5, 1, 4])
        assert (logits - reference_logits(reference, token_ids)).abs().max() <= TOLERANCE


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_gemmas_embeddings_are_scaled_in_the_models_dtype(dtype: torch.dtype, tmp_path: Path) -> None:
    reference = save_reference(tmp_path, "gemma2", GEMMA_2).to(dtype)
    config = replace(load_config(tmp_path), layers=())
    decoder = load_decoder(tmp_path, load_config(tmp_path), dtype=dtype, device=CPU, load_format=LoadFormat.AUTO)
    token_ids = prompt(7)
    bare = Decoder(config, replace(decoder.weights, layers=()))
    step = Step(token_ids, torch.arange(7), torch.arange(7), KVCache([], []), lambda *_: None)
    assert torch.equal(bare.forward(step), reference.model.embed_tokens(token_ids))
