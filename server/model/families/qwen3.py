"""Qwen 3, dense: every query and key head has its RMSNorm before the rotation; the head dim is its own number."""

from dataclasses import replace

from server.model.config import ModelConfig
from server.model.families.family import Family
from server.model.families.fields import Fields
from server.model.families.shared_fields import read_shared
from server.model.families.tensor_views import split_views
from server.model.families.window_fields import read_switched_windows


def read_config(fields: Fields) -> ModelConfig:
    fields.integer("head_dim")  # must be there: it does not follow from the hidden size
    config = read_shared(fields, "qwen3")
    has_attention_bias = fields.flag("attention_bias", False)
    return replace(
        config,
        attention_bias=has_attention_bias,
        output_bias=has_attention_bias,
        qk_norm=True,
        windows=read_switched_windows(fields, config.num_layers),
    )


QWEN3 = Family("qwen3", ("Qwen3ForCausalLM",), read_config, split_views)
