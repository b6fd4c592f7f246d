"""Hybrids in 8 and 4 bits beside transformers' models of the same numbers, whose products round inputs likewise."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from qualification.model.shard import shard_of
from server.model.layers import LayerWeights, MixtureWeights
from server.model.linear import WeightName
from server.model.load.load import load_config, load_shard
from server.settings import DtypeChoice
from support.engine.checked_layers import CheckedLayers, Tensors, edited
from support.models.paged_runner import PagedRunner
from support.models.quantized_hybrids import BLOCKS, OF_QWEN, QWEN, QuantizedHybrid
from support.models.tiny_families import (
    BAMBA,
    GRANITE_HYBRID,
    GRANITE_SHARED,
    IMAGE_MODELS,
    LFM_2,
    LFM_2_MOE,
    NEMOTRON_3,
    load,
    prompt,
    reference_logits,
    save_image_model,
    save_reference,
)

CPU = torch.device("cpu")
QWEN_MOE = {
    **QWEN, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 256,
    "shared_expert_intermediate_size": 256,
}  # fmt: skip
BLOCKS_OF_NEXT = {
    **BLOCKS,
    "modules_to_not_convert": [
        "lm_head", *(f"model.layers.{layer}.{it}" for layer in range(2) for it in (*OF_QWEN, "linear_attn.in_proj_ba"))
    ],
}  # fmt: skip
OTHERS = (
    "lm_head",
    "embed_tokens",
    "embeddings",
    "mlp.gate",
    "mlp.shared_expert_gate",
    "feed_forward.gate",
    "router.layer",
    "mixer.gate",
)
BAMBA_64 = {**BAMBA, "hidden_size": 64, "intermediate_size": 96, "head_dim": 16, "mamba_n_groups": 4}
LFM = {**LFM_2, "hidden_size": 64, "intermediate_size": 96, "block_auto_adjust_ff_dim": False}
LFM_MOE = {**LFM_2_MOE, "hidden_size": 64, "intermediate_size": 128, "moe_intermediate_size": 64}


def of_groups(name: str, weights: Mapping[str, object], inputs: Mapping[str, object] | None) -> dict[str, Any]:
    """Return the words of compressed-tensors, whose lists have expressions."""
    group = {"targets": ["Linear"], "weights": {"symmetric": True, **weights}, "input_activations": inputs}
    ignore = ["re:.*lm_head", "re:.*mlp.gate$", "re:.*shared_expert_gate$", "re:.*feed_forward.gate$", "re:.*router"]
    return {
        "quant_method": "compressed-tensors", "format": name, "ignore": ignore, "config_groups": {"group_0": group}
    }  # fmt: skip


ROWS = of_groups(
    "float-quantized",
    {"num_bits": 8, "type": "float", "strategy": "channel"},
    {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True},
)
GROUPS = of_groups("pack-quantized", {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32}, None)
# Of published files of 4 bits some list all of linear attention, others the products of its gates alone.
GPTQ = {
    "quant_method": "gptq", "bits": 4, "group_size": 32, "sym": True, "desc_act": False,
    "dynamic": {"-:.*linear_attn.*": {}, "-:.*shared_expert.*": {}, "-:.*visual.*": {}, "-:.*mtp.*": {}},
}  # fmt: skip
AWQ = {
    "quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm",
    "modules_to_not_convert": ["linear_attn.in_proj_a", "linear_attn.in_proj_b", "visual", "mtp"],
}  # fmt: skip


def but(*ends: str) -> Callable[[str], bool]:
    """Return whether a product is quantised: all but those with such parts in their names."""
    return lambda name: not name.endswith(OTHERS) and not any(it in name for it in ends)


# NVIDIA's leave attention out, and the Mamba2 layers before it; routers are no product of theirs.
NVIDIA_NUMBERS = {"num_bits": 8, "type": "float", "dynamic": False}
MODELOPT = {
    "quant_method": "modelopt", "quant_algo": "FP8", "kv_cache_scheme": NVIDIA_NUMBERS,
    "producer": {"name": "modelopt"},
    "config_groups": {
        "group_0": {"targets": ["Linear"], "weights": NVIDIA_NUMBERS, "input_activations": NVIDIA_NUMBERS}
    },
    "ignore": [
        "lm_head", *(f"backbone.layers.2.mixer.{it}_proj" for it in "qkvo"), "backbone.layers.3.mixer.in_proj",
        *(f"backbone.layers.{layer}.mixer.conv1d" for layer in (0, 3)),
    ],
}  # fmt: skip
NANO = {
    **NEMOTRON_3, "layers_block_type": ["linear_attention", "moe", "full_attention", "linear_attention", "mlp"],
    "n_groups": 4, "mamba_num_heads": 8,
}  # fmt: skip
SUPER = {**NANO, "moe_latent_size": 12}
LISTED_BY_NVIDIA = ("q_proj", "k_proj", "v_proj", "o_proj", "layers.3.mixer.in_proj")


@dataclass(frozen=True)
class Case:
    family: str
    sizes: Mapping[str, object]
    kind: str
    says: Mapping[str, Any]
    is_quantized: Callable[[str], bool] = field(default=but())
    worlds: tuple[int, ...] = (1, 2)

    def save(self, folder: Path) -> PreTrainedModel:
        if self.family in IMAGE_MODELS:
            return save_image_model(folder, self.family, as_published=True, **self.sizes)
        return save_reference(folder, self.family, self.sizes)


CASES = {
    "qwen 3.5 in blocks": Case("qwen3_5_text", QWEN, "blocks", BLOCKS, but("in_proj_a", "in_proj_b")),
    "qwen 3.5 with a tower in blocks": Case(
        "qwen3.5", {**QWEN, "mtp_num_hidden_layers": 1}, "blocks", BLOCKS, but("in_proj_a", "in_proj_b", "visual")
    ),
    "qwen 3.5 moe in blocks": Case("qwen3_5_moe_text", QWEN_MOE, "blocks", BLOCKS, but("in_proj_a", "in_proj_b")),
    "qwen 3 next in blocks": Case("qwen3_next", QWEN_MOE, "blocks", BLOCKS_OF_NEXT, but("in_proj_ba")),
    "qwen 3.5 in rows, gates too": Case("qwen3_5_text", QWEN, "channel", ROWS),
    "qwen 3.5 moe of gptq": Case("qwen3_5_moe_text", QWEN_MOE, "gptq", GPTQ, but("linear_attn", "shared_expert")),
    "qwen 3.5 of awq": Case("qwen3_5_text", QWEN, "awq", AWQ, but("in_proj_a", "in_proj_b")),
    "qwen 3 next in groups, gates too": Case("qwen3_next", QWEN_MOE, "compressed", GROUPS),
    "nemotron 3 nano of modelopt": Case("nemotron_h", NANO, "static", MODELOPT, but(*LISTED_BY_NVIDIA)),
    "nemotron 3 super of modelopt": Case("nemotron_h", SUPER, "static", MODELOPT, but(*LISTED_BY_NVIDIA)),
    "bamba in rows": Case("bamba", BAMBA_64, "channel", ROWS),
    "bamba of awq": Case("bamba", BAMBA_64, "awq", {**AWQ, "modules_to_not_convert": []}, worlds=(1,)),
    "granite 4 in rows": Case("granitemoehybrid", {**GRANITE_HYBRID, "mamba_n_groups": 4}, "channel", ROWS),
    "granite 3 in rows": Case("granitemoeshared", GRANITE_SHARED, "channel", ROWS),
    "lfm2 in rows": Case("lfm2", LFM, "channel", ROWS),
    "lfm2 moe in groups": Case("lfm2_moe", LFM_MOE, "compressed", GROUPS),
}


@pytest.fixture(params=CASES)
def case(request: pytest.FixtureRequest) -> Case:
    return CASES[request.param]


def written(folder: Path, case: Case) -> QuantizedHybrid:
    return QuantizedHybrid(folder / "model", case.save, case.kind, case.says, case.is_quantized)


def test_logits_are_those_of_the_definition(case: Case, tmp_path: Path) -> None:
    """Roundings of fp32 may turn an input into the next number of 8 bits, which tokens behind it read: not in most."""
    file = written(tmp_path, case)
    model, served, errors = file.model(), load(file.folder), []
    for token_ids in prompt(40).split(4):
        with torch.no_grad(), file.rounding(model):
            due = reference_logits(model, token_ids)
        found = PagedRunner(served).logits(token_ids, [2, 1, 1])
        if file.rounds_nothing:
            assert torch.equal(found.argmax(-1), due.argmax(-1))
        errors.append((found - due).abs().amax(-1) / due.std())
    assert torch.cat(errors).median() < 1e-4
    assert torch.cat(errors).max() < (1e-3 if file.rounds_nothing else 0.5)


def test_layers_are_proven(case: Case, tmp_path: Path) -> None:
    file = written(tmp_path, case)
    found = CheckedLayers.made(file.folder, DtypeChoice.BF16).check()
    assert found.first is None, str(found.first)


# Numbers of NVFP4 become others of 8 bits when they are loaded, so that transformers' model is another one.
NVFP4 = {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16}
OF_BLOCKS = {
    **SUPER, "hidden_size": 256, "num_attention_heads": 4, "head_dim": 64, "n_groups": 2, "mamba_head_dim": 32,
    "ssm_state_size": 64, "moe_latent_size": 128, "moe_intermediate_size": 128, "intermediate_size": 256,
    "moe_shared_expert_intermediate_size": 256,
}  # fmt: skip
CASES_OF_NVFP4 = {
    "qwen 3.5": Case(
        "qwen3_5_text", QWEN, "nvfp4", {**NVFP4, "ignore": ["lm_head", "model.language_model.layers.*.in_proj_[ab]"]},
        but("in_proj_a", "in_proj_b"),
    ),
    "nemotron 3 super": Case(
        "nemotron_h", OF_BLOCKS, "nvfp4", {**NVFP4, "ignore": MODELOPT["ignore"]}, but(*LISTED_BY_NVIDIA)
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES_OF_NVFP4)
def test_layers_of_nvfp4_are_proven(name: str, tmp_path: Path) -> None:
    found = CheckedLayers.made(written(tmp_path, CASES_OF_NVFP4[name]).folder, DtypeChoice.BF16).check()
    assert found.first is None, str(found.first)


@pytest.mark.parametrize(
    ("name", "scales"),
    [
        ("qwen 3.5 in blocks", "linear_attn.in_proj_z.weight_scale_inv"),
        ("qwen 3 next in blocks", "linear_attn.in_proj_qkvz.weight_scale_inv"),
        ("qwen 3.5 in rows, gates too", "linear_attn.in_proj_b.weight_scale"),
    ],
)
def test_a_neighbours_scales_are_seen(name: str, scales: str, tmp_path: Path) -> None:
    file = written(tmp_path, CASES[name])
    model = CheckedLayers.made(file.folder, DtypeChoice.BF16)

    def moved(tensors: Tensors) -> Tensors:
        return {name: it.roll(1, 0) * 1.2 if name.endswith(scales) else it for name, it in tensors.items()}

    found = model.check(model.decoder_of(edited(file.folder, tmp_path / "wrong", None, moved)))
    assert found.first is not None
    assert found.first.layer == 0


def numbers_of(layer: LayerWeights) -> dict[WeightName, Tensor]:
    """Return the numbers of a layer's products; plain ones make gates by the first one's last rows."""
    found = {name: it.weight.dequantized().float() for name, it in layer.linears.items()}
    if (gates := found.pop(WeightName.RECURRENT_GATES, None)) is not None:
        found[WeightName.RECURRENT_INPUT] = torch.cat([found[WeightName.RECURRENT_INPUT], gates])
    return found


def test_each_ranks_parts_are_the_numbers_of_the_whole(case: Case, tmp_path: Path) -> None:
    file = written(tmp_path, case)
    config, plain = load_config(file.folder), load_config(file.wide)
    for world in case.worlds:
        for rank in range(world):
            found, due = (
                load_shard(folder, it, shard_of(it, rank, world), dtype=torch.float32, device=CPU)
                for folder, it in ((file.folder, config), (file.wide, plain))
            )
            pairs = zip(found.layers, due.layers, config.layers, plain.layers, strict=True)
            for layer, own in ((one.as_published(its), other.as_published(of)) for one, other, its, of in pairs):
                numbers, wanted = numbers_of(layer), numbers_of(own)
                assert numbers.keys() == wanted.keys()
                for name, it in numbers.items():
                    torch.testing.assert_close(it, wanted[name])
                if isinstance(layer.feed_forward, MixtureWeights) and isinstance(own.feed_forward, MixtureWeights):
                    for expert in range(layer.feed_forward.experts.num_experts):
                        matrices = (it.feed_forward.experts.of(expert, torch.float32) for it in (layer, own))
                        for one, other in zip(*matrices, strict=True):
                            torch.testing.assert_close(one.float(), other)
