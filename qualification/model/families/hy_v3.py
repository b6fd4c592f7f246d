"""Hy3: a Qwen 3 with experts chosen by sigmoids and a bias, beside experts that all tokens visit.

A layer behind the last one predicts several tokens at once; it is not computed.
"""

from functools import partial

from kernels.experts.kinds import Scores
from qualification.model.config import ExpertsConfig, ModelConfig, QKNorm, SharedExpertConfig
from qualification.model.families.family import ExpertNames, Family, TensorNames
from qualification.model.fields import Fields
from qualification.model.keys import family_keys
from qualification.model.mixtures import KINDS, read_mixtures_by_kind, read_routing
from qualification.model.shared import read_activation, read_like_llama

TENSORS = TensorNames(
    experts=ExpertNames(router="mlp.router.gate", shared="mlp.shared_mlp", correction="mlp.expert_bias")
)
_THETA = 11_158_840.0  # as its class has it


def read_config(fields: Fields) -> ModelConfig:
    has_bias = fields.flag("attention_bias", False)
    return read_like_llama(
        fields.or_else(head_dim=128, rope_theta=_THETA),
        "hy_v3",
        norm_eps=1e-5,
        qk_norm=QKNorm.EACH_HEAD,
        attention_bias=has_bias,
        output_bias=has_bias,
        feed_forwards=partial(read_mixtures_by_kind, read_experts=_read_experts, num_dense_missing=1),
    )


def _read_experts(fields: Fields) -> ExpertsConfig:
    width = fields.integer("moe_intermediate_size", 1536)
    if fields.integer("expert_hidden_dim", width) != width:
        fields.refuse("expert_hidden_dim", f"moe_intermediate_size ({width})")
    routing = read_routing(
        fields,
        "num_local_experts" if fields.has("num_local_experts") else "num_experts",
        scores=Scores.SIGMOID,
        renormalizes=True,
        scale=fields.number("router_scaling_factor", 2.826),
        num_experts_missing=192,
        num_active_missing=8,
    )
    shared = SharedExpertConfig(width * fields.integer("num_shared_experts", 1))
    return ExpertsConfig(width, routing, read_activation(fields), has_correction_bias=True, shared=shared)


KEYS = family_keys(
    f"attention_bias {KINDS} moe_intermediate_size expert_hidden_dim num_experts num_local_experts "
    "num_experts_per_tok num_shared_experts router_scaling_factor",
    # Sums in fp32 rather than in the dtype of the weights, which change roundings alone.
    without_effect="eod_token_id num_nextn_predict_layers output_router_logits use_grouped_mm enable_lm_head_fp32 "
    "enable_attention_fp32_softmax enable_moe_fp32_combine",
    refused={
        "mlp_bias": (False, None),
        "qk_norm": (True,),
        "route_norm": (True,),
        "moe_router_use_sigmoid": (True,),
        "moe_router_enable_expert_bias": (True,),
        "first_k_dense_replace": (1, None),  # its class reads mlp_layer_types, and has one dense layer without them
    },
)
HY_V3 = Family("hy_v3", ("HYV3ForCausalLM",), read_config, KEYS, TENSORS, has_more_layers=True)
