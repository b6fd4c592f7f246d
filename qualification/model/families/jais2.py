"""Jais 2: a Llama whose norms are LayerNorms, whose feed-forward is down(relu(up)^2), and all of which has biases."""

from qualification.model.config import ModelConfig
from qualification.model.families.family import Family
from qualification.model.fields import Fields
from qualification.model.keys import family_keys
from qualification.model.shared import read_like_llama, read_ungated, with_biased_norms


def read_config(fields: Fields) -> ModelConfig:
    has_bias = fields.flag("attention_bias", True)
    model = read_like_llama(
        fields.or_else(mlp_bias=True),  # as its class has it
        "jais2",
        attention_bias=has_bias,
        output_bias=has_bias,
        feed_forward=read_ungated,
    )
    return with_biased_norms(model, fields.number("layer_norm_eps", 1e-5))


JAIS2 = Family("jais2", ("Jais2ForCausalLM",), read_config, family_keys("layer_norm_eps attention_bias mlp_bias"))
