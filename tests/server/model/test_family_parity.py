"""Each family against transformers on tiny random checkpoints that transformers itself writes (fp32, CPU)."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from paged_runner import PagedRunner
from torch import Tensor
from transformers import (
    MistralConfig,
    MistralForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from qualification.model.config import num_parameters
from server.model.decoder import Decoder
from server.model.load.load import load_config, load_decoder
from server.settings import LoadFormat

CPU = torch.device("cpu")
TOLERANCE = 1e-4
NUM_TOKENS = 60  # several windows
FAMILIES = {
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
    "mistral": (MistralConfig, MistralForCausalLM),
    "phi3": (Phi3Config, Phi3ForCausalLM),
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
WINDOWED: dict[str, tuple[str, dict[str, object]]] = {
    "qwen2, windows in the later layers": ("qwen2", {**SWITCHED_ON, "max_window_layers": 1}),
    "qwen3, windows by layer types": ("qwen3", {"head_dim": 12, **SWITCHED_ON, "layer_types": MIXED}),
    "mistral, window": ("mistral", {"sliding_window": 9}),
    "mistral, window of one": ("mistral", {"sliding_window": 1}),
    "phi3, window": ("phi3", {"sliding_window": 9}),
}
VARIANTS: dict[str, tuple[str, dict[str, object]]] = {
    **WINDOWED,
    "qwen2": ("qwen2", {}),
    "qwen2, tied, yarn": ("qwen2", {"tie_word_embeddings": True, "rope_parameters": YARN, "hidden_size": 64}),
    "qwen2, a window that is not switched on": ("qwen2", {"sliding_window": 9, "max_window_layers": 0}),
    "qwen3, wide heads": ("qwen3", {"head_dim": 18}),  # 4 * 18 is not the hidden size, and 9 is no power of two
    "qwen3, tied, biases": ("qwen3", {"head_dim": 8, "tie_word_embeddings": True, "attention_bias": True}),
    "mistral, no window": ("mistral", {"sliding_window": None}),
    "mistral, wide heads": ("mistral", {"sliding_window": None, "head_dim": 18}),
    "phi3": ("phi3", {}),
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
    model.save_pretrained(folder)
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
def test_logits_equal_those_of_transformers_in_one_pass_and_in_chunks(variant: str, tmp_path: Path) -> None:
    reference = save_reference(tmp_path, *VARIANTS[variant])
    runner = PagedRunner(load(tmp_path))
    for chunks in ([1], [7], [NUM_TOKENS], [13, 1, 3, 32, 1, 1, 9]):
        token_ids = prompt(sum(chunks))
        error = (runner.logits(token_ids, chunks) - reference_logits(reference, token_ids)).abs().max()
        assert error <= TOLERANCE


@pytest.mark.parametrize("variant", WINDOWED)
def test_the_comparison_sees_a_window_that_is_one_too_wide(variant: str, tmp_path: Path) -> None:
    reference = save_reference(tmp_path, *WINDOWED[variant])
    decoder = load(tmp_path)
    layers = [
        replace(layer, attention=replace(layer.attention, window=layer.attention.window and layer.attention.window + 1))
        for layer in decoder.config.layers
    ]
    wider = Decoder(replace(decoder.config, layers=tuple(layers)), decoder.weights)
    token_ids = prompt(NUM_TOKENS)
    error = (PagedRunner(wider).logits(token_ids, [NUM_TOKENS]) - reference_logits(reference, token_ids)).abs().max()
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
    assert num_parameters(load_config(tmp_path)) == reference.num_parameters()
