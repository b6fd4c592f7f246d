"""InternLM 2 as published: a Llama of transformers', saved with the names and the grouped tensor of its own class.

Source: modeling_internlm2.py of internlm/internlm2_5-7b-chat, whose names of tensors these are: `wqkv` has, of each KV
head, the queries that read it, then the key, then the value.
"""

from pathlib import Path
from typing import Any, ClassVar

import torch
from huggingface_hub.dataclasses import strict
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

_NAMES = {
    "model.embed_tokens.": "model.tok_embeddings.",
    "lm_head.": "output.",
    ".self_attn.o_proj.": ".attention.wo.",
    ".mlp.gate_proj.": ".feed_forward.w1.",
    ".mlp.up_proj.": ".feed_forward.w3.",
    ".mlp.down_proj.": ".feed_forward.w2.",
    ".input_layernorm.": ".attention_norm.",
    ".post_attention_layernorm.": ".ffn_norm.",
}


@strict
class InternLM2Config(LlamaConfig):  # type: ignore[misc]
    model_type = "internlm2"
    attribute_map: ClassVar[dict[str, str]] = {"bias": "attention_bias"}

    def to_dict(self) -> dict[str, Any]:
        """Return the published keys."""
        values = super().to_dict()
        bias = values.pop("attention_bias")
        return {name: it for name, it in values.items() if name not in ("head_dim", "mlp_bias")} | {"bias": bias}


class InternLM2ForCausalLM(LlamaForCausalLM):  # type: ignore[misc]
    config_class = InternLM2Config

    def save_pretrained(self, folder: str | Path, **options: Any) -> None:
        """Save the tensors by their published names."""
        super().save_pretrained(folder, **options)
        path = Path(folder) / "model.safetensors"
        save_file(_published(load_file(path), self.config.num_key_value_heads), path)

    @classmethod
    def from_pretrained(cls, folder: str | Path, *, config: InternLM2Config | None = None, **options: Any) -> Any:
        """Load tensors of the published names, cut by the config as its own class does."""
        config = config or InternLM2Config.from_pretrained(folder)
        tensors = _of_class(load_file(Path(folder) / "model.safetensors"), config)
        return super().from_pretrained(None, config=config, state_dict=tensors, **options)


def _published(tensors: dict[str, Tensor], num_groups: int) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if ".self_attn.q_proj." in name:
            parts = [tensors[name.replace("q_proj", part)] for part in ("q_proj", "k_proj", "v_proj")]
            grouped = torch.cat([it.reshape(num_groups, -1, *it.shape[1:]) for it in parts], dim=1)
            found[name.replace("self_attn.q_proj", "attention.wqkv")] = grouped.flatten(0, 1)
        elif ".k_proj." not in name and ".v_proj." not in name:
            own = name
            for ours, theirs in _NAMES.items():
                own = own.replace(ours, theirs)
            found[own] = tensor
    return found


def _of_class(tensors: dict[str, Tensor], config: InternLM2Config) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if ".attention.wqkv." in name:
            head_dim = config.hidden_size // config.num_attention_heads
            grouped = tensor.view(config.num_key_value_heads, -1, head_dim, *tensor.shape[1:])
            for part, cut in (("q", grouped[:, :-2]), ("k", grouped[:, -2]), ("v", grouped[:, -1])):
                last = cut.flatten(0, cut.dim() - tensor.dim())
                found[name.replace("attention.wqkv", f"self_attn.{part}_proj")] = last.contiguous()
            continue
        own = name
        for of_class, published in _NAMES.items():
            own = own.replace(published, of_class)
        found[own] = tensor
    return found


AutoConfig.register("internlm2", InternLM2Config)
AutoModelForCausalLM.register(InternLM2Config, InternLM2ForCausalLM)
