"""--quantization fp8: plain checkpoints whose products are rounded to 8 bits while they are loaded."""

import json
from itertools import accumulate
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from kernels.experts.few_bits.weights import FewBitExperts
from kernels.experts.weights import ExpertWeights
from kernels.linear.shape import FP8_ROWS, PLAIN
from kernels.linear.weights import LinearWeight
from kernels.vocabulary.shape import Dtype
from qualification.model.config import num_parameters, weight_bytes
from qualification.model.families.quantization import has_plain_experts, rounded_at_load
from qualification.model.shard import shard_of
from server.engine.startup.subject import read_subject
from server.errors import ModelError
from server.model.layers import MixtureWeights
from server.model.linear import WeightName
from server.model.load.load import load_config, load_decoder, load_shard
from server.settings import DeviceChoice, DtypeChoice, LoadFormat, Quantization, Settings
from support.engine.checked_layers import CheckedLayers, Tensors, edited
from support.models.paged_runner import PagedRunner
from support.models.served_families import FAMILIES, saved
from support.models.tiny_families import (
    BAMBA,
    FALCON_H1,
    GRANITE_HYBRID,
    KIMI_LINEAR,
    LFM_2_MOE,
    LING_2_6,
    MXFP4,
    NEMOTRON_3_SUPER,
    QWEN_3_MOE,
    QWEN_3_NEXT,
    RECURRENT,
    prompt,
    save_mxfp4,
    save_reference,
)

CPU = torch.device("cpu")


def rounded(values: Tensor) -> Tensor:
    """Round each row with the scale that makes its largest number 448."""
    scales = values.abs().amax(1, keepdim=True) / torch.tensor(448.0)
    return (values / scales).to(torch.float8_e4m3fn).double() * scales.double()


def numbers(weight: LinearWeight) -> Tensor:
    return weight.dequantized().double()


@pytest.mark.parametrize("world", [1, 2])
def test_each_rank_rounds_its_own_part_of_a_row(world: int, tmp_path: Path) -> None:
    saved(tmp_path, "qwen3", num_attention_heads=4, num_key_value_heads=2, head_dim=16)
    file = load_file(tmp_path / "model.safetensors")
    config = rounded_at_load(load_config(tmp_path))
    ranks = [
        load_shard(tmp_path, config, shard_of(config, it, world), dtype=torch.float32, device=CPU)
        for it in range(world)
    ]
    for index in range(2):
        prefix = f"model.layers.{index}."
        linears = [weights.layers[index].linears for weights in ranks]
        gates = [numbers(it[WeightName.GATE_UP].weight).chunk(2)[0] for it in linears]
        assert torch.equal(torch.cat(gates), rounded(file[f"{prefix}mlp.gate_proj.weight"]))
        sizes = [64 // world, 32 // world, 32 // world]
        keys = [numbers(it[WeightName.QKV].weight).split(sizes)[1] for it in linears]
        assert torch.equal(torch.cat(keys), rounded(file[f"{prefix}self_attn.k_proj.weight"]))
        for name, of in ((WeightName.OUTPUT, "self_attn.o_proj"), (WeightName.DOWN, "mlp.down_proj")):
            columns = file[f"{prefix}{of}.weight"].chunk(world, 1)
            for own, part in zip(linears, columns, strict=True):
                assert torch.equal(numbers(own[name].weight), rounded(part))
        norm = f"{prefix}input_layernorm.weight"
        assert all(torch.equal(weights.layers[index].attention_norm, file[norm]) for weights in ranks)
    heads = torch.cat([numbers(weights.head.weight) for weights in ranks])
    assert torch.equal(heads, file["lm_head.weight"].double())
    assert weight_bytes(config, Dtype.BF16) < 2 * num_parameters(config)


def test_dummy_weights_take_one_tensor_more_than_they_hold(tmp_path: Path) -> None:
    layers, hidden, width = 6, 64, 128
    sizes = {"vocab_size": 64, "hidden_size": hidden, "intermediate_size": width, "num_hidden_layers": layers}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 16}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", **sizes, **heads}))
    config = rounded_at_load(load_config(tmp_path))
    shard = shard_of(config, 1, 2)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as found:
        weights = load_shard(tmp_path, config, shard, dtype=torch.bfloat16, device=CPU, load_format=LoadFormat.DUMMY)
    assert weights.layers[0].linears[WeightName.DOWN].weight.format() == FP8_ROWS
    events = [it for it in found.profiler.kineto_results.events() if it.name() == "[memory]"]
    held = list(accumulate(it.nbytes() for it in sorted(events, key=lambda it: it.start_ns())))
    one_tensor = 4 * hidden * width // 2  # of fp32, in which rounding adds some bytes for a scale or two
    assert max(held) <= held[-1] + 1.1 * one_tensor  # all products in 16 bits are 15 times as much


# How a file has its experts: each matrix, all in both directions, and three of bounded ones; or with biases.
MIXTURES: dict[str, tuple[str, dict[str, object]]] = {
    **{name: FAMILIES[name] for name in ("qwen 2 moe", "granite moe", "llama 4", "step 3.5", "gpt-oss")},
    "llama 4": (FAMILIES["llama 4"][0], {**FAMILIES["llama 4"][1], "attention_chunk_size": 64}),
}
# Layers that keep a state.
HYBRIDS: dict[str, tuple[str, dict[str, object]]] = {
    "qwen 3 next": ("qwen3_next", QWEN_3_NEXT),
    "qwen 3.5": ("qwen3_5_text", RECURRENT),
    "granite 4": ("granitemoehybrid", GRANITE_HYBRID),
    "bamba": ("bamba", BAMBA),
    "falcon h1": ("falcon_h1", FALCON_H1),
    "kimi linear": ("kimi_linear", KIMI_LINEAR),
    "ling 2.6": ("bailing_hybrid", LING_2_6),
    "nemotron 3 super": ("nemotron_h", NEMOTRON_3_SUPER),
    "lfm2 moe": ("lfm2_moe", LFM_2_MOE),
}
# Norms and a head that add biases, and a feed-forward of GELU without a gate.
BIASED: dict[str, tuple[str, dict[str, object]]] = {
    "stablelm": ("stablelm", {"use_parallel_residual": True}),
    "nemotron 4": ("nemotron", {}),
    "starcoder 2": ("starcoder2", {}),
    "phi 2": ("phi", {}),
}


@pytest.mark.parametrize("name", MIXTURES | HYBRIDS | BIASED)
def test_products_and_experts_are_rounded_and_those_with_biases_left(name: str, tmp_path: Path) -> None:
    if name in HYBRIDS | BIASED:
        save_reference(tmp_path, *(HYBRIDS | BIASED)[name])
    else:
        saved(tmp_path, MIXTURES[name][0], **MIXTURES[name][1])
    kind = ExpertWeights if name == "gpt-oss" else FewBitExperts
    model = CheckedLayers.made(tmp_path, quantization=Quantization.FP8)
    weights = model.runner.worker.decoder.weights
    dummies = load_shard(
        tmp_path, model.subject.model, model.subject.shard, dtype=torch.float32, device=CPU,
        load_format=LoadFormat.DUMMY,
    )  # fmt: skip
    assert weights.head.weight.format() == PLAIN
    for layer, dummy in zip(weights.layers, dummies.layers, strict=True):
        if isinstance(layer.feed_forward, MixtureWeights) and isinstance(dummy.feed_forward, MixtureWeights):
            assert layer.linears[WeightName.ROUTER].weight.format() == PLAIN
            for experts in (layer.feed_forward.experts, dummy.feed_forward.experts):
                assert isinstance(experts, kind)
                assert all(bool(it.isfinite().all()) for it in experts.of(0, torch.float32))
        others = {it.weight.format() for of, it in layer.linears.items() if of is not WeightName.ROUTER}
        assert others - {PLAIN} == {FP8_ROWS}
    found = model.check()
    assert found.first is None, str(found.first)


def test_logits_are_those_of_a_file_in_8_bits(tmp_path: Path) -> None:
    saved(tmp_path / "plain", "qwen3_moe", **QWEN_3_MOE)

    def in_rows(tensors: Tensors) -> Tensors:
        found = dict(tensors)
        for name in [it for it in tensors if it.endswith("_proj.weight")]:
            scales = tensors[name].abs().amax(1, keepdim=True) / torch.tensor(448.0)
            found |= {name: (tensors[name] / scales).to(torch.float8_e4m3fn), f"{name}_scale": scales}
        return found

    weights = {"num_bits": 8, "type": "float", "strategy": "channel"}
    inputs = {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True}
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
    says = {
        "quant_method": "compressed-tensors",
        "ignore": ["lm_head", "re:.*mlp.gate$"],
        "config_groups": {"0": group},
    }
    written = edited(tmp_path / "plain", tmp_path / "written", {"quantization_config": says}, in_rows)
    configs = {tmp_path / "plain": rounded_at_load(load_config(tmp_path / "plain")), written: load_config(written)}
    served, of_file = (
        PagedRunner(load_decoder(folder, config, dtype=torch.float32, device=CPU, load_format=LoadFormat.AUTO))
        for folder, config in configs.items()
    )
    token_ids = prompt(20)
    assert torch.equal(served.logits(token_ids, [13, 6, 1]), of_file.logits(token_ids, [13, 6, 1]))
    assert weight_bytes(configs[written], Dtype.BF16) == weight_bytes(configs[tmp_path / "plain"], Dtype.BF16)


def test_each_rank_rounds_its_own_part_of_an_expert(tmp_path: Path) -> None:
    saved(tmp_path, "qwen3_moe", **QWEN_3_MOE)
    file, config = load_file(tmp_path / "model.safetensors"), rounded_at_load(load_config(tmp_path))
    for rank in range(2):
        weights = load_shard(tmp_path, config, shard_of(config, rank, 2), dtype=torch.float32, device=CPU)
        fed = weights.layers[1].feed_forward
        assert isinstance(fed, MixtureWeights)
        for expert in range(fed.experts.num_experts):
            prefix = f"model.layers.1.mlp.experts.{expert}."
            gate, up = (file[f"{prefix}{it}_proj.weight"].chunk(2)[rank] for it in ("gate", "up"))
            gate_up, down = fed.experts.of(expert, torch.float32)
            assert torch.equal(gate_up, rounded(torch.cat([gate, up])))
            assert torch.equal(down, rounded(file[f"{prefix}down_proj.weight"].chunk(2, 1)[rank]))


def test_reproducible_experts_are_left_as_they_are(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    saved(tmp_path, "qwen3_moe", **QWEN_3_MOE)
    settings = Settings(model=str(tmp_path), device=DeviceChoice.CPU, quantization=Quantization.FP8, reproducible=True)
    assert has_plain_experts(read_subject(settings).model)
    assert "leaves the experts in 16 bits: under --reproducible those of 16" in caplog.text


@pytest.mark.parametrize("dtype", [DtypeChoice.FP32, DtypeChoice.BF16])
def test_layers_that_were_rounded_are_proven(dtype: DtypeChoice, tmp_path: Path) -> None:
    saved(tmp_path, "phi3")
    model = CheckedLayers.made(tmp_path, dtype, Quantization.FP8)
    found = model.check()
    assert found.first is None, str(found.first)
    found = model.check(model.decoder_of(tmp_path))  # of the same files, and not rounded
    assert found.first is not None
    assert found.first.section == "queries"


def test_what_is_quantised_already_is_refused(tmp_path: Path) -> None:
    save_mxfp4(tmp_path, {**MXFP4, "head_dim": 16, "bos_token_id": None, "eos_token_id": None})
    with pytest.raises(ModelError, match=r"--quantization fp8 rounds weights of 16 bits .* has mxfp4 already"):
        read_subject(Settings(model=str(tmp_path), device=DeviceChoice.CPU, quantization=Quantization.FP8))
