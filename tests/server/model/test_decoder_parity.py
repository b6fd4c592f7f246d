"""The decoder against transformers on tiny random checkpoints that transformers itself writes (fp32, CPU)."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from paged_runner import PAGE_SIZE, PagedRunner
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from qualification.model.config import RopeConfig
from server.model.decoder import Decoder
from server.model.kv_cache import KVCache
from server.model.load.load import load_config, load_decoder
from server.model.step import Step
from server.settings import LoadFormat

CPU = torch.device("cpu")
TOLERANCE = 1e-4

TINY = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "initializer_range": 0.3,  # wide, so that a wrong weight is a wrong logit
}
YARN = {"rope_type": "yarn", "rope_theta": 10_000.0, "factor": 8.0, "original_max_position_embeddings": 16}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
VARIANTS: dict[str, dict[str, object]] = {
    "untied": {},
    "tied": {"tie_word_embeddings": True},
    "biases": {"attention_bias": True, "mlp_bias": True},
    "one kv head": {"num_key_value_heads": 1},
    "no groups": {"num_key_value_heads": 4},
    "wide heads": {"head_dim": 18},  # 4 * 18 is not the hidden size, and 9 is no power of two
    "linear": {"rope_parameters": {"rope_type": "linear", "rope_theta": 1000.0, "factor": 3.0}},
    "llama3": {"rope_parameters": LLAMA3, "head_dim": 16},
    "yarn": {"rope_parameters": YARN, "head_dim": 16},
    "yarn, attention factor": {"rope_parameters": {**YARN, "attention_factor": 0.7}, "head_dim": 16},
    "yarn, two scales": {"rope_parameters": {**YARN, "mscale": 1.5, "mscale_all_dim": 0.5}, "head_dim": 16},
    "yarn, no truncation": {
        "rope_parameters": {**YARN, "truncate": False, "beta_fast": 8.0, "beta_slow": 2.0},
        "head_dim": 16,
    },
}


def save_reference(folder: Path, changes: Mapping[str, object]) -> LlamaForCausalLM:
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**{**TINY, **changes})).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith(("norm.weight", "bias")):  # transformers starts them at 1 and 0, which would hide them
                weight.uniform_(0.5, 1.5)
    model.save_pretrained(folder)
    return model


def load(folder: Path) -> Decoder:
    return load_decoder(folder, load_config(folder), dtype=torch.float32, device=CPU, load_format=LoadFormat.AUTO)


def prompt(num_tokens: int, seed: int = 0) -> Tensor:
    return torch.randint(97, (num_tokens,), generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def reference_logits(model: LlamaForCausalLM, token_ids: Tensor) -> Tensor:
    logits: Tensor = model(token_ids[None]).logits[0]
    return logits


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_equal_those_of_transformers(variant: str, tmp_path: Path) -> None:
    reference = save_reference(tmp_path, VARIANTS[variant])
    runner = PagedRunner(load(tmp_path))
    for num_tokens in (1, 7, 100):
        token_ids = prompt(num_tokens, seed=num_tokens)
        expected = reference_logits(reference, token_ids)
        assert (runner.logits(token_ids, [num_tokens]) - expected).abs().max() <= TOLERANCE


@pytest.mark.parametrize("variant", [name for name, changes in VARIANTS.items() if "rope_parameters" in changes])
def test_the_comparison_sees_a_rotation_that_is_not_scaled(variant: str, tmp_path: Path) -> None:
    reference = save_reference(tmp_path, VARIANTS[variant])
    decoder = load(tmp_path)
    layers = [
        replace(layer, attention=replace(layer.attention, rope=RopeConfig(layer.attention.rope.theta)))
        for layer in decoder.config.layers
    ]
    plain = Decoder(replace(decoder.config, layers=tuple(layers)), decoder.weights)
    error = (PagedRunner(plain).logits(prompt(100), [100]) - reference_logits(reference, prompt(100))).abs().max()
    assert error > 100 * TOLERANCE


def test_chunks_and_single_tokens_over_the_cache_equal_one_pass(tmp_path: Path) -> None:
    reference = save_reference(tmp_path, {})
    token_ids = prompt(60)
    actual = PagedRunner(load(tmp_path)).logits(token_ids, [13, 1, 3, 32, 1, 1, 9])
    assert (actual - reference_logits(reference, token_ids)).abs().max() <= TOLERANCE


def test_two_prompts_in_one_batch_equal_each_alone(tmp_path: Path) -> None:
    reference = save_reference(tmp_path, {})
    decoder = load(tmp_path)
    prompts = [prompt(11, seed=1), prompt(6, seed=2)]

    def attend(_layer: int, q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> None:
        for rows in (slice(0, 11), slice(11, 17)):
            heads = [x[rows].transpose(0, 1)[None] for x in (q, k, v)]
            out[rows] = F.scaled_dot_product_attention(*heads, is_causal=True, enable_gqa=True)[0].transpose(0, 1)

    kv = KVCache.allocate(decoder.config, 5, PAGE_SIZE, torch.float32, CPU)
    positions = torch.cat([torch.arange(11), torch.arange(6)]).int()
    logits = decoder.logits(decoder.forward(Step(torch.cat(prompts), positions, torch.arange(17), kv, attend)))
    expected = torch.cat([reference_logits(reference, token_ids) for token_ids in prompts])
    assert (logits - expected).abs().max() <= TOLERANCE


def test_a_sharded_checkpoint_loads_like_a_single_file(tmp_path: Path) -> None:
    reference = save_reference(tmp_path / "one", {})
    reference.save_pretrained(tmp_path / "many", max_shard_size="20KB")
    assert len(list((tmp_path / "many").glob("*.safetensors"))) > 2
    token_ids = prompt(9)
    one, many = (PagedRunner(load(tmp_path / name)).logits(token_ids, [9]) for name in ("one", "many"))
    assert torch.equal(one, many)


def test_weights_of_another_dtype_are_rounded_on_the_way(tmp_path: Path) -> None:
    reference = save_reference(tmp_path, {}).bfloat16()
    reference.save_pretrained(tmp_path)
    config = load_config(tmp_path)
    assert config.dtype == "bfloat16"
    decoder = load_decoder(tmp_path, config, dtype=torch.float32, device=CPU, load_format=LoadFormat.AUTO)
    assert torch.equal(decoder.weights.embedding, reference.model.embed_tokens.weight.float())
