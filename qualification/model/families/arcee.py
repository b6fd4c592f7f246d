"""Arcee (AFM 4.5B): a Llama whose feed-forward has no gate, down(relu(up)^2)."""

from kernels.fused.ungated_kind import Ungated
from qualification.model.config import DenseConfig, ModelConfig
from qualification.model.families.family import Family
from qualification.model.fields import Fields
from qualification.model.keys import family_keys
from qualification.model.shared import read_like_llama


def read_config(fields: Fields) -> ModelConfig:
    has_bias = fields.flag("attention_bias", False)
    return read_like_llama(
        fields,
        "arcee",
        norm_eps=1e-5,
        attention_bias=has_bias,
        output_bias=has_bias,
        feed_forward=read_squared_relu,
    )


def read_squared_relu(fields: Fields) -> DenseConfig:
    """Read a feed-forward without a gate. Raises ModelConfigError for another activation than relu2."""
    activation = Ungated(fields.choice("hidden_act", tuple(it.value for it in Ungated), Ungated.RELU2.value))
    return DenseConfig(fields.integer("intermediate_size"), activation, fields.flag("mlp_bias", False))


ARCEE = Family("arcee", ("ArceeForCausalLM",), read_config, family_keys("attention_bias mlp_bias"))
