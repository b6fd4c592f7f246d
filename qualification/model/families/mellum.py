"""Mellum 2: a Qwen 3 with experts, some of whose layers have a window and a rotation of their own."""

from functools import partial

from qualification.model.config import ExpertsConfig, ModelConfig, QKNorm
from qualification.model.families.family import ExpertNames, Family, TensorNames
from qualification.model.fields import Fields
from qualification.model.keys import family_keys
from qualification.model.mixtures import KINDS, read_mixtures_by_kind, read_routing
from qualification.model.rope import read_full_rope, read_windowed_rope
from qualification.model.shared import read_activation, read_like_llama
from qualification.model.windows import Windows, read_windows_of

_THETA, _WINDOWED_THETA = 500_000.0, 10_000.0  # as its class has them


def read_config(fields: Fields) -> ModelConfig:
    has_bias = fields.flag("attention_bias", False)
    return read_like_llama(
        fields.or_else(head_dim=128),
        "mellum",
        attention_bias=has_bias,
        output_bias=has_bias,
        qk_norm=QKNorm.EACH_HEAD,
        windows=_read_windows,
        rope=partial(read_full_rope, theta=_THETA),
        local_rope=partial(read_windowed_rope, theta=_WINDOWED_THETA),
        feed_forwards=partial(read_mixtures_by_kind, read_experts=_read_experts, num_dense_missing=0),
    )


def _read_windows(fields: Fields) -> Windows:
    return read_windows_of(fields, fields.integer_or_none("sliding_window", 1024), lambda _: False)


def _read_experts(fields: Fields) -> ExpertsConfig:
    routing = read_routing(
        fields,
        "num_local_experts" if fields.has("num_local_experts") else "num_experts",
        renormalizes=fields.flag("norm_topk_prob", True),
        num_experts_missing=64,
        num_active_missing=8,
    )
    return ExpertsConfig(fields.integer("moe_intermediate_size", 896), routing, read_activation(fields))


KEYS = family_keys(
    f"attention_bias sliding_window layer_types {KINDS} moe_intermediate_size norm_topk_prob num_experts "
    "num_local_experts num_experts_per_tok",
    without_effect="output_router_logits router_aux_loss_coef num_mtp_layers num_nextn_predict_layers mtp_layer_types "
    "mtp_mlp_layer_types",
    # Its class reads rotations by the kind of layer alone.
    refused={"rope_theta": (None,), "rope_scaling": (None,)},
)
MELLUM = Family(
    "mellum", ("MellumForCausalLM",), read_config, KEYS, TensorNames(experts=ExpertNames()), not_read=("mtp.",)
)
