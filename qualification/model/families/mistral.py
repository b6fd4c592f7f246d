"""Mistral: a Llama whose layers may all have a sliding window (4096 in 7B v0.1, none since)."""

from functools import partial

from qualification.model.config import ModelConfig
from qualification.model.families.family import Family
from qualification.model.fields import Fields
from qualification.model.shared import read_like_llama
from qualification.model.windows import WINDOW, read_uniform_windows


def read_config(fields: Fields) -> ModelConfig:
    return read_like_llama(fields, "mistral", windows=partial(read_uniform_windows, missing=WINDOW))


MISTRAL = Family("mistral", ("MistralForCausalLM",), read_config)
