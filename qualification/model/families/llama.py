"""Llama, all versions: RMSNorm, rotary embedding, grouped-query attention, SwiGLU."""

from functools import partial

from qualification.model.config import ModelConfig
from qualification.model.families.family import Family
from qualification.model.fields import Fields
from qualification.model.keys import family_keys
from qualification.model.shared import read_dense, read_like_llama


def read_config(fields: Fields) -> ModelConfig:
    has_bias = fields.flag("attention_bias", False)
    feed_forward = partial(read_dense, has_bias=fields.flag("mlp_bias", False))
    return read_like_llama(fields, "llama", attention_bias=has_bias, output_bias=has_bias, feed_forward=feed_forward)


KEYS = family_keys("attention_bias mlp_bias")
LLAMA = Family("llama", ("LlamaForCausalLM",), read_config, KEYS)
