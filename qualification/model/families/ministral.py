"""Ministral (8B of 2024): a Mistral of which a list says the layers with a window."""

from qualification.model.config import ModelConfig
from qualification.model.families.family import Family
from qualification.model.fields import Fields
from qualification.model.keys import family_keys
from qualification.model.shared import read_like_llama
from qualification.model.windows import WINDOW, Windows, read_windows_of


def read_config(fields: Fields) -> ModelConfig:
    fields = fields.where_absent(num_key_value_heads=8)  # null is as many as heads
    return read_like_llama(fields, "ministral", windows=_read_windows)


def _read_windows(fields: Fields) -> Windows:
    return read_windows_of(fields, fields.integer_or_none("sliding_window", WINDOW), lambda _: True)


MINISTRAL = Family("ministral", ("MinistralForCausalLM",), read_config, family_keys("sliding_window layer_types"))
