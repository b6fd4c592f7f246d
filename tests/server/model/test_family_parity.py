"""Families against transformers, on tiny random checkpoints that transformers itself writes (fp32, CPU)."""

from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from qualification.model.config import AttentionConfig, RopeConfig, num_parameters
from qualification.model.forward.model import ForwardReference, forward
from server.model.decoder import Decoder
from server.model.kv_cache import KVCache
from server.model.load.load import load_config, load_decoder
from server.model.step import Step
from server.settings import LoadFormat
from support.models.paged_runner import PagedRunner
from support.models.tiny_families import (
    CPU,
    GEMMA_2,
    GLM,
    GPT_2,
    IMAGE_CASES,
    MXFP4,
    NEMOTRON_3_SUPER,
    NUM_TOKENS,
    OPT,
    QWEN_3_MOE,
    ROTATED,
    TINY,
    TOLERANCE,
    VARIANTS,
    WINDOWED,
    classes_of,
    load,
    longrope,
    prompt,
    reference_logits,
    save_anew,
    save_image_model,
    save_joined,
    save_mxfp4,
    save_reference,
    tolerance,
)

HEAD_ALONE: dict[str, dict[str, object]] = {"llama": {"tie_word_embeddings": True}, "opt": OPT, "gpt2": GPT_2}
# Of the hidden size 32 the shape of one tensor tells nothing.
SAVED_ANEW = (
    ("qwen3_moe", {**QWEN_3_MOE, "moe_intermediate_size": 32, "mlp_only_layers": [1]}),
    ("glm4_moe", GLM),
    ("nemotron_h", {**NEMOTRON_3_SUPER, "moe_latent_size": 20}),  # experts' matrices are square
)


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_equal_those_of_transformers_also_in_chunks(variant: str, tmp_path: Path) -> None:
    reference = save_reference(tmp_path, *VARIANTS[variant])
    runner = PagedRunner(load(tmp_path))
    for chunks in ([1], [7], [NUM_TOKENS], [13, 1, 3, 32, 1, 1, 9]):
        token_ids = prompt(sum(chunks))
        error = (runner.logits(token_ids, chunks) - reference_logits(reference, token_ids)).abs().max()
        assert error <= tolerance(VARIANTS[variant][0])


def test_experts_of_four_bits_equal_unpacked_ones(tmp_path: Path) -> None:
    reference = save_mxfp4(tmp_path, MXFP4)
    token_ids = prompt(NUM_TOKENS)
    logits = PagedRunner(load(tmp_path)).logits(token_ids, [13, 1, 3, 32, 1, 1, 9])
    assert (logits - reference_logits(reference, token_ids)).abs().max() <= TOLERANCE


@pytest.mark.parametrize(("kind", "as_published"), IMAGE_CASES)
def test_the_text_part_of_an_image_model_is_served(kind: str, as_published: bool, tmp_path: Path) -> None:
    reference = save_image_model(tmp_path, kind, as_published=as_published)
    token_ids = prompt(NUM_TOKENS)
    logits = PagedRunner(load(tmp_path)).logits(token_ids, [7, NUM_TOKENS - 7])
    assert (logits - reference_logits(reference, token_ids)).abs().max() <= TOLERANCE


@pytest.mark.parametrize("width", [20, 16, 32])  # of the hidden size 32: the shape of one tensor may tell nothing
@pytest.mark.parametrize("as_published", [True, False])
def test_joined_experts_are_read_in_both_layouts(width: int, as_published: bool, tmp_path: Path) -> None:
    reference = save_joined(tmp_path, as_published=as_published, moe_intermediate_size=width)
    token_ids = prompt(40)
    logits = PagedRunner(load(tmp_path)).logits(token_ids, [7, 33])
    assert (logits - reference_logits(reference, token_ids)).abs().max() <= TOLERANCE


@pytest.mark.parametrize(("family", "changes"), SAVED_ANEW)
def test_experts_that_transformers_joins_are_read(family: str, changes: dict[str, object], tmp_path: Path) -> None:
    reference = save_anew(tmp_path, family, changes)
    token_ids = prompt(40)
    expected = reference_logits(reference, token_ids)
    logits = PagedRunner(load(tmp_path)).logits(token_ids, [7, 33])
    assert (logits - expected).abs().max() <= tolerance(family)
    plain = ForwardReference(tmp_path, load_config(tmp_path), torch.float32, CPU)
    assert (forward(plain, token_ids) - expected).abs().max() <= 3 * tolerance(family)
    plain.close()


@pytest.mark.parametrize("family", HEAD_ALONE)
def test_a_tied_head_that_a_checkpoint_has_alone_is_the_embedding(family: str, tmp_path: Path) -> None:
    reference = save_reference(tmp_path, family, HEAD_ALONE[family])
    tensors = load_file(tmp_path / "model.safetensors")
    [embedding] = [name for name in tensors if name.endswith(("embed_tokens.weight", "wte.weight"))]
    tensors["lm_head.weight"] = tensors.pop(embedding)
    save_file(tensors, tmp_path / "model.safetensors")
    token_ids = prompt(20)
    expected = reference_logits(reference, token_ids)
    assert (PagedRunner(load(tmp_path)).logits(token_ids, [20]) - expected).abs().max() <= TOLERANCE
    plain = ForwardReference(tmp_path, load_config(tmp_path), torch.float32, CPU)
    assert (forward(plain, token_ids) - expected).abs().max() <= 3 * TOLERANCE
    plain.close()


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
    layers = [replace(layer, mixer=change(layer.attention)) for layer in decoder.config.layers]
    changed = PagedRunner(Decoder(replace(decoder.config, layers=tuple(layers)), decoder.weights))
    token_ids = prompt(num_tokens)
    error = (changed.logits(token_ids, [num_tokens]) - reference_logits(reference, token_ids)).abs().max()
    assert error > 100 * TOLERANCE


@pytest.mark.parametrize("variant", VARIANTS)
def test_parameters_are_counted_as_transformers_counts_them(variant: str, tmp_path: Path) -> None:
    family, changes = VARIANTS[variant]
    config_class, model_class = classes_of(family)
    config = config_class(**deepcopy({**TINY, **changes}))
    config.architectures = [model_class.__name__]
    config.save_pretrained(tmp_path)
    with torch.device("meta"):
        reference = model_class(config)
    ends = ("correction_bias", "expert_bias", "layer_scalar")
    num_buffered = sum(it.numel() for name, it in reference.named_buffers() if name.endswith(ends))
    assert num_parameters(load_config(tmp_path)) == reference.num_parameters() + num_buffered


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
    step = Step(token_ids, torch.arange(7), torch.arange(7), KVCache(()), lambda *_: None)
    assert torch.equal(bare.forward(step), reference.model.embed_tokens(token_ids))
