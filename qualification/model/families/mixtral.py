"""Mixtral: a Mistral whose feed-forward is a mixture in every layer."""

from functools import partial

from qualification.model.config import ExpertsConfig, ModelConfig
from qualification.model.families.family import ExpertNames, Family, TensorNames
from qualification.model.fields import Fields
from qualification.model.keys import family_keys
from qualification.model.mixtures import read_routing
from qualification.model.shared import read_activation, read_dense, read_like_llama
from qualification.model.windows import read_uniform_windows

TENSORS = TensorNames(
    experts=ExpertNames("block_sparse_moe.gate", "block_sparse_moe.experts", gate="w1", up="w3", down="w2")
)


def read_config(fields: Fields) -> ModelConfig:
    return read_like_llama(
        fields.or_else(num_key_value_heads=8, rope_theta=1_000_000.0),
        "mixtral",
        norm_eps=1e-5,
        windows=partial(read_uniform_windows, missing=None),
        feed_forward=_read_experts,
    )


def _read_experts(fields: Fields) -> ExpertsConfig:
    dense = read_dense(fields)  # an expert's width and activation stand where those of a dense layer do
    routing = read_routing(fields, "num_local_experts", renormalizes=True, num_experts_missing=8, num_active_missing=2)
    return ExpertsConfig(dense.width, routing, read_activation(fields))


KEYS = family_keys(
    "sliding_window layer_types num_local_experts num_experts_per_tok",
    without_effect="router_jitter_noise output_router_logits router_aux_loss_coef",
)
MIXTRAL = Family("mixtral", ("MixtralForCausalLM",), read_config, KEYS, TENSORS)
