"""MiMo V2.5 as it is published: queries, keys and values as one tensor of 8 bits, in shards."""

import json
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel

from support.models.tiny_families import MIMO, save_reference

NUM_SHARDS = 2  # KV heads of a layer without a window; one with has twice as many, two in each shard
# Of a shard's 136 rows, 176 in layers with a window, the second block begins within the values, or within the keys.
SHARDED = {**MIMO, "head_dim": 24, "v_head_dim": 16, "hidden_size": 160, "num_key_value_heads": NUM_SHARDS}
_BLOCK = 128
_PLAIN = ("self_attn.o_proj", "mlp")
_LARGEST = 448.0


def save_sharded(folder: Path) -> PreTrainedModel:
    """Save a tiny model; return transformers' of the numbers that its files stand for."""
    model = save_reference(folder, "mimo_v2_flash", SHARDED)
    tensors = load_file(folder / "model.safetensors")
    with torch.no_grad():
        for index in range(model.config.num_hidden_layers):
            prefix = f"model.layers.{index}.self_attn"
            names = [f"{prefix}.{it}_proj.weight" for it in "qkv"]
            parts = [tensors.pop(name) / 4**at for at, name in enumerate(names)]  # of unlike sizes
            codes, scales, numbers = sharded(parts)
            tensors |= {f"{prefix}.qkv_proj.weight": codes, f"{prefix}.qkv_proj.weight_scale_inv": scales}
            for name, values in zip(names, numbers, strict=True):
                model.get_parameter(name).copy_(values)
    save_file(tensors, folder / "model.safetensors")
    path = folder / "config.json"
    own = {
        "model_type": "mimo_v2",
        "architectures": ["MiMoV2ForCausalLM"],
        "attention_projection_layout": "fused_qkv",
        "swa_num_key_value_heads": 2 * NUM_SHARDS,
        "quantization_config": {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "weight_block_size": [_BLOCK, _BLOCK],
            "ignored_layers": ["lm_head", *(f"model.layers.{it}.{of}" for it in range(3) for of in _PLAIN)],
        },
    }
    path.write_text(json.dumps(json.loads(path.read_text()) | own))
    return model


def sharded(parts: list[Tensor]) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Return codes and scales of queries, keys and values as one tensor, and the numbers of each."""
    shards = [torch.cat(own) for own in zip(*(it.chunk(NUM_SHARDS) for it in parts), strict=True)]
    rounded = [_in_blocks(it) for it in shards]
    of_shards = [torch.split(numbers, [it.shape[0] // NUM_SHARDS for it in parts]) for *_, numbers in rounded]
    return (
        torch.cat([codes for codes, *_ in rounded]),
        torch.cat([scales for _, scales, _ in rounded]),
        [torch.cat(own) for own in zip(*of_shards, strict=True)],
    )


def _in_blocks(values: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return e4m3 codes, scales of blocks of 128 by 128 whose last ones are cut off, and the numbers of both."""
    rows, columns = values.shape
    padded = F.pad(values, (0, -columns % _BLOCK, 0, -rows % _BLOCK))
    blocks = padded.view(padded.shape[0] // _BLOCK, _BLOCK, -1, _BLOCK)
    scales = blocks.abs().amax((1, 3)) / _LARGEST
    spread = scales.repeat_interleave(_BLOCK, 0)[:rows].repeat_interleave(_BLOCK, 1)[:, :columns]
    codes = (values / spread).to(torch.float8_e4m3fn)
    return codes, scales, codes.float() * spread
