"""OLMo (the first): a Llama with LayerNorms that have neither weights nor biases.

OLMo 1.7 cuts queries, keys and values off at a number, which no kernel does.
"""

from dataclasses import replace

from qualification.model.config import ModelConfig
from qualification.model.families.family import Family, TensorNames
from qualification.model.fields import Fields
from qualification.model.keys import family_keys
from qualification.model.shared import read_like_llama

_EPS = 1e-5  # whatever a file says


def read_config(fields: Fields) -> ModelConfig:
    has_bias = fields.flag("attention_bias", False)
    model = read_like_llama(fields, "olmo", attention_bias=has_bias, output_bias=has_bias)
    return replace(model, norm_eps=_EPS, norms_subtract_mean=True, norms_have_weights=False)


KEYS = family_keys("attention_bias", refused={"clip_qkv": (None,)})
OLMO = Family("olmo", ("OlmoForCausalLM",), read_config, KEYS, TensorNames(norms_are_stored=False))
