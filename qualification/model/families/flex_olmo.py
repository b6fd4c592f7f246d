"""FlexOlmo: an OLMo 2 with experts, which were trained apart from each other."""

from functools import partial

from qualification.model.config import ModelConfig, NormsConfig, QKNorm
from qualification.model.families.family import Family
from qualification.model.families.olmoe import READ, TENSORS, WITHOUT_EFFECT, read_olmo_experts
from qualification.model.fields import Fields
from qualification.model.keys import family_keys
from qualification.model.shared import read_like_llama

_THETA = 500_000.0  # as its class has it


def read_config(fields: Fields) -> ModelConfig:
    has_bias = fields.flag("attention_bias", False)
    return read_like_llama(
        fields.or_else(rope_theta=_THETA),
        "flex_olmo",
        norms=NormsConfig(before=False, after=True),
        qk_norm=QKNorm.ALL_HEADS,
        attention_bias=has_bias,
        output_bias=has_bias,
        feed_forward=partial(read_olmo_experts, num_experts=7, num_active=5),
    )


KEYS = family_keys(READ, without_effect=WITHOUT_EFFECT)
FLEX_OLMO = Family("flex_olmo", ("FlexOlmoForCausalLM",), read_config, KEYS, TENSORS)
