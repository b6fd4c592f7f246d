"""--quantization fp8: plain checkpoints whose dense products are rounded to 8 bits while they are loaded."""

import json
from itertools import accumulate
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from kernels.linear.shape import FP8_ROWS, PLAIN
from kernels.linear.weights import LinearWeight
from kernels.vocabulary.shape import Dtype
from qualification.model.config import num_parameters, weight_bytes
from qualification.model.families.quantization import rounded_at_load
from qualification.model.shard import shard_of
from server.engine.startup.subject import read_subject
from server.errors import ModelError
from server.model.linear import WeightName
from server.model.load.load import load_config, load_shard
from server.settings import DeviceChoice, DtypeChoice, LoadFormat, Quantization, Settings
from support.engine.checked_layers import CheckedLayers
from support.models.served_families import saved
from support.models.tiny_families import MXFP4, QWEN_2_MOE, save_mxfp4

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


def test_routers_experts_and_heads_stay_as_they_are(tmp_path: Path) -> None:
    saved(tmp_path, "qwen2_moe", **QWEN_2_MOE)
    model = CheckedLayers.made(tmp_path, quantization=Quantization.FP8)
    weights = model.runner.worker.decoder.weights
    formats = {name: it.weight.format() for name, it in weights.layers[0].linears.items()}
    assert formats.pop(WeightName.ROUTER) == PLAIN
    assert set(formats.values()) == {FP8_ROWS}
    assert len(formats) == 4
    assert weights.head.weight.format() == PLAIN
    found = model.check()
    assert found.first is None, str(found.first)


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
