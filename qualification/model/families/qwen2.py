"""Qwen 2 and 2.5: a Llama with biases on queries, keys and values, and windows that are off unless switched on."""

from qualification.model.config import ModelConfig
from qualification.model.families.family import Family
from qualification.model.fields import Fields
from qualification.model.keys import family_keys
from qualification.model.shared import read_like_llama
from qualification.model.windows import read_switched_windows


def read_config(fields: Fields) -> ModelConfig:
    return read_like_llama(fields, "qwen2", attention_bias=True, windows=read_switched_windows)


KEYS = family_keys("sliding_window use_sliding_window max_window_layers layer_types")
QWEN2 = Family("qwen2", ("Qwen2ForCausalLM",), read_config, KEYS)
