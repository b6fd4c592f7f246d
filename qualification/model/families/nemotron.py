"""Nemotron 3 and 4, Minitron: LayerNorms of 1 + weight with biases, half of each head rotated, down(relu(up)^2)."""

from dataclasses import replace

from qualification.model.config import ModelConfig
from qualification.model.families.family import Family
from qualification.model.families.glm4 import SHARE, read_paired_rope
from qualification.model.fields import Fields
from qualification.model.keys import family_keys
from qualification.model.shared import read_like_llama, read_ungated, with_biased_norms


def read_config(fields: Fields) -> ModelConfig:
    has_bias = fields.flag("attention_bias", False)
    model = read_like_llama(
        fields.where_absent(**{SHARE: 0.5}),
        "nemotron",
        rope=read_paired_rope,
        attention_bias=has_bias,
        output_bias=has_bias,
        feed_forward=read_ungated,
    )
    return replace(with_biased_norms(model, fields.number("norm_eps", 1e-5)), zero_centred_norms=True)


NEMOTRON = Family("nemotron", ("NemotronForCausalLM",), read_config, family_keys("norm_eps attention_bias mlp_bias"))
