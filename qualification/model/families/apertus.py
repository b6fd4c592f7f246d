"""Apertus: a Llama with norms of each head of queries and keys, whose feed-forward is down(xielu(up))."""

from qualification.model.config import DenseConfig, EagerActivation, ModelConfig, QKNorm
from qualification.model.families.family import Family, TensorNames
from qualification.model.fields import Fields
from qualification.model.keys import family_keys
from qualification.model.shared import read_like_llama

_THETA = 12_000_000.0  # as its class has it
_ROPE = {  # likewise where nothing is said, whatever rope_theta says
    "rope_type": "llama3", "rope_theta": _THETA, "factor": 8.0, "original_max_position_embeddings": 8192,
    "low_freq_factor": 1.0, "high_freq_factor": 4.0,
}  # fmt: skip


def read_config(fields: Fields) -> ModelConfig:
    has_bias = fields.flag("attention_bias", False)
    if not fields.given("rope_scaling") and not fields.has("rope_parameters"):
        fields = fields.changed(rope_parameters=_ROPE)
    return read_like_llama(
        fields.or_else(rope_theta=_THETA),
        "apertus",
        norm_eps=1e-5,
        qk_norm=QKNorm.EACH_HEAD,
        attention_bias=has_bias,
        output_bias=has_bias,
        feed_forward=_read_dense,
    )


def _read_dense(fields: Fields) -> DenseConfig:
    fields.choice("hidden_act", ("xielu",), "xielu")
    return DenseConfig(fields.integer("intermediate_size"), EagerActivation.XIELU)


KEYS = family_keys(
    "attention_bias", refused={"mlp_bias": (False, None), "qk_norm": (True, None), "post_norm": (False, None)}
)
TENSORS = TensorNames(before_attention="attention_layernorm", before_feed_forward="feedforward_layernorm")
APERTUS = Family("apertus", ("ApertusForCausalLM",), read_config, KEYS, TENSORS)
