"""Llama 1 to 3 and every model saved as one: RMSNorm, rotary embedding, grouped-query attention, SwiGLU."""

from dataclasses import replace

from server.model.config import ModelConfig
from server.model.families.family import Family
from server.model.families.fields import Fields
from server.model.families.shared_fields import read_shared
from server.model.families.tensor_views import split_views


def read_config(fields: Fields) -> ModelConfig:
    has_attention_bias = fields.flag("attention_bias", False)
    return replace(
        read_shared(fields, "llama"),
        attention_bias=has_attention_bias,
        output_bias=has_attention_bias,
        mlp_bias=fields.flag("mlp_bias", False),
    )


LLAMA = Family("llama", ("LlamaForCausalLM",), read_config, split_views)
