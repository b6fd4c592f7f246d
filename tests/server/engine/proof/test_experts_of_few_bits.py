"""Mixtures whose experts have 8 or 4 bits: beside the plain forward pass, cut for ranks, by the checker, or refused."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from kernels.experts.few_bits.eager import run_few_bits
from kernels.experts.few_bits.weights import FewBitExperts
from kernels.experts.formats import FewBitFormat
from kernels.experts.kinds import ExpertActivation
from kernels.experts.shape import ExpertsShape, parse_experts_shape
from kernels.fused.activation_kind import Activation
from kernels.vocabulary.row_buckets import TokenRows
from kernels.vocabulary.shape import Dtype
from qualification.decision.presets import preset_named
from qualification.measure.checks.experts_checks import check_experts
from qualification.measure.inputs.experts_inputs import experts_cases
from qualification.model.config import ExpertsConfig, ModelConfig
from qualification.model.families.reader import read_model
from qualification.model.fields import ModelConfigError
from qualification.model.shard import shard_of
from server.errors import ModelError
from server.model.layers import MixtureWeights
from server.model.load.load import load_config, load_shard
from server.settings import DtypeChoice
from support.engine.checked_layers import CheckedLayers, Tensors, edited
from support.models.quantized_files import in_8_bits
from support.models.served_families import saved
from support.models.tiny_families import STEP, save_image_model

CPU = torch.device("cpu")
SIZES = {
    "hidden_size": 256, "moe_intermediate_size": 256, "num_attention_heads": 4, "num_key_value_heads": 4,
    "head_dim": 64, "num_experts": 4, "num_experts_per_tok": 2, "num_hidden_layers": 1,
}  # fmt: skip
PLAIN = {"modules_to_not_convert": ["mlp.gate", "lm_head"]}
BLOCKS = {"quant_method": "fp8", "weight_block_size": [128, 128], **PLAIN}
STATIC = {"quant_method": "fp8", "activation_scheme": "static", **PLAIN}
GROUPS: dict[str, Any] = {
    "quant_method": "compressed-tensors", "format": "pack-quantized", "ignore": ["lm_head", "re:.*mlp.gate$"],
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 64, "symmetric": True},
        }
    },
}  # fmt: skip


def in_4_bits(tensors: Tensors, *, group_size: int = 64, of: str = "") -> Tensors:
    """Give each product with `of` in its name codes in groups of columns, eight in an integer, and scales."""
    found = dict(tensors)
    for name in [it for it in tensors if it.endswith("_proj.weight") and of in it]:
        groups = found.pop(name).float().unflatten(1, (-1, group_size))
        scales = groups.abs().amax(-1) / 7
        codes = ((groups / scales[..., None]).round().clamp(-8, 7) + 8).flatten(1).int()
        packed = sum(codes[:, place::8] << 4 * place for place in range(8))
        assert isinstance(packed, Tensor)
        found |= {f"{name}_packed": packed.int(), f"{name}_scale": scales.bfloat16()}
        found[f"{name}_shape"] = torch.tensor(codes.shape)
    return found


KINDS: dict[str, tuple[dict[str, object], Callable[[Tensors], Tensors], FewBitFormat]] = {
    "blocks": (BLOCKS, in_8_bits("blocks", "router"), FewBitFormat.FP8_BLOCKS),
    "static": (STATIC, in_8_bits("static", "router"), FewBitFormat.FP8_STATIC),
    "groups": (GROUPS, in_4_bits, FewBitFormat.INT4_64),
}


def made(folder: Path, kind: str, **sizes: int) -> Path:
    saved(folder / "plain", "qwen3_moe", **(SIZES | sizes))
    says, change, _ = KINDS[kind]
    return edited(folder / "plain", folder / kind, {"quantization_config": says}, change)


@pytest.mark.parametrize(("kind", "dtype"), [("blocks", "bfloat16"), ("static", "float32"), ("groups", "bfloat16")])
def test_experts_of_few_bits_are_those_of_their_file(kind: str, dtype: str, tmp_path: Path) -> None:
    model = CheckedLayers.made(made(tmp_path, kind), DtypeChoice(dtype))
    found = model.check()
    assert found.first is None, str(found.first)

    def moved(tensors: Tensors) -> Tensors:
        """Give an expert's last product the scales of the next expert."""
        name = "model.layers.0.mlp.experts.{}.down_proj.weight_scale" + ("_inv" if kind == "blocks" else "")
        return {**tensors, name.format(0): tensors[name.format(1)] * 1.5}

    wrong = edited(model.subject.folder, tmp_path / "wrong", None, moved)
    found = model.check(model.decoder_of(wrong))
    assert found.first is not None
    assert found.first.section == "residual behind the feed-forward"


def test_a_text_parts_experts_of_four_bits_are_those_of_its_file(tmp_path: Path) -> None:
    """Read names of the whole, and exceptions that name no router, as Kimi K2.5 has them."""
    save_image_model(tmp_path / "plain", "kimi k2.5", as_published=True, hidden_size=64, moe_intermediate_size=32)
    ignored = ["lm_head", "re:.*self_attn.*", "re:.*shared_experts.*", r"re:.*mlp\.(gate|up|gate_up|down)_proj.*"]
    [group] = GROUPS["config_groups"].values()
    groups = {"group_0": {**group, "weights": {**group["weights"], "group_size": 32}}}
    says = {"quantization_config": {**GROUPS, "ignore": ignored, "config_groups": groups}}
    packed = partial(in_4_bits, group_size=32, of=".experts.")
    model = CheckedLayers.made(edited(tmp_path / "plain", tmp_path / "packed", says, packed), DtypeChoice.BF16)
    experts = [it.feed_forward for it in model.subject.config.layers[1:]]
    assert [it.format for it in experts if isinstance(it, ExpertsConfig)] == [FewBitFormat.INT4_32] * len(experts)
    found = model.check()
    assert found.first is None, str(found.first)

    def moved(tensors: Tensors) -> Tensors:
        """Give an expert's gate the codes of the next one."""
        name = "language_model.model.layers.1.mlp.experts.{}.gate_proj.weight_packed"
        return {**tensors, name.format(0): tensors[name.format(1)].clone()}

    wrong = edited(model.subject.folder, tmp_path / "wrong", None, moved)
    found = model.check(model.decoder_of(wrong))
    assert found.first is not None
    assert found.first.section == "residual behind the feed-forward"


def test_two_ranks_hold_whole_blocks_of_experts(tmp_path: Path) -> None:
    folder = made(tmp_path, "blocks")
    config = load_config(folder)

    def experts(rank: int, world: int) -> FewBitExperts:
        shard = shard_of(config, rank, world)
        fed = load_shard(folder, config, shard, dtype=torch.float32, device=CPU).layers[0].feed_forward
        assert isinstance(fed, MixtureWeights)
        assert isinstance(fed.experts, FewBitExperts)
        return fed.experts

    whole, parts = experts(0, 1).of(3, torch.float32), [experts(rank, 2).of(3, torch.float32) for rank in range(2)]
    assert torch.equal(torch.cat([down for _, down in parts], 1), whole[1])
    gates = torch.cat([gate_up.unflatten(0, (2, -1)) for gate_up, _ in parts], 1).flatten(0, 1)
    assert torch.equal(gates, whole[0])
    with pytest.raises(ModelConfigError, match=r"blocks of 128 by 128 must divide .* width 64 of each"):
        shard_of(config, 0, 4)


@pytest.mark.parametrize("is_published", [True, False])
def test_experts_that_share_a_tensor_in_blocks_are_those_of_their_file(is_published: bool, tmp_path: Path) -> None:
    """Tensors [E, H, 2 I] and [E, I, H], as Qwen 3 VL's are published, and transposed, as transformers saves them."""
    folder = made(tmp_path, "blocks")

    def joined(tensors: Tensors) -> Tensors:
        found = {name: it for name, it in tensors.items() if ".experts." not in name}
        for layer in {name.split(".experts.")[0] for name in tensors if ".experts." in name}:
            for of, parts in (("gate_up_proj", ("gate_proj", "up_proj")), ("down_proj", ("down_proj",))):
                for end in ("", "_scale_inv"):
                    each = [
                        torch.cat([tensors[f"{layer}.experts.{it}.{part}.weight{end}"] for part in parts])
                        for it in range(SIZES["num_experts"])
                    ]
                    stacked = torch.stack([it.T.contiguous() for it in each] if is_published else each)
                    found[f"{layer}.experts.{of}{end}"] = stacked
        return found

    shared = edited(folder, tmp_path / "shared", None, joined)
    config = load_config(shared)
    for rank, world in ((0, 1), (1, 2)):
        shard = shard_of(config, rank, world)
        apart, together = (
            load_shard(it, config, shard, dtype=torch.bfloat16, device=CPU).layers[0].feed_forward
            for it in (folder, shared)
        )
        assert isinstance(apart, MixtureWeights)
        assert isinstance(together, MixtureWeights)
        for expert in range(SIZES["num_experts"]):
            pairs = zip(
                apart.experts.of(expert, torch.bfloat16), together.experts.of(expert, torch.bfloat16), strict=True
            )
            assert all(torch.equal(*pair) for pair in pairs)
    found = CheckedLayers.made(shared, DtypeChoice("bfloat16")).check()
    assert found.first is None, str(found.first)


def test_experts_of_three_tensors_in_blocks_are_those_of_their_file(tmp_path: Path) -> None:
    """Step 3.5's, of which all but the experts is listed as plain."""
    of_layer = {"layer_types": ["full_attention"], "mlp_layer_types": ["sparse"], "num_hidden_layers": 1}
    limits = {"swiglu_limits": [0.5], "swiglu_limits_shared": [0.7]}
    sizes = {"hidden_size": 256, "moe_intermediate_size": 256, "n_routed_experts": 3, "head_dim": 64}
    saved(tmp_path / "plain", "step3p5", **(STEP | of_layer | limits | sizes))
    rounded = in_8_bits("blocks", "router")

    def in_blocks(tensors: Tensors) -> Tensors:
        found = dict(tensors)
        for name in [it for it in tensors if ".moe." in it and it.endswith("_proj.weight")]:
            each = [rounded({name: it}) for it in tensors[name]]
            found |= {key: torch.stack([it[key] for it in each]) for key in each[0]}
        return found

    plain = [f"model.layers.0.{it}" for it in ("self_attn", "moe.gate", "share_expert")]
    says = {**BLOCKS, "modules_to_not_convert": plain}
    model = CheckedLayers.made(
        edited(tmp_path / "plain", tmp_path / "blocks", {"quantization_config": says}, in_blocks),
        DtypeChoice("bfloat16"),
    )
    found = model.check()
    assert found.first is None, str(found.first)

    def moved(tensors: Tensors) -> Tensors:
        name = "model.layers.0.moe.up_proj.weight_scale_inv"
        return {**tensors, name: tensors[name].roll(1, 0) * 1.5}

    found = model.check(model.decoder_of(edited(tmp_path / "blocks", tmp_path / "wrong", None, moved)))
    assert found.first is not None
    assert found.first.section == "residual behind the feed-forward"


def test_routers_and_bounded_experts_of_8_bits_are_refused(tmp_path: Path) -> None:
    folder = made(tmp_path, "static")
    says = {"quantization_config": {**STATIC, "modules_to_not_convert": ["lm_head"]}}
    with pytest.raises(ModelError, match="a router in fp8_static is not supported"):
        load_config(edited(folder, tmp_path / "router", says, dict))
    bounded = {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200, "modules_to_not_convert": ["mlp.gate"]}
    with pytest.raises(ModelError, match=r"experts in fp8_rows whose inputs are cut off at 1200 .* not supported"):
        load_config(edited(folder, tmp_path / "bounded", {"quantization_config": bounded}, dict))


def test_experts_are_exceptions_by_the_tensors_they_share_too() -> None:
    text = preset_named("gemma-4-26b-a4b").config

    def read(*exceptions: str) -> ModelConfig:
        listed = ["router.proj", *exceptions]
        return read_model({**text, "quantization_config": {"quant_method": "fp8", "modules_to_not_convert": listed}})

    assert read("experts.gate_up_proj", "experts.down_proj") == read("experts")
    with pytest.raises(ModelConfigError, match=r"experts.gate_up_proj and .*down_proj: they must both be listed or"):
        read("experts.gate_up_proj")


@pytest.mark.parametrize("kind", [FewBitFormat.FP8_ROWS, FewBitFormat.FP8_BLOCKS, FewBitFormat.INT4_32])
def test_a_cpus_experts_are_proven_and_wrong_scales_refused(kind: FewBitFormat) -> None:
    sizes = (128, 128) if kind is FewBitFormat.FP8_BLOCKS else (96, 72)
    shape = ExpertsShape(Dtype.BF16, kind, 5, 2, *sizes, Activation.SILU, False, TokenRows.LE_16)
    assert parse_experts_shape(str(shape)) == shape
    cases = list(experts_cases(shape, CPU, seed=0))

    def neighbours(
        hidden: Tensor, experts: Tensor, shares: Tensor, weights: FewBitExperts, activation: ExpertActivation,
        out: Tensor,
    ) -> None:  # fmt: skip
        """Use the scales of gate for up, too."""
        scales = weights.gate_up.scales.unflatten(0, (weights.num_experts, 2, -1)).clone()
        scales[:, 1] = scales[:, 0]
        wrong = replace(weights, gate_up=replace(weights.gate_up, scales=scales.flatten(0, 2)))
        run_few_bits(hidden, experts, shares, wrong, activation, out)

    assert all(check.is_passed for check in check_experts(run_few_bits, cases))
    assert not all(check.is_passed for check in check_experts(neighbours, cases))
