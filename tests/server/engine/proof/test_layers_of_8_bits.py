"""Layers whose weights have 8 bits beside the plain forward pass, which rounds weights' inputs by the definition."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import Tensor

from kernels.linear.epilogue import Epilogue
from kernels.linear.rounded_input import Input, RoundedInput
from kernels.linear.shape import FP8_FORMATS
from qualification.measure.faults.norm_faults import NormFault, WrongNorm
from server.model.decoder import Decoder, Operators
from server.model.linear import Linear, Product, WeightName, unplanned
from server.model.step import Step
from server.settings import DtypeChoice
from support.engine.checked_layers import CheckedLayers, Tensors, edited
from support.models.quantized_files import in_8_bits
from support.models.served_families import saved

SIZES = {
    "hidden_size": 192, "intermediate_size": 384, "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 64,
}  # fmt: skip
LATENT_SIZES: dict[str, object] = {
    "hidden_size": 192, "intermediate_size": 384, "num_attention_heads": 4, "num_key_value_heads": 4,
    "first_k_dense_replace": 2, "q_lora_rank": 128, "kv_lora_rank": 160, "qk_nope_head_dim": 96, "qk_rope_head_dim": 32,
    "v_head_dim": 64,
}  # fmt: skip
ONE_TENSOR_SIZES: dict[str, object] = {  # queries, keys and values, of whole blocks each
    "hidden_size": 256, "intermediate_size": 384, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64,
    "first_k_dense_replace": 2,
}  # fmt: skip
STATIC = {"quant_method": "fp8", "activation_scheme": "static"}
KINDS: dict[str, dict[str, object]] = {
    "blocks": {"quant_method": "fp8", "weight_block_size": [128, 128]},
    "rows": {"quant_method": "fp8", "modules_to_not_convert": ["model.layers.0.mlp"]},
    "static": STATIC,
    "bounded": {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1.0},  # most rows have larger inputs
}


Made = Callable[[str, DtypeChoice], CheckedLayers]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    plain = tmp_path_factory.mktemp("models") / "plain"
    saved(plain, "qwen3", **SIZES)

    @cache
    def made(kind: str, dtype: DtypeChoice) -> CheckedLayers:
        into = plain.with_name(f"{kind} {dtype.value}")
        change = in_8_bits(kind, "layers.0.mlp" if kind == "rows" else "router")
        return CheckedLayers.made(edited(plain, into, {"quantization_config": KINDS[kind]}, change), dtype)

    return made


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [*((it, DtypeChoice.BF16) for it in KINDS), *((it, DtypeChoice.FP32) for it in ("blocks", "rows"))],
)
def test_layers_of_8_bits_are_proven(kind: str, dtype: DtypeChoice, made: Made) -> None:
    found = made(kind, dtype).check()
    assert found.first is None, str(found.first)
    assert found.largest.factor > 0.01


@pytest.mark.parametrize(
    ("family", "sizes", "dtype"),
    [
        ("deepseek_v3", LATENT_SIZES, DtypeChoice.BF16),
        ("deepseek_v3", LATENT_SIZES, DtypeChoice.FP32),
        ("bailing_moe_v2", ONE_TENSOR_SIZES, DtypeChoice.BF16),
    ],
)
def test_other_tensors_of_attention_in_8_bits_are_proven(
    family: str, sizes: dict[str, object], dtype: DtypeChoice, tmp_path: Path
) -> None:
    saved(tmp_path / "plain", family, **sizes)
    says = {"quantization_config": KINDS["blocks"]}
    found = CheckedLayers.made(edited(tmp_path / "plain", tmp_path / "8 bits", says, in_8_bits("blocks", "-")), dtype)
    assert found.check().first is None, str(found.check().first)


def replaced(part: str, change: Callable[[Tensor], Tensor]) -> Callable[[Tensors], Tensors]:
    return lambda tensors: {name: change(it) if name.endswith(part) else it for name, it in tensors.items()}


def other_bits(codes: Tensor) -> Tensor:
    """Read codes as if they had two bits behind the first one, and 5 of exponents."""
    return codes.view(torch.float8_e5m2).float().clamp(-448, 448).to(torch.float8_e4m3fn)


FAULTS: dict[str, tuple[str, str, Callable[[Tensors], Tensors]]] = {
    "scale of the neighbour block": (
        "blocks", "residual behind attention", replaced("0.self_attn.o_proj.weight_scale_inv", lambda it: it.roll(1, 1))
    ),
    "scales by the other dim's stride": (
        "blocks", "residual behind the feed-forward",
        replaced("0.mlp.down_proj.weight_scale_inv", lambda it: it.T.reshape(it.shape).contiguous()),
    ),
    "last block without its scale": (
        "blocks", "residual behind the feed-forward",
        replaced("0.mlp.down_proj.weight_scale_inv", lambda it: torch.cat((it[:, :-1], torch.ones(len(it), 1)), 1)),
    ),
    "reciprocal of a scale": ("rows", "values", replaced("v_proj.weight_scale", lambda it: 1 / it)),
    "codes of another kind": ("rows", "residual behind attention", replaced("o_proj.weight", other_bits)),
    "scale of inputs of another product": (
        "static", "residual behind attention", replaced("o_proj.input_scale", lambda it: it * 1.5)
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
def test_a_wrong_scale_or_code_is_seen_and_named(name: str, made: Made, tmp_path: Path) -> None:
    kind, section, change = FAULTS[name]
    model = made(kind, DtypeChoice.BF16)
    found = model.check(model.decoder_of(edited(model.subject.folder, tmp_path / "wrong", None, change)))
    assert found.first is not None
    assert found.first.section == section
    assert found.first.factor > 1.5


@dataclass(frozen=True)
class Rounding:
    """A product whose inputs the norm before it rounds, as a served one is, with a fault or without."""

    linear: Linear
    epilogue: Epilogue
    run: WrongNorm
    rounds_inputs: bool = True

    def normed(self, hidden: Tensor, residual: Tensor | None, norm: Tensor, eps: float) -> tuple[RoundedInput, Tensor]:
        return self.run.normed(hidden, residual, norm, eps, self.linear.weight)

    def __call__(self, x: Input, _step: Step | None, out: Tensor | None = None) -> Tensor:
        weight = self.linear.weight
        out = x.new_empty(x.shape[0], weight.size[0] // self.epilogue.parts, dtype=weight.dtype) if out is None else out
        self.run(x, weight, self.linear.bias, self.epilogue, out)
        return out


@pytest.mark.parametrize("kind", ["blocks", "static"])
@pytest.mark.parametrize("fault", [NormFault.NONE, NormFault.RECIPROCAL])
def test_layers_whose_norms_round_are_proven_or_refused(kind: str, fault: NormFault, made: Made) -> None:
    model, run = made(kind, DtypeChoice.BF16), WrongNorm(fault)

    def product(layer: int | None, name: WeightName, linear: Linear, epilogue: Epilogue) -> Product:
        is_rounded = linear.weight.format() in FP8_FORMATS
        return Rounding(linear, epilogue, run) if is_rounded else unplanned(layer, name, linear, epilogue)

    own = model.runner.worker.decoder
    found = model.check(Decoder(own.config, own.weights, own.ranks, Operators(product)))
    if fault is NormFault.NONE:
        assert found.first is None, str(found.first)
    else:
        assert found.first is not None
        assert found.first.section == "queries"
        assert found.first.factor > 1.5


def test_a_bound_of_inputs_that_is_not_kept_is_seen(made: Made, tmp_path: Path) -> None:
    model = made("bounded", DtypeChoice.BF16)
    says = {"quantization_config": {**KINDS["bounded"], "activation_scale_ub": 1.25}}
    found = model.check(model.decoder_of(edited(model.subject.folder, tmp_path / "wider", says)))
    assert found.first is not None
    assert found.first.section == "queries"
    assert found.first.factor > 1.5


def test_inputs_that_are_not_rounded_are_seen(made: Made, tmp_path: Path) -> None:
    model = made("rows", DtypeChoice.FP32)

    def widened(tensors: Tensors) -> Tensors:
        scales = {name: tensors[f"{name}_scale"] for name in tensors if f"{name}_scale" in tensors}
        plain = {name: tensors[name].float() * scale for name, scale in scales.items()}
        return {name: it for name, it in (tensors | plain).items() if not name.endswith("_scale")}

    plain = edited(model.subject.folder, tmp_path / "wide", {"quantization_config": None}, widened)
    found = model.check(model.decoder_of(plain))
    assert found.first is not None
    assert found.first.section == "queries"
