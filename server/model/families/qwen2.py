"""Qwen 2 and 2.5: a Llama with biases on queries, keys and values, and windows that are off unless switched on."""

from dataclasses import replace

from server.model.config import ModelConfig
from server.model.families.family import Family
from server.model.families.fields import Fields
from server.model.families.shared_fields import read_shared
from server.model.families.tensor_views import split_views
from server.model.families.window_fields import read_switched_windows


def read_config(fields: Fields) -> ModelConfig:
    config = read_shared(fields, "qwen2")
    return replace(config, attention_bias=True, windows=read_switched_windows(fields, config.num_layers))


QWEN2 = Family("qwen2", ("Qwen2ForCausalLM",), read_config, split_views)
