"""Checkpoints in 4 bits, packed here number by number as their makers define it: read, cut for ranks, or refused."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from kernels.linear.epilogue import Epilogue
from kernels.linear.first_path import multiply
from kernels.linear.formats.int4_formats import INT4_32, INT4_64, INT4_128
from kernels.linear.shape import PLAIN, WeightFormat
from kernels.vocabulary.shape import Dtype
from qualification.model.config import num_parameters, weight_bytes
from qualification.model.shard import shard_of
from server.errors import ModelError
from server.model.linear import WeightName
from server.model.load.load import load_config, load_shard
from server.settings import DtypeChoice, LoadFormat
from support.engine.checked_layers import CheckedLayers
from support.models.quantized_files import (
    PARTS,
    awq,
    change,
    compressed,
    compressed_symmetric,
    gptq,
    gptq_v1,
)

CPU = torch.device("cpu")
HIDDEN, WIDTH, VOCABULARY = 128, 256, 33
MODEL = {
    "model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "vocab_size": VOCABULARY, "hidden_size": HIDDEN,
    "intermediate_size": WIDTH, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 64, "max_position_embeddings": 128, "tie_word_embeddings": False, "dtype": "float32",
}  # fmt: skip
PRODUCTS = {
    "self_attn.q_proj": (256, HIDDEN), "self_attn.k_proj": (128, HIDDEN), "self_attn.v_proj": (128, HIDDEN),
    "self_attn.o_proj": (HIDDEN, 256), "mlp.gate_proj": (WIDTH, HIDDEN), "mlp.up_proj": (WIDTH, HIDDEN),
    "mlp.down_proj": (HIDDEN, WIDTH),
}  # fmt: skip
PLAIN_PARTS = "model.layers.1.mlp."  # which every list of exceptions names


@dataclass(frozen=True)
class Kind:
    """A maker's words, and how he packs. zeros: the least and the most."""

    says: Mapping[str, Any]
    format: WeightFormat
    group: int
    pack: Callable[[Tensor, Tensor, Tensor], dict[str, Tensor]]
    zeros: tuple[int, int] = field(default=(0, 15))


def of_groups(size: int, *, is_symmetric: bool) -> dict[str, Any]:
    weights = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": size, "symmetric": is_symmetric}
    return {
        "quant_method": "compressed-tensors", "format": "pack-quantized", "ignore": ["lm_head", "re:.*layers.1.mlp.*"],
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": None}},
    }  # fmt: skip


GPTQ = {"quant_method": "gptq", "bits": 4, "desc_act": False, "dynamic": {r"-:.*layers\.1\.mlp": {}}}
KINDS = {
    "awq": Kind(
        {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm",
         "modules_to_not_convert": ["layers.1.mlp"]},
        INT4_128, 128, awq,
    ),
    "gptq": Kind(GPTQ | {"group_size": 64, "sym": False}, INT4_64, 64, gptq_v1),
    "gptq v2": Kind(GPTQ | {"group_size": 32, "sym": False, "checkpoint_format": "gptq_v2"}, INT4_32, 32, gptq),
    "gptq symmetric": Kind(GPTQ | {"group_size": 128, "sym": True}, INT4_128, 128, gptq_v1, (8, 8)),
    # Published so: it says v1, and its zero points are those of v2.
    "gptq of another version": Kind(GPTQ | {"group_size": 128, "sym": True}, INT4_128, 128, gptq, (8, 8)),
    "compressed": Kind(of_groups(32, is_symmetric=False), INT4_32, 32, compressed),
    "compressed symmetric": Kind(of_groups(128, is_symmetric=True), INT4_128, 128, compressed_symmetric, (8, 8)),
}  # fmt: skip


def write(folder: Path, kind: Kind) -> dict[str, Tensor]:
    """Write a checkpoint; returns the numbers of each product, fp64."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(MODEL | {"quantization_config": kind.says}))
    random = torch.Generator().manual_seed(0)
    stored = {
        "model.embed_tokens.weight": torch.randn(VOCABULARY, HIDDEN, generator=random),
        "lm_head.weight": torch.randn(VOCABULARY, HIDDEN, generator=random),
        "model.norm.weight": torch.ones(HIDDEN),
    }
    numbers = {}
    for layer in range(2):
        prefix = f"model.layers.{layer}"
        for norm in ("input_layernorm", "post_attention_layernorm"):
            stored[f"{prefix}.{norm}.weight"] = torch.ones(HIDDEN)
        for norm in ("q_norm", "k_norm"):
            stored[f"{prefix}.self_attn.{norm}.weight"] = torch.ones(64)
        for of, (rows, columns) in PRODUCTS.items():
            name = f"{prefix}.{of}"
            if name.startswith(PLAIN_PARTS):
                stored[f"{name}.weight"] = torch.randn(rows, columns, generator=random) / columns**0.5
                numbers[name] = stored[f"{name}.weight"].double()
                continue
            codes = torch.randint(0, 16, (rows, columns), generator=random)
            groups = columns // kind.group
            least, most = kind.zeros
            zeros = torch.randint(least, most + 1, (rows, groups), generator=random)
            zeros[0], zeros[-1] = least, most
            scales = (0.5 + torch.rand(rows, groups, generator=random)).mul(columns**-0.5 / 5).bfloat16().half()
            stored |= {f"{name}.{word}": it for word, it in kind.pack(codes, zeros, scales).items()}
            each = [it.double().repeat_interleave(kind.group, 1) for it in (zeros, scales)]
            numbers[name] = (codes - each[0]) * each[1]
    save_file(stored, folder / "model.safetensors")
    return numbers


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS.keys())
def test_products_are_those_of_the_definition(tmp_path: Path, kind: Kind) -> None:
    numbers = write(tmp_path, kind)
    config = load_config(tmp_path)
    assert {it.formats.qkv for it in config.layers} == {it.formats.output for it in config.layers} == {kind.format}
    assert [it.formats.gate_up for it in config.layers] == [kind.format, PLAIN]
    assert 0 < weight_bytes(config, Dtype.FP32) < num_parameters(config) * 2
    layers = load_shard(tmp_path, config, shard_of(config, 0, 1), dtype=torch.float32, device=CPU).layers
    for (index, layer), (name, parts) in product(enumerate(layers), PARTS.items()):
        weight = layer.linears[name].weight
        due = torch.cat([numbers[f"model.layers.{index}.{it}"] for it in parts])
        assert torch.equal(weight.dequantized().double(), due)
        x = torch.randn(5, weight.size[1], generator=torch.Generator().manual_seed(1))
        found = multiply(x, weight, None, Epilogue.NONE)
        torch.testing.assert_close(found.double(), x.double() @ due.T, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("kind", [KINDS["awq"], KINDS["gptq"], KINDS["compressed"]], ids=["awq", "gptq", "compressed"])
def test_two_ranks_of_4_bits_hold_the_whole(tmp_path: Path, kind: Kind) -> None:
    numbers = write(tmp_path, kind)
    config = load_config(tmp_path)
    ranks = [
        load_shard(tmp_path, config, shard_of(config, rank, 2), dtype=torch.float32, device=CPU) for rank in range(2)
    ]
    own = [it.layers[0].linears for it in ranks]
    down = torch.cat([part[WeightName.DOWN].weight.dequantized() for part in own], 1)
    assert torch.equal(down, numbers["model.layers.0.mlp.down_proj"])
    pairs = [part[WeightName.QKV].weight.split([128, 64, 64]) for part in own]
    for index, name in enumerate("qkv"):
        together = torch.cat([parts[index].dequantized() for parts in pairs])
        assert torch.equal(together, numbers[f"model.layers.0.self_attn.{name}_proj"])


def test_a_part_of_a_rank_that_cuts_a_group_is_refused(tmp_path: Path) -> None:
    write(tmp_path, KINDS["gptq symmetric"])
    config = load_config(tmp_path)
    with pytest.raises(ModelError, match=r"stored by blocks of 128, and a rank's part has a border at 64"):
        load_shard(tmp_path, config, shard_of(config, 1, 4), dtype=torch.float32, device=CPU)


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS.keys())
def test_layers_of_4_bits_are_proven(tmp_path: Path, kind: Kind) -> None:
    write(tmp_path, kind)
    found = CheckedLayers.made(tmp_path, DtypeChoice.FP32).check()
    assert found.first is None, str(found.first)


def shifted(part: str, change: Callable[[Tensor], Tensor]) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        tensors = load_file(folder / "model.safetensors")
        found = {name: change(it).contiguous() if name.endswith(part) else it for name, it in tensors.items()}
        save_file(found, folder / "model.safetensors")

    return edit


def added(name: str) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        file = folder / "model.safetensors"
        save_file({**load_file(file), name: torch.ones(2, dtype=torch.int32)}, file)

    return edit


def told(**says: object) -> Callable[[Path], None]:
    return lambda folder: change(folder, **says)


FAULTS = {
    "zero points of the other version": ("gptq", told(checkpoint_format="gptq_v2")),
    "scales of the neighbour group": ("compressed", shifted("o_proj.weight_scale", lambda it: it.roll(1, 1))),
    "zero points of the neighbour row": ("compressed", shifted("o_proj.weight_zero_point", lambda it: it.roll(1, 0))),
    "codes of the neighbour column": ("awq", shifted("v_proj.qweight", lambda it: it >> 4)),
}


@pytest.mark.parametrize("name", FAULTS)
def test_wrong_numbers_of_4_bits_are_seen(tmp_path: Path, name: str) -> None:
    kind, edit = FAULTS[name]
    write(tmp_path / "right", KINDS[kind])
    write(tmp_path / "wrong", KINDS[kind])
    edit(tmp_path / "wrong")
    model = CheckedLayers.made(tmp_path / "right", DtypeChoice.FP32)
    found = model.check(model.decoder_of(tmp_path / "wrong"))
    assert found.first is not None
    assert found.first.factor > 1.5


@pytest.mark.parametrize(
    ("kind", "edit", "message"),
    [
        ("awq", told(bits=8), "bits must be 4, found 8"),
        ("awq", told(version="gemv"), "version must be one of gemm, GEMM, found 'gemv'"),
        ("awq", told(group_size=-1), "group_size must be one of 32, 64, 128, found -1"),
        ("gptq", told(desc_act=True), r"desc_act must be false \(columns in another order are not supported\)"),
        ("gptq", told(dynamic={"+:.*": {"bits": 8}}), r"must be absent: only regular expressions behind \"-:\""),
        ("gptq", told(dynamic={}), r"missing: .*model.layers.1.mlp"),
        ("gptq", shifted("0.mlp.up_proj.g_idx", lambda it: it.flip(0)), r"up_proj.g_idx: columns in another order"),
        ("gptq symmetric", shifted("k_proj.qzeros", lambda it: it + 2), r"qzeros has \[7, 9\], where 7 or 8 was"),
        ("gptq", shifted("0.self_attn.k_proj.scales", lambda it: it[:, 1:]), "k_proj in .*: of 128 rows"),
        ("awq", shifted("0.mlp.up_proj.qweight", lambda it: torch.cat([it, it[:1]])), r"up_proj.weight in .* expected"),
        ("compressed", told(ignore=["lm_head"]), r"missing: .*model.layers.1.mlp"),
        # What would be read in place of the codes, or ignored.
        ("awq", added("model.layers.0.mlp.up_proj.weight"), r"up_proj.weight is there beside .*up_proj.qweight"),
        ("compressed", added("model.layers.0.mlp.up_proj.weight"), r"up_proj.weight is there beside .*weight_packed"),
        ("gptq", added("model.layers.0.mlp.up_proj.weight_shape"), "not known to this architecture: .*weight_shape"),
    ],
)  # fmt: skip
def test_what_is_not_served_is_named(tmp_path: Path, kind: str, edit: Callable[[Path], None], message: str) -> None:
    write(tmp_path, KINDS[kind])
    edit(tmp_path)
    with pytest.raises(ModelError, match=message):
        load_shard(tmp_path, config := load_config(tmp_path), shard_of(config, 0, 1), dtype=torch.float32, device=CPU)


def test_dummy_weights_of_4_bits_are_small(tmp_path: Path) -> None:
    write(tmp_path, KINDS["awq"])
    config = load_config(tmp_path)
    whole = shard_of(config, 0, 1)
    weights = load_shard(tmp_path, config, whole, dtype=torch.float32, device=CPU, load_format=LoadFormat.DUMMY)
    assert 0 < weights.layers[0].linears[WeightName.DOWN].weight.dequantized().abs().max() < 0.01
