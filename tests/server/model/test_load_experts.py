"""Checkpoints of mixtures of experts: what is missing, of another layout or left over is named."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from kernels.experts.weights import Mxfp4Weights, dequantized
from server.errors import ModelError
from server.model.layers import MixtureWeights
from server.model.load.load import load_config, load_decoder
from server.settings import LoadFormat
from support.models.tiny_families import CPU, GLM, MXFP4, QWEN_3_MOE, load, save_image_model, save_mxfp4, save_reference

Tensors = dict[str, Tensor]
EXPERTS = "model.layers.2.mlp.experts"
BLOCKS = f"{EXPERTS}.gate_up_proj_blocks"


def change(folder: Path, changed: Callable[[Tensors], object]) -> None:
    tensors = load_file(folder / "model.safetensors")
    changed(tensors)
    save_file(tensors, folder / "model.safetensors")


def stack(tensors: Tensors) -> None:
    """All experts of a layer as one tensor, as in memory."""
    each = [tensors.pop(f"{EXPERTS}.{index}.down_proj.weight") for index in range(7)]
    tensors[f"{EXPERTS}.down_proj"] = torch.stack(each)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (lambda it: it.pop(f"{EXPERTS}.5.up_proj.weight"), rf"missing: {EXPERTS}\.5\.up_proj\.weight: fetch"),
        (lambda it: it.pop("model.layers.2.mlp.gate.weight"), r"missing: model\.layers\.2\.mlp\.gate\.weight: fetch"),
        (stack, rf"missing: {EXPERTS}\.0\.down_proj\.weight, .* not known to this architecture: {EXPERTS}\.down_proj:"),
    ],
)
def test_experts_of_another_layout_are_refused_by_name(
    changed: Callable[[Tensors], object], message: str, tmp_path: Path
) -> None:
    save_reference(tmp_path, "qwen3_moe", QWEN_3_MOE)
    change(tmp_path, changed)
    with pytest.raises(ModelError, match=message) as caught:
        load(tmp_path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (lambda it: it.pop(BLOCKS), rf"missing: {BLOCKS}"),
        (lambda it: it.update({BLOCKS: it[BLOCKS].float()}), rf"{BLOCKS} in .*: expected one of U8, found F32"),
        (
            lambda it: it.update({BLOCKS: it[BLOCKS][..., :8].contiguous()}),
            rf"{BLOCKS} in .*: expected shape \(5, 192, 2, 16\), found \(5, 192, 2, 8\)",
        ),
    ],
)
def test_blocks_that_are_no_mxfp4_are_refused_by_name(
    changed: Callable[[Tensors], object], message: str, tmp_path: Path
) -> None:
    save_mxfp4(tmp_path, MXFP4)
    change(tmp_path, changed)
    with pytest.raises(ModelError, match=message):
        load(tmp_path)


def test_layers_behind_the_last_one_are_not_read(tmp_path: Path) -> None:
    save_reference(tmp_path, "glm4_moe", GLM)
    change(tmp_path, lambda it: it.update({"model.layers.3.eh_proj.weight": torch.ones(3)}))
    assert len(load(tmp_path).weights.layers) == 3
    change(tmp_path, lambda it: it.update({"model.layers.2.eh_proj.weight": torch.ones(3)}))
    with pytest.raises(ModelError, match=r"not known to this architecture: model\.layers\.2\.eh_proj\.weight"):
        load(tmp_path)


def test_experts_of_images_are_not_read(tmp_path: Path) -> None:
    save_image_model(tmp_path, "ernie 4.5 vl", as_published=True)
    text = load(tmp_path)
    change(tmp_path, lambda it: it.update({f"{EXPERTS}.14.up_proj.weight": torch.ones(3)}))  # behind both halves
    with pytest.raises(ModelError, match=r"not known to this architecture: model\.layers\.2\.mlp\.experts\.14\."):
        load(tmp_path)
    of_images = re.compile(rf"{EXPERTS}\.([789]|1\d)\.|.*weight_1")
    change(tmp_path, lambda it: [it.pop(name) for name in list(it) if of_images.match(name)])
    mixtures = [layer.feed_forward for it in (text, load(tmp_path)) for layer in it.weights.layers[2:]]
    routers = [it.router.weight.dequantized() for it in mixtures if isinstance(it, MixtureWeights)]
    assert torch.equal(*routers)


@pytest.mark.parametrize(("scale", "is_large"), [(128, False), (129, True)])
def test_a_large_scale_of_one_layer_counts_for_all(scale: int, is_large: bool, tmp_path: Path) -> None:
    save_mxfp4(tmp_path, MXFP4)
    change(tmp_path, lambda it: it[BLOCKS.replace("_blocks", "_scales")].__setitem__((0, 0, 0), scale))
    layers = load(tmp_path).weights.inspected().layers
    mixtures = [layer.feed_forward for layer in layers if isinstance(layer.feed_forward, MixtureWeights)]
    known = [it.experts.has_large_scales for it in mixtures if isinstance(it.experts, Mxfp4Weights)]
    assert len(known) > 1
    assert set(known) == {is_large}


def test_dummy_experts_of_four_bits_are_always_the_same(tmp_path: Path) -> None:
    save_mxfp4(tmp_path, MXFP4)
    (tmp_path / "model.safetensors").unlink()
    found = []
    for _ in range(2):
        config = load_config(tmp_path)
        decoder = load_decoder(tmp_path, config, dtype=torch.float32, device=CPU, load_format=LoadFormat.DUMMY)
        mixture = decoder.weights.layers[1].feed_forward
        assert isinstance(mixture, MixtureWeights)
        assert isinstance(mixture.experts, Mxfp4Weights)
        found.append(dequantized(mixture.experts.down_blocks, mixture.experts.down_scales, torch.float32))
    assert torch.equal(*found)
    assert 1e-3 < found[0].abs().max() < 2e-3
