"""MiniCPM as published: transformers lacks the class, whose definition is Granite's with other names of its scales.

Source: modeling_minicpm.py of openbmb/MiniCPM-2B-sft-bf16: embeddings times scale_emb, what layers add times
scale_depth / sqrt(layers), hidden states before the head by hidden_size / dim_model_base.
"""

from typing import Any

from huggingface_hub.dataclasses import strict
from transformers import AutoConfig, AutoModelForCausalLM, GraniteConfig, GraniteForCausalLM

_OF_GRANITE = (
    "embedding_multiplier",
    "residual_multiplier",
    "logits_scaling",
    "attention_multiplier",
    "mlp_bias",
    "head_dim",
)


@strict
class MiniCPMConfig(GraniteConfig):  # type: ignore[misc]
    model_type = "minicpm"
    scale_emb: float | int = 1
    scale_depth: float | int = 1
    dim_model_base: int = 1
    tie_word_embeddings: bool = True

    def __post_init__(self, **kwargs: Any) -> None:
        super().__post_init__(**kwargs)
        self.embedding_multiplier = float(self.scale_emb)
        self.residual_multiplier = self.scale_depth / self.num_hidden_layers**0.5
        self.logits_scaling = self.hidden_size / self.dim_model_base
        self.attention_multiplier = (self.hidden_size / self.num_attention_heads) ** -0.5

    def to_dict(self) -> dict[str, Any]:
        """Return the published keys."""
        return {name: it for name, it in super().to_dict().items() if name not in _OF_GRANITE}


class MiniCPMForCausalLM(GraniteForCausalLM):  # type: ignore[misc]
    config_class = MiniCPMConfig


AutoConfig.register("minicpm", MiniCPMConfig)
AutoModelForCausalLM.register(MiniCPMConfig, MiniCPMForCausalLM)
