"""Hybrids in 8 and 4 bits, written by their makers' definitions, and transformers' models of the same numbers.

A model's products round their inputs as the definition says, whatever calls them: a mixture's experts, too.
"""

import json
import re
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel

from support.models.quantized_files import awq, compressed_symmetric, gptq

# Each part of a fused product, and each of two ranks' parts of it, are whole blocks.
QWEN: dict[str, object] = {
    "hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 2, "full_attention_interval": 2,
    "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 128,
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 128, "linear_value_head_dim": 128,
    "rope_parameters": {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.25},
    "initializer_range": 0.08,
}  # fmt: skip


def listed(num_layers: int, *products: str) -> list[str]:
    """Return names as published files of models that also see images have them, layer by layer."""
    return [f"model.language_model.layers.{layer}.{it}" for layer in range(num_layers) for it in products]


# What Qwen's files of 8 bits list: all that is no product, and the products that are left.
OF_QWEN = (
    "input_layernorm", "post_attention_layernorm", "linear_attn.A_log", "linear_attn.conv1d", "linear_attn.dt_bias",
    "linear_attn.in_proj_a", "linear_attn.in_proj_b", "linear_attn.norm", "self_attn.q_norm", "self_attn.k_norm",
    "mlp.gate", "mlp.shared_expert_gate",
)  # fmt: skip
BLOCKS: dict[str, Any] = {
    "quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128],
    "modules_to_not_convert": [
        "lm_head", "model.language_model.embed_tokens", *listed(2, *OF_QWEN), "model.visual.blocks.0.attn.qkv",
        "model.visual.merger.norm", "mtp.fc", "mtp.layers.0.input_layernorm", "mtp.layers.0.mlp.gate", "mtp.norm",
    ],
}  # fmt: skip

_FILE = "model.safetensors"
_LARGEST = 448.0
_OF_4_BITS = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])  # sizes of NVFP4's numbers
_STACKED = re.compile(r"(.*\.(?:mlp|mixer|feed_forward|block_sparse_moe)\.experts)\.(gate_up_proj|up_proj|down_proj)")
Round = Callable[[Tensor], Tensor]  # inputs [n, in] -> their numbers once they are rounded


def e4m3(values: Tensor, scales: Tensor) -> Tensor:
    return (values / scales).clamp(-_LARGEST, _LARGEST).to(torch.float8_e4m3fn)


def by_rows(x: Tensor) -> Tensor:
    scales = (x.abs().amax(-1, keepdim=True) / torch.tensor(_LARGEST)).clamp(min=2.0**-100)
    return e4m3(x, scales).float() * scales


def by_runs(x: Tensor) -> Tensor:
    """Round each 128 numbers of a row by their largest; the last run may have fewer."""
    return torch.cat([by_rows(it) for it in torch.split(x, 128, dim=-1)], dim=-1)


def with_scale(scale: float) -> Round:
    given = torch.tensor(scale)
    return lambda x: e4m3(x, given).float() * given


def as_they_are(x: Tensor) -> Tensor:
    return x


def stored_as(kind: str, name: str, values: Tensor) -> tuple[dict[str, Tensor], Tensor, Round]:
    """Return a product's tensors by the last words of their names, its numbers [out, in], and how inputs are rounded.

    kind  blocks; channel; static; gptq, awq or compressed, of 4 bits in groups of 32 columns; nvfp4, in groups of 16
    """
    if kind == "nvfp4":
        groups, whole = values.view(values.shape[0], -1, 16), values.abs().max() / 6 / _LARGEST
        scales = (groups.abs().amax(-1) / 6 / whole).to(torch.float8_e4m3fn)
        each = scales.float()[..., None] * whole
        found = (groups / each).abs()[..., None].sub(_OF_4_BITS).abs().argmin(-1)
        numbers = (_OF_4_BITS[found] * groups.sign() * each).flatten(1)
        codes = (found + 8 * (groups < 0)).flatten(1).to(torch.uint8)
        words = {"weight": codes[:, 0::2] | codes[:, 1::2] << 4, "weight_scale": scales, "weight_scale_2": whole}
        return {**words, "input_scale": torch.tensor(0.01)}, numbers, as_they_are
    if kind in ("gptq", "awq", "compressed"):
        scales = (
            (values.view(values.shape[0], -1, 32).abs().amax(-1) / 7).bfloat16().half().float()
        )  # that both dtypes have
        each = scales.repeat_interleave(32, 1)
        codes = ((values / each).round().clamp(-8, 7) + 8).long()
        zeros = torch.full(scales.shape, 8)
        pack = {"gptq": gptq, "awq": awq, "compressed": compressed_symmetric}[kind]
        # The version that published files of GPTQ say has zero points one less than those that count.
        words = pack(codes, zeros - 1 if kind == "gptq" else zeros, scales)
        return words, (codes - 8) * each, as_they_are
    if kind == "blocks":
        tops, lefts = (torch.arange(size) // 128 for size in values.shape)
        values = values * (1 + (tops[:, None] + 2 * lefts) % 3)  # blocks differ in size: another one's scale shows
        height, width = (min(128, size) for size in values.shape)
        scales = F.max_pool2d(values.abs()[None], (height, width), ceil_mode=True)[0] / _LARGEST
        each = scales[tops][:, lefts]
        codes = e4m3(values, each)
        return {"weight": codes, "weight_scale_inv": scales}, codes.float() * each, by_runs
    if kind == "channel":
        scales = values.abs().amax(1, keepdim=True) / _LARGEST
        codes = e4m3(values, scales)
        return {"weight": codes, "weight_scale": scales}, codes.float() * scales, by_rows
    assert kind == "static", kind
    scale = values.abs().max() / _LARGEST
    codes = e4m3(values, scale)
    # Parts of one product read the same, hence have one scale of inputs; of an expert, one of its own.
    of = re.search(r"experts\.(\d+)\.", name)
    given = (1 + int(of[1]) % 3 if of else 1) * (0.02 if "down" in name or "out_proj" in name else 0.01)
    words = {"weight": codes, "weight_scale": scale, "input_scale": torch.tensor(given)}
    return words, codes.float() * scale, with_scale(given)


def each_apart(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return a checkpoint's tensors with a tensor for each matrix of each expert, as quantised files have them."""
    found: dict[str, Tensor] = {}
    for name, values in tensors.items():
        of = _STACKED.fullmatch(name)
        if of is None:
            found[name] = values
            continue
        for expert, matrix in enumerate(values):
            if of[2] == "gate_up_proj":
                gate, up = matrix.chunk(2)
                found |= {f"{of[1]}.{expert}.gate_proj.weight": gate, f"{of[1]}.{expert}.up_proj.weight": up}
            else:
                found[f"{of[1]}.{expert}.{of[2]}.weight"] = matrix
    return {name: it.contiguous() for name, it in found.items()}


def _within(name: str) -> str:
    """Return a product's name without what a file, or transformers' class, has before all layers."""
    return name if name.startswith("mtp.") else name[max(name.find("layers."), 0) :]


class QuantizedHybrid:
    """A checkpoint in `folder`, one of its numbers in 32 bits in `folder`-wide, and transformers' model of those."""

    def __init__(
        self,
        folder: Path,
        save: Callable[[Path], PreTrainedModel],
        kind: str,
        says: Mapping[str, Any],
        is_quantized: Callable[[str], bool],
    ) -> None:
        """save: writes the plain model; is_quantized: of a product by its name."""
        self.folder, self.wide = folder, folder.with_name(f"{folder.name}-wide")
        self._class = type(save(folder))
        stored: dict[str, Tensor] = {}
        numbers: dict[str, Tensor] = {}
        self._rounds: dict[str, Round] = {}
        for name, values in each_apart(load_file(folder / _FILE)).items():
            product = name.removesuffix(".weight")
            if values.dim() == 3 and ".block_sparse_moe." in name and is_quantized(product):
                each = [stored_as(kind, name, matrix) for matrix in values]
                stored |= {f"{product}.{word}": torch.stack([it[0][word] for it in each]) for word in each[0][0]}
                numbers[name] = torch.stack([it[1] for it in each])
                layer, _, of = _within(product).rpartition(".")
                part = "up_proj" if of == "input_linear" else "down_proj"
                self._rounds |= {f"{layer}.experts.{expert}.{part}": it[2] for expert, it in enumerate(each)}
                continue
            if product == name or values.dim() != 2 or not is_quantized(product):
                stored[name] = numbers[name] = values
                continue
            words, numbers[name], self._rounds[_within(product)] = stored_as(kind, name, values)
            stored |= {f"{product}.{word}": it.contiguous() for word, it in words.items()}
        if "kv_cache_scheme" in says:
            for name in [it for it in numbers if it.endswith(("k_proj.weight", "v_proj.weight"))]:
                product = name.removesuffix(".weight")
                stored[f"{product}.{product[-6]}_scale"] = torch.tensor(0.5)
        config = json.loads((folder / "config.json").read_text())
        self.wide.mkdir()
        for into, tensors, own in ((folder, stored, {"quantization_config": says}), (self.wide, numbers, {})):
            save_file(tensors, into / _FILE, {"format": "pt"})
            (into / "config.json").write_text(json.dumps({**config, **own}))
        self.rounds_nothing = all(it is as_they_are for it in self._rounds.values())

    def model(self) -> PreTrainedModel:
        """Return transformers' model of these numbers, which rounds nothing by itself."""
        found: PreTrainedModel = self._class.from_pretrained(
            self.wide, dtype=torch.float32, experts_implementation="eager"
        )
        return found.eval()

    def rounding(self, model: PreTrainedModel) -> AbstractContextManager[object]:
        """Return a context in which products of the model round their inputs as the makers define it."""
        return _Rounding(model, self._rounds)


class _Rounding(TorchFunctionMode):
    """Rounds the first argument of each product with a weight that is quantised, or an expert's part of one."""

    def __init__(self, model: PreTrainedModel, rounds: Mapping[str, Round]) -> None:
        super().__init__()
        self._places: dict[int, Round] = {}
        for name, values in model.named_parameters():
            of = _STACKED.fullmatch(name)
            if of is None:
                if (product := _within(name.removesuffix(".weight"))) in rounds:
                    self._places[values.data_ptr()] = rounds[product]
                continue
            part = "up_proj" if of[2] == "gate_up_proj" else of[2]
            for expert, matrix in enumerate(values):
                if (product := _within(f"{of[1]}.{expert}.{part}")) in rounds:
                    self._places[matrix.data_ptr()] = rounds[product]
        assert len(self._places) > 0, "some product is quantised"

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.linear and (found := self._places.get(args[1].data_ptr())) is not None:
            args = (found(args[0]), *args[1:])
        return func(*args, **(kwargs or {}))
