"""Arcee (AFM 4.5B): a Llama whose feed-forward has no gate, down(relu(up)^2)."""

from qualification.model.config import ModelConfig
from qualification.model.families.family import Family
from qualification.model.fields import Fields
from qualification.model.keys import family_keys
from qualification.model.shared import read_like_llama, read_ungated


def read_config(fields: Fields) -> ModelConfig:
    has_bias = fields.flag("attention_bias", False)
    return read_like_llama(
        fields,
        "arcee",
        norm_eps=1e-5,
        attention_bias=has_bias,
        output_bias=has_bias,
        feed_forward=read_ungated,
    )


ARCEE = Family("arcee", ("ArceeForCausalLM",), read_config, family_keys("attention_bias mlp_bias"))
