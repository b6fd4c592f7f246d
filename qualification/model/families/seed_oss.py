"""Seed-OSS: a Llama of long contexts with biases of queries, keys and values."""

from functools import partial

from qualification.model.config import ModelConfig
from qualification.model.families.family import Family
from qualification.model.fields import Fields
from qualification.model.keys import family_keys
from qualification.model.shared import read_dense, read_like_llama


def read_config(fields: Fields) -> ModelConfig:
    return read_like_llama(
        fields.or_else(head_dim=128),
        "seed_oss",
        attention_bias=fields.flag("attention_bias", True),
        output_bias=fields.flag("attention_out_bias", False),
        feed_forward=partial(read_dense, has_bias=fields.flag("mlp_bias", False)),
    )


KEYS = family_keys("attention_bias attention_out_bias mlp_bias", without_effect="residual_dropout")
SEED_OSS = Family("seed_oss", ("SeedOssForCausalLM",), read_config, KEYS)
