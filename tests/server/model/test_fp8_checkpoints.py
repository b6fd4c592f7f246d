"""Checkpoints in 8 bits, written here by their makers' definitions: read, cut for ranks, multiplied, or refused."""

import json
import re
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
from kernels.linear.shape import FP8_BLOCKS, FP8_ROWS, FP8_STATIC, PLAIN, WeightFormat
from kernels.vocabulary.shape import Dtype
from qualification.decision.linear_shapes import linear_shapes_needed
from qualification.model.config import num_parameters, weight_bytes
from qualification.model.shard import shard_of
from server.errors import ModelError
from server.model.decoder import Decoder
from server.model.linear import CutOff, Unplanned, WeightName
from server.model.load.load import load_config, load_shard
from server.settings import DtypeChoice
from support.engine.checked_layers import CheckedLayers, edited
from support.models.paged_runner import PagedRunner
from support.models.quantized_files import PARTS, change

CPU = torch.device("cpu")
HIDDEN, WIDTH, VOCABULARY = 320, 512, 33  # two and a half blocks, and four
MODEL = {
    "model_type": "qwen3", "vocab_size": VOCABULARY, "hidden_size": HIDDEN, "intermediate_size": WIDTH,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 64,
    "max_position_embeddings": 128, "tie_word_embeddings": False, "dtype": "float32",
}  # fmt: skip
PRODUCTS = {
    "self_attn.q_proj": (256, HIDDEN), "self_attn.k_proj": (256, HIDDEN), "self_attn.v_proj": (256, HIDDEN),
    "self_attn.o_proj": (HIDDEN, 256), "mlp.gate_proj": (WIDTH, HIDDEN), "mlp.up_proj": (WIDTH, HIDDEN),
    "mlp.down_proj": (HIDDEN, WIDTH),
}  # fmt: skip
INPUT_SCALE = 0.03
BOUND = 40.0  # that inputs 30 times as large as others reach, and no others


@dataclass(frozen=True)
class Kind:
    """A way of storing 8 bits.

    says, file   the words of config.json, or of a file beside it
    granularity  of scales; word, scale_shape: their name and shape in the file
    format       the one that must be read
    """

    says: dict[str, Any]
    format: WeightFormat
    granularity: str
    word: str = "weight_scale"
    scale_shape: Callable[[Tensor], Tensor] = field(default=lambda scale: scale)
    is_static: bool = False
    file: str | None = None  # says it, in place of config.json


def of_groups(strategy: str, inputs: Mapping[str, object], **weights: object) -> dict[str, Any]:
    group = {
        "targets": ["Linear"],
        "weights": {"num_bits": 8, "type": "float", "symmetric": True, "strategy": strategy, **weights},
        "input_activations": {"num_bits": 8, "type": "float", **inputs},
    }
    return {
        "quant_method": "compressed-tensors", "format": "float-quantized", "ignore": ["lm_head", "re:.*layers.1.mlp.*"],
        "config_groups": {"group_0": group},
    }  # fmt: skip


LISTED = ["lm_head", *(f"model.layers.1.mlp.{it}_proj" for it in ("gate", "up", "down"))]
KINDS = {
    "fp8 blocks": Kind(
        {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128],
         "modules_to_not_convert": LISTED},
        FP8_BLOCKS, "block", "weight_scale_inv",
    ),
    "fp8 static": Kind(
        {"quant_method": "fp8", "activation_scheme": "static", "ignored_layers": ["layers.1.mlp", "lm_head"]},
        FP8_STATIC, "tensor", scale_shape=lambda scale: scale.reshape(()), is_static=True,
    ),
    "fp8 dynamic": Kind({"quant_method": "fp8", "modules_to_not_convert": ["model.layers.1.mlp"]}, FP8_ROWS, "tensor"),
    "fbgemm": Kind(
        {"quant_method": "fbgemm_fp8", "activation_scale_ub": BOUND, "modules_to_not_convert": LISTED},
        FP8_ROWS, "channel",
    ),
    "compressed channel": Kind(of_groups("channel", {"dynamic": True, "strategy": "token"}), FP8_ROWS, "channel"),
    "compressed tensor": Kind(
        of_groups("tensor", {"dynamic": False, "strategy": "tensor"}), FP8_STATIC, "tensor", is_static=True
    ),
    "compressed block": Kind(
        of_groups("block", {"dynamic": True, "strategy": "group", "group_size": 128}, block_structure=[128, 128]),
        FP8_BLOCKS, "block",
    ),
    "modelopt": Kind(
        {"quant_method": "modelopt", "quant_algo": "FP8", "ignore": ["lm_head", "model.layers.1.mlp*"]},
        FP8_STATIC, "tensor", scale_shape=lambda scale: scale.reshape(()), is_static=True,
    ),
    "modelopt file": Kind(
        {"producer": {"name": "modelopt"},
         "quantization": {"quant_algo": "FP8_PER_CHANNEL_PER_TOKEN", "exclude_modules": ["lm_head", "*.1.mlp.*"]}},
        FP8_ROWS, "channel", scale_shape=lambda scale: scale.flatten(), file="hf_quant_config.json",
    ),
}  # fmt: skip
_EACH = {"tensor": (10**6, 10**6), "channel": (1, 10**6), "block": (128, 128)}


def rounded(values: Tensor, rows: int, columns: int) -> tuple[Tensor, Tensor]:
    """(codes, scales) of blocks of so many rows and columns."""
    block = min(rows, values.shape[0]), min(columns, values.shape[1])
    scales = torch.nn.functional.max_pool2d(values.abs()[None], block, ceil_mode=True)[0] / 448
    return (values / of_each(scales, values, rows, columns)).to(torch.float8_e4m3fn), scales


def widened(codes: Tensor, scales: Tensor, rows: int, columns: int) -> Tensor:
    return codes.double() * of_each(scales.double(), codes, rows, columns)


def of_each(scales: Tensor, numbers: Tensor, rows: int, columns: int) -> Tensor:
    """Return the scale of each number."""
    height, width = numbers.shape
    found = scales.repeat_interleave(min(rows, height), 0)[:height]
    return found.repeat_interleave(min(columns, width), 1)[:, :width]


def write(folder: Path, kind: Kind) -> dict[str, Tensor]:
    """Write a checkpoint; returns the numbers of each of its tensors, those of products by the definition."""
    says = {} if kind.file else {"quantization_config": kind.says}
    (folder / "config.json").write_text(json.dumps(MODEL | says))
    if kind.file:
        (folder / kind.file).write_text(json.dumps(kind.says))
    random = torch.Generator().manual_seed(0)

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=random)

    numbers = {"model.embed_tokens.weight": randn(VOCABULARY, HIDDEN), "lm_head.weight": randn(VOCABULARY, HIDDEN)}
    numbers["model.norm.weight"] = torch.ones(HIDDEN)
    for layer in range(2):
        prefix = f"model.layers.{layer}"
        for norm, size in (("input_layernorm", HIDDEN), ("post_attention_layernorm", HIDDEN)):
            numbers[f"{prefix}.{norm}.weight"] = 1 + randn(size) / 10
        for norm in ("q_norm", "k_norm"):
            numbers[f"{prefix}.self_attn.{norm}.weight"] = 1 + randn(64) / 10
    stored = dict(numbers)
    for layer in range(2):
        for of, size in PRODUCTS.items():
            name = f"model.layers.{layer}.{of}"
            # Parts of one product differ in size, so that a scale of another part shows.
            values = randn(*size) * size[1] ** -0.5 * (1 + len(of) % 3)
            if layer == 1 and of.startswith("mlp."):
                stored[f"{name}.weight"] = numbers[f"{name}.weight"] = values
                continue
            codes, scales = rounded(values, *_EACH[kind.granularity])
            stored[f"{name}.weight"], stored[f"{name}.{kind.word}"] = codes, kind.scale_shape(scales).contiguous()
            numbers[f"{name}.weight"] = widened(codes, scales, *_EACH[kind.granularity])
            if kind.is_static:
                stored[f"{name}.input_scale"] = torch.tensor(INPUT_SCALE)
    save_file(stored, folder / "model.safetensors")
    return numbers


def rounded_inputs(x: Tensor, of: WeightFormat, bound: float | None) -> Tensor:
    """Round inputs as the makers' definitions do."""
    if of == PLAIN:
        return x.double()
    if of == FP8_STATIC:
        codes = (x / torch.tensor(INPUT_SCALE)).clamp(-448, 448).to(torch.float8_e4m3fn)
        return codes.double() * torch.tensor(INPUT_SCALE).double()
    if bound is not None:
        scales = x.abs().amax(1, keepdim=True).clamp(max=bound) / 448
        return (x / scales).clamp(-448, 448).to(torch.float8_e4m3fn).double() * scales.double()
    columns = 128 if of == FP8_BLOCKS else 10**6
    return torch.cat([widened(*rounded(row[None], 1, columns), 1, columns) for row in x])


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS.keys())
def test_products_are_those_of_the_definition(tmp_path: Path, kind: Kind) -> None:
    numbers = write(tmp_path, kind)
    config = load_config(tmp_path)
    assert {it.formats.qkv for it in config.layers} == {it.formats.output for it in config.layers} == {kind.format}
    assert [it.formats.gate_up for it in config.layers] == [kind.format, PLAIN]
    layers = load_shard(tmp_path, config, shard_of(config, 0, 1), dtype=torch.float32, device=CPU).layers
    for (index, layer), (name, parts) in product(enumerate(layers), PARTS.items()):
        linear = layer.linears[name]
        x = torch.randn(5, linear.weight.size[1], generator=torch.Generator().manual_seed(1))
        x[2] *= 30  # beyond what a scale of all inputs reaches
        weight = torch.cat([numbers[f"model.layers.{index}.{it}.weight"] for it in parts]).double()
        due = rounded_inputs(x, linear.weight.format(), config.input_bound) @ weight.T
        for epilogue in (Epilogue.NONE, *([Epilogue.SWIGLU] if name is WeightName.GATE_UP else [])):
            if epilogue is Epilogue.SWIGLU:
                gate, up = due.chunk(2, -1)
                due = torch.nn.functional.silu(gate) * up
            served = Unplanned(linear, epilogue)
            if config.input_bound is not None and linear.weight.format() != PLAIN:
                served = CutOff(served, config.input_bound)
            found = served(x, None)
            torch.testing.assert_close(found.double(), due, atol=1e-5 * float(due.abs().max()), rtol=1e-5)


def test_a_whole_model_of_8_bits_answers(tmp_path: Path) -> None:
    write(tmp_path, KINDS["fp8 blocks"])
    config = load_config(tmp_path)
    weights = load_shard(tmp_path, config, shard_of(config, 0, 1), dtype=torch.float32, device=CPU)
    whole = PagedRunner(Decoder(config, weights)).logits(torch.arange(30) % VOCABULARY, [30])
    assert bool(torch.isfinite(whole).all())
    assert 0 < weight_bytes(config, Dtype.FP32) < num_parameters(config) * 3


@pytest.mark.parametrize("name", ["compressed channel", "compressed block", "modelopt"])
def test_a_head_that_is_not_listed_has_8_bits(name: str, tmp_path: Path) -> None:
    kind = KINDS[name]
    write(tmp_path, kind)
    file = tmp_path / "model.safetensors"
    stored = load_file(file)
    codes, scales = rounded(stored["lm_head.weight"] / 9, *_EACH[kind.granularity])
    stored |= {"lm_head.weight": codes, "lm_head.weight_scale": kind.scale_shape(scales).contiguous()}
    if kind.is_static:
        stored["lm_head.input_scale"] = torch.tensor(INPUT_SCALE)
    save_file(stored, file)
    change(tmp_path, ignore=[it for it in kind.says["ignore"] if it != "lm_head"])
    config = load_config(tmp_path)
    assert config.head_format == kind.format
    [head] = {
        it.weight_format for it in linear_shapes_needed(config, Dtype.FP32, 8, "cpu") if it.size_out == VOCABULARY
    }
    assert head == kind.format
    weights = load_shard(tmp_path, config, shard_of(config, 0, 1), dtype=torch.float32, device=CPU)
    assert torch.equal(weights.head.weight.dequantized().double(), widened(codes, scales, *_EACH[kind.granularity]))
    model = CheckedLayers.made(tmp_path, DtypeChoice("float32"))
    found = model.check()
    assert found.first is None, str(found.first)
    wrong = {"lm_head.weight_scale": stored["lm_head.weight_scale"] * 1.5}
    other = edited(tmp_path, tmp_path / "wrong", None, lambda tensors: {**tensors, **wrong})
    assert model.check(model.decoder_of(other)).first is not None


@pytest.mark.parametrize("name", ["fp8 blocks", "fp8 static", "fp8 dynamic", "compressed channel"])  # each format
def test_two_ranks_of_8_bits_hold_the_whole(tmp_path: Path, name: str) -> None:
    kind = KINDS[name]
    numbers = write(tmp_path, kind)
    config = load_config(tmp_path)
    if kind.format == FP8_BLOCKS:
        with pytest.raises(ModelError, match=r"model.layers.0: rows 0 to 64 cut a block of 128"):
            load_shard(tmp_path, config, shard_of(config, 0, 4), dtype=torch.float32, device=CPU)
    for layer in range(2):
        parts = [
            load_shard(tmp_path, config, shard_of(config, rank, 2), dtype=torch.float32, device=CPU)
            .layers[layer]
            .linears
            for rank in range(2)
        ]
        down = torch.cat([part[WeightName.DOWN].weight.dequantized() for part in parts], 1)
        assert torch.equal(down.double(), numbers[f"model.layers.{layer}.mlp.down_proj.weight"].double())
        pairs = [part[WeightName.QKV].weight.split([128, 128, 128]) for part in parts]
        for index, part in enumerate("qkv"):
            together = torch.cat([own[index].dequantized() for own in pairs]).double()
            assert torch.equal(together, numbers[f"model.layers.{layer}.self_attn.{part}_proj.weight"].double())


@pytest.mark.parametrize(
    ("kind", "says", "message"),
    [
        ("fp8 blocks", {"weight_block_size": [64, 64]}, r"weight_block_size must be \[128, 128\], found \[64, 64\]"),
        (
            "fp8 blocks",
            {"quant_method": "quip"},
            "quant_method must be one of fp8, fbgemm_fp8, compressed-tensors, modelopt, awq, gptq, found",
        ),
        ("fp8 blocks", {"fmt": "e5m2"}, "fmt must be one of e4m3"),
        (
            "fp8 blocks",
            {"modules_to_not_convert": ["model.layers.0.self_attn.k_proj"]},
            "model.layers.0.self_attn.q_proj fp8_blocks, model.layers.0.self_attn.k_proj plain.* all be listed or none",
        ),
        ("fbgemm", {"activation_scale_ub": None}, "activation_scale_ub must be a positive number"),
        ("fbgemm", {"activation_scale_ub": 1201.0}, "activation_scale_ub must be .* that bf16 has.*found 1201.0"),
        ("fbgemm", {"modules_to_not_convert": []}, r"missing: model.layers.1.mlp.*weight_scale"),
        ("compressed channel", {"ignore": ["lm_head", "re:("]}, r"ignore must be .* 're:\(' is none"),
        ("compressed channel", {"config_groups": {"a": {"targets": ["Linear"]}}}, "weights must be an object"),
        ("compressed channel", {"config_groups": {"a": {"output_activations": {}}}}, "output_activations must be null"),
        (
            "modelopt",
            {"quant_algo": "W4A8_AWQ"},
            "quant_algo must be one of FP8, FP8_PER_CHANNEL_PER_TOKEN.*found 'W4A8_AWQ'",
        ),
        # Lists that leave a product out which the file has in other numbers, or name one too many.
        ("fp8 static", {"ignored_layers": ["lm_head"]}, r"missing: model.layers.1.mlp.*input_scale"),
        (
            "fp8 static",
            {"ignored_layers": ["layers.1"]},
            r"not known to this architecture: model.layers.1.*input_scale",
        ),
    ],
)
def test_what_is_not_served_is_named(tmp_path: Path, kind: str, says: dict[str, object], message: str) -> None:
    write(tmp_path, KINDS[kind])
    change(tmp_path, **says)
    with pytest.raises(ModelError, match=message):
        load_shard(tmp_path, config := load_config(tmp_path), shard_of(config, 0, 1), dtype=torch.float32, device=CPU)


def test_parts_with_different_scales_of_inputs_are_refused(tmp_path: Path) -> None:
    write(tmp_path, KINDS["fp8 static"])
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["model.layers.0.self_attn.v_proj.input_scale"] *= 2
    save_file(tensors, tmp_path / "model.safetensors")
    config = load_config(tmp_path)
    with pytest.raises(ModelError, match=r"qkv of layer 0: input_scale of parts .* must be the same"):
        load_shard(tmp_path, config, shard_of(config, 0, 1), dtype=torch.float32, device=CPU)


@pytest.mark.parametrize(
    ("kind", "word", "value", "message"),
    [
        ("fp8 blocks", "weight_scale_inv", torch.nan, "weight_scale_inv: finite numbers were expected, found nan"),
        ("compressed channel", "weight_scale", torch.inf, "weight_scale: finite numbers were expected, found inf"),
        ("modelopt", "input_scale", 0.0, "input_scale: positive numbers were expected, found 0"),
    ],
)
def test_scales_that_are_no_numbers_are_named(tmp_path: Path, kind: str, word: str, value: float, message: str) -> None:
    write(tmp_path, KINDS[kind])
    tensors = load_file(tmp_path / "model.safetensors")
    tensors[f"model.layers.0.mlp.down_proj.{word}"].view(-1)[0] = value
    save_file(tensors, tmp_path / "model.safetensors")
    config = load_config(tmp_path)
    with pytest.raises(ModelError, match=f"model.layers.0.mlp.down_proj.{message}"):
        load_shard(tmp_path, config, shard_of(config, 0, 1), dtype=torch.float32, device=CPU)


@pytest.mark.parametrize(
    ("kind", "word"),
    [("fp8 blocks", "weight_scale_inv"), ("fp8 blocks", "weight"), ("compressed channel", "weight_scale")],
)
def test_tensors_that_do_not_fit_are_named_as_in_the_file(tmp_path: Path, kind: str, word: str) -> None:
    write(tmp_path, KINDS[kind])
    file, name = tmp_path / "model.safetensors", f"model.layers.0.mlp.down_proj.{word}"
    tensors = load_file(file)
    without = {it: tensor for it, tensor in tensors.items() if it != name}
    other = name.replace("down_proj", "other_proj")
    for changed, message in (
        (without, f"missing: {name}:"),
        ({**without, name: tensors[name][:1, :0].contiguous()}, f"{name} in model.safetensors: expected shape"),
        ({**without, name: tensors[name].int()}, f"{name} in model.safetensors: expected one of"),
        ({**tensors, other: tensors[name].clone()}, f"not known to this architecture: {other}:"),
    ):
        save_file(changed, file)
        with pytest.raises(ModelError, match=re.escape(message)):
            load_shard(
                tmp_path, config := load_config(tmp_path), shard_of(config, 0, 1), dtype=torch.float32, device=CPU
            )


@pytest.mark.parametrize(
    ("kind", "name", "message"),
    [
        ("fp8 blocks", "model.layers.0.mlp.down_proj.weight_scale", "weight_scale_inv are both read as model"),
        ("modelopt", "model.layers.0.mlp.down_proj.weight_scale_inv", "weight_scale_inv are both read as model"),
        ("fp8 dynamic", "language_model.model.norm.weight", "and model.norm.weight are both read as model.norm.weight"),
    ],
)
def test_a_tensor_that_is_there_twice_is_named(tmp_path: Path, kind: str, name: str, message: str) -> None:
    write(tmp_path, KINDS[kind])
    tensors = load_file(tmp_path / "model.safetensors")
    save_file({**tensors, name: torch.ones(3, 4)}, tmp_path / "model.safetensors")
    config = load_config(tmp_path)
    with pytest.raises(ModelError, match=message):
        load_shard(tmp_path, config, shard_of(config, 0, 1), dtype=torch.float32, device=CPU)


@pytest.mark.parametrize("kind", ["fbgemm", "compressed channel"])
def test_scales_of_rows_that_lie_along_columns_are_named(tmp_path: Path, kind: str) -> None:
    write(tmp_path, KINDS[kind])
    tensors = load_file(tmp_path / "model.safetensors")
    name = "model.layers.0.mlp.down_proj.weight_scale"
    save_file({**tensors, name: tensors[name].T.contiguous()}, tmp_path / "model.safetensors")
    config = load_config(tmp_path)
    with pytest.raises(ModelError, match=rf"{name} .*expected shape \({HIDDEN}, 1\), found \(1, {HIDDEN}\)"):
        load_shard(tmp_path, config, shard_of(config, 0, 1), dtype=torch.float32, device=CPU)
