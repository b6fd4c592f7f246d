"""Mistral: a Llama whose layers may all have a sliding window (4096 in 7B v0.1, none since)."""

from functools import partial

from qualification.model.config import ModelConfig
from qualification.model.families.family import Family
from qualification.model.fields import Fields
from qualification.model.keys import family_keys
from qualification.model.shared import read_like_llama
from qualification.model.windows import WINDOW, read_uniform_windows


def read_config(fields: Fields) -> ModelConfig:
    fields = fields.where_absent(num_key_value_heads=8)  # null is as many as heads
    fields = fields.or_else(num_attention_heads=32)  # which Pixtral's file does not say
    return read_like_llama(fields, "mistral", windows=partial(read_uniform_windows, missing=WINDOW))


KEYS = family_keys("sliding_window layer_types")
MISTRAL = Family("mistral", ("MistralForCausalLM",), read_config, KEYS)
