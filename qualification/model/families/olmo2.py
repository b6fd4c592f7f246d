"""OLMo 2: a Llama with norms after attention and feed-forward only, and of queries and keys over all heads together."""

from qualification.model.config import ModelConfig, NormsConfig, QKNorm
from qualification.model.families.family import Family
from qualification.model.fields import Fields
from qualification.model.keys import family_keys
from qualification.model.shared import read_like_llama


def read_config(fields: Fields) -> ModelConfig:
    has_bias = fields.flag("attention_bias", False)
    return read_like_llama(
        fields,
        "olmo2",
        norm_eps=1e-5,
        norms=NormsConfig(before=False, after=True),
        qk_norm=QKNorm.ALL_HEADS,
        attention_bias=has_bias,
        output_bias=has_bias,
    )


OLMO2 = Family("olmo2", ("Olmo2ForCausalLM",), read_config, family_keys("attention_bias"))
