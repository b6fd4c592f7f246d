"""Helium: a Llama that rotates neighbouring dimensions."""

from functools import partial

from qualification.model.config import ModelConfig
from qualification.model.families.family import Family, TensorNames
from qualification.model.fields import Fields
from qualification.model.keys import family_keys
from qualification.model.shared import read_dense, read_like_llama

_THETA = 100_000.0  # as its class has it


def read_config(fields: Fields) -> ModelConfig:
    return read_like_llama(
        fields.or_else(head_dim=128, num_key_value_heads=20, rope_theta=_THETA),
        "helium",
        norm_eps=1e-8,
        attention_bias=fields.flag("attention_bias", False),
        feed_forward=partial(read_dense, has_bias=fields.flag("mlp_bias", False)),
    )


KEYS = family_keys(
    "attention_bias mlp_bias",
    refused={"quantization_config": (None,)},  # products of 8 bits have one scale for rows whose order is another
)
HELIUM = Family("helium", ("HeliumForCausalLM",), read_config, KEYS, TensorNames(neighbours_are_pairs=True))
