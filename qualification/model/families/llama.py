"""Llama, all versions: RMSNorm, rotary embedding, grouped-query attention, SwiGLU."""

from functools import partial

from qualification.model.config import ModelConfig
from qualification.model.families.family import Family
from qualification.model.fields import Fields
from qualification.model.shared import read_dense, read_like_llama


def read_config(fields: Fields) -> ModelConfig:
    has_bias = fields.flag("attention_bias", False)
    feed_forward = partial(read_dense, has_bias=fields.flag("mlp_bias", False))
    return read_like_llama(fields, "llama", attention_bias=has_bias, output_bias=has_bias, feed_forward=feed_forward)


LLAMA = Family("llama", ("LlamaForCausalLM",), read_config)
