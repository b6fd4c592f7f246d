"""Checkpoints of NVFP4 and MXFP4, written here by their definitions: read, re-encoded in 8 bits, or refused."""

from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from shutil import copytree
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from kernels.experts.few_bits.weights import FewBitExperts
from kernels.experts.formats import FewBitFormat
from kernels.linear.shape import FP8_BLOCKS
from qualification.model.config import ExpertsConfig
from qualification.model.shard import shard_of
from server.errors import ModelError
from server.model.layers import MixtureWeights
from server.model.linear import WeightName
from server.model.load.load import load_config, load_shard
from server.settings import DtypeChoice
from support.engine.checked_layers import CheckedLayers, Tensors, edited
from support.models.quantized_files import PARTS, change
from support.models.served_families import saved

CPU = torch.device("cpu")
SIZES = {
    "hidden_size": 256, "moe_intermediate_size": 256, "num_attention_heads": 4, "num_key_value_heads": 4,
    "head_dim": 64, "num_experts": 3, "num_experts_per_tok": 2, "num_hidden_layers": 1,
}  # fmt: skip
CODES = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


def of_compressed(name: str, **weights: object) -> dict[str, Any]:
    of_inputs = {"num_bits": 4, "type": "float", "dynamic": "local", **weights}
    group = {
        "targets": ["Linear"],
        "weights": {"num_bits": 4, "type": "float", "symmetric": True, **weights},
        "input_activations": of_inputs,
    }
    ignored = ["lm_head", "re:.*mlp.gate$"]
    return {"quant_method": "compressed-tensors", "format": name, "ignore": ignored, "config_groups": {"0": group}}


KINDS: dict[str, dict[str, Any]] = {
    "modelopt": {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16, "ignore": ["lm_head", "*.gate"]},
    "compressed": of_compressed("nvfp4-pack-quantized", strategy="tensor_group", group_size=16),
    "mxfp4": of_compressed("mxfp4-pack-quantized", strategy="group", group_size=32),
}


def packed(kind: str, values: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    """(a product's tensors by their last words, its numbers in fp64): each number's nearest code."""
    size = 32 if kind == "mxfp4" else 16
    groups = values.double().unflatten(1, (-1, size))
    largest = groups.abs().amax(-1)
    if kind == "mxfp4":
        exponents = (largest / 6).log2().ceil().int()
        scales, whole = 2.0 ** exponents.double(), 1.0
        stored: dict[str, Tensor] = {"weight_scale": (exponents + 127).to(torch.uint8)}
    else:
        whole = float((largest.max() / (6 * 448)).float())
        of_groups = (largest / 6 / whole).float().to(torch.float8_e4m3fn)
        scales, stored = of_groups.double(), {"weight_scale": of_groups}
        if kind == "modelopt":
            stored |= {"weight_scale_2": torch.tensor(whole), "input_scale": torch.tensor(0.1)}
        else:
            stored |= {"weight_global_scale": torch.tensor([1 / whole]), "input_global_scale": torch.tensor([9.0])}
            whole = 1 / float(stored["weight_global_scale"])
    units = (groups / (scales[..., None] * whole)).flatten(1)
    codes = torch.bucketize(units.abs(), (CODES[1:8] + CODES[:7]).double() / 2) + 8 * (units < 0)
    stored["weight" if kind == "modelopt" else "weight_packed"] = (codes[:, ::2] | codes[:, 1::2] << 4).to(torch.uint8)
    return stored, CODES.double()[codes] * scales.repeat_interleave(size, 1) * whole


def made(folder: Path, kind: str) -> tuple[Path, dict[str, Tensor]]:
    """(a checkpoint whose products are in 4 bits, their numbers by the definition)."""
    numbers: dict[str, Tensor] = {}

    def in_4_bits(tensors: Tensors) -> Tensors:
        found = dict(tensors)
        for name in [it for it in tensors if it.endswith("_proj.weight")]:
            product = name.removesuffix(".weight")
            # Blocks differ in size, so that another one's scale shows.
            values = found.pop(name).float()
            values[128:] *= 0.3
            stored, numbers[product] = packed(kind, values)
            found |= {f"{product}.{word}": tensor for word, tensor in stored.items()}
        return found

    saved(folder / "plain", "qwen3_moe", **SIZES)
    return edited(folder / "plain", folder / kind, {"quantization_config": KINDS[kind]}, in_4_bits), numbers


Made = Callable[[str], tuple[Path, dict[str, Tensor]]]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Made:
    return cache(lambda kind: made(tmp_path_factory.mktemp(kind), kind))


@pytest.mark.parametrize("kind", KINDS)
def test_products_of_fp4_are_those_of_the_definition_in_8_bits(kind: str, checkpoint: Made) -> None:
    folder, numbers = checkpoint(kind)
    config = load_config(folder)
    fed = config.layers[0].feed_forward
    assert isinstance(fed, ExpertsConfig)
    assert (fed.format, config.layers[0].formats.qkv) == (FewBitFormat.FP8_BLOCKS, FP8_BLOCKS)
    layer = load_shard(folder, config, shard_of(config, 0, 1), dtype=torch.bfloat16, device=CPU).layers[0]
    assert isinstance(layer.feed_forward, MixtureWeights)
    assert isinstance(layer.feed_forward.experts, FewBitExperts)
    gate_up, down = layer.feed_forward.experts.of(2, torch.bfloat16)
    expert = "model.layers.0.mlp.experts.2"
    pairs = [
        (gate_up, torch.cat([numbers[f"{expert}.gate_proj"], numbers[f"{expert}.up_proj"]])),
        (down, numbers[f"{expert}.down_proj"]),
    ]
    for name in (WeightName.QKV, WeightName.OUTPUT):
        due = torch.cat([numbers[f"model.layers.0.{it}"] for it in PARTS[name]])
        pairs.append((layer.linears[name].weight.dequantized().double(), due))
    for found, due in pairs:
        if kind == "mxfp4":
            assert torch.equal(found, due)
            continue
        off = (found - due).abs()
        assert float(off.max()) > 0
        # Half a step of e4m3 at the least, 2^-10 of a scale by which a block's largest is above 224; and fp32's scales.
        assert bool((off <= due.abs() / 21 * (1 + 1e-6) + due.abs().max() * 2.0**-10 / 224).all())


@pytest.mark.parametrize("kind", ["modelopt", "mxfp4"])
def test_layers_of_fp4_hold_to_their_file(kind: str, checkpoint: Made, tmp_path: Path) -> None:
    folder, _ = checkpoint(kind)
    model = CheckedLayers.made(folder, DtypeChoice("bfloat16"))
    found = model.check()
    assert found.first is None, str(found.first)

    def swapped(tensors: Tensors) -> Tensors:
        """Swap the two numbers of each byte of one product."""
        name = "model.layers.0.self_attn.o_proj." + ("weight" if kind == "modelopt" else "weight_packed")
        return {**tensors, name: tensors[name] << 4 | tensors[name] >> 4}

    wrong = model.check(model.decoder_of(edited(folder, tmp_path / "wrong", None, swapped)))
    assert wrong.first is not None


def rewritten(folder: Path, name: str, tensor: Tensor | None) -> None:
    """Change a tensor of a checkpoint, or remove it."""
    file = folder / "model.safetensors"
    tensors = dict(load_file(file))
    tensors |= {name: tensor} if tensor is not None else {}
    if tensor is None:
        del tensors[name]
    save_file(tensors, file)


def test_what_does_not_fit_is_refused_by_name(checkpoint: Made, tmp_path: Path) -> None:
    folder, nvfp4 = (Path(copytree(checkpoint(kind)[0], tmp_path / kind)) for kind in ("mxfp4", "compressed"))
    name = "model.layers.0.self_attn.o_proj.weight_scale"
    scales = load_file(folder / "model.safetensors")[name]
    far = scales.clone()
    far[0, 0] -= 40
    due: list[tuple[Tensor | None, str]] = [
        (far, r"o_proj.weight_scale: rows 0 to 256 have a block of 128 by 128 whose scales are more than 2\^14 apart"),
        (torch.full_like(scales, 255), "o_proj.weight_scale: 2048 scales are NaN"),
        (scales[:, 1:].contiguous(), r"o_proj.weight_scale in .*: U8 \(256, 8\) was expected, found U8 \(256, 7\)"),
        (None, "o_proj.weight_packed needs .*o_proj.weight_scale"),
    ]
    for tensor, message in due:
        rewritten(folder, name, tensor)
        config = load_config(folder)
        with pytest.raises(ModelError, match=message):
            load_shard(folder, config, shard_of(config, 0, 1), dtype=torch.bfloat16, device=CPU)
    says: Mapping[str, object] = {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 32, "ignore": []}
    change(folder, format=None, config_groups=None, **says)
    with pytest.raises(ModelError, match="group_size"):
        load_config(folder)
    rewritten(nvfp4, "model.layers.0.self_attn.o_proj.weight_global_scale", torch.zeros(1))
    config = load_config(nvfp4)
    with pytest.raises(ModelError, match=r"o_proj.weight_global_scale: a positive number was expected, found 0.0"):
        load_shard(nvfp4, config, shard_of(config, 0, 1), dtype=torch.bfloat16, device=CPU)
    rewritten(nvfp4, "model.layers.0.self_attn.o_proj.weight", torch.zeros(1))
    with pytest.raises(ModelError, match=r"o_proj.weight is there beside .*o_proj.weight_packed, of which it is made"):
        load_shard(nvfp4, config, shard_of(config, 0, 1), dtype=torch.bfloat16, device=CPU)
