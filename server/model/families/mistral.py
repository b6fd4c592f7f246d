"""Mistral: a Llama whose layers may all have a sliding window (4096 in 7B v0.1, none since)."""

from dataclasses import replace

from server.model.config import ModelConfig
from server.model.families.family import Family
from server.model.families.fields import Fields
from server.model.families.shared_fields import read_shared
from server.model.families.tensor_views import split_views
from server.model.families.window_fields import WINDOW, read_uniform_windows


def read_config(fields: Fields) -> ModelConfig:
    config = read_shared(fields, "mistral")
    return replace(config, windows=read_uniform_windows(fields, config.num_layers, missing=WINDOW))


MISTRAL = Family("mistral", ("MistralForCausalLM",), read_config, split_views)
