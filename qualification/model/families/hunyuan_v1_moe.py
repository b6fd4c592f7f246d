"""Hunyuan with experts (A13B): a mixture in every layer, beside an expert that all tokens visit.

Files give numbers of experts layer by layer; a token may visit more of them in one layer than in another.
"""

from kernels.experts.kinds import RoutingConfig
from qualification.model.config import ExpertsConfig, FeedForward, ModelConfig, QKNorm, SharedExpertConfig
from qualification.model.families.family import ExpertNames, Family, TensorNames
from qualification.model.families.hunyuan_v1_dense import (
    K_NORM,
    Q_NORM,
    READ,
    REFUSED,
    WITHOUT_EFFECT,
    read_hunyuan_rope,
)
from qualification.model.fields import Fields
from qualification.model.keys import family_keys
from qualification.model.shared import read_activation, read_like_llama
from qualification.model.windows import read_num_layers

TENSORS = TensorNames(q_norm=Q_NORM, k_norm=K_NORM, experts=ExpertNames(router="mlp.gate.wg", shared="mlp.shared_mlp"))


def read_config(fields: Fields) -> ModelConfig:
    has_bias = fields.flag("attention_bias", False)
    return read_like_llama(
        fields,
        "hunyuan_v1_moe",
        norm_eps=1e-5,
        qk_norm=QKNorm.EACH_HEAD_ROTATED,
        rope=read_hunyuan_rope,
        attention_bias=has_bias,
        output_bias=has_bias,
        feed_forwards=_read_mixtures,
    )


def _read_mixtures(fields: Fields) -> tuple[FeedForward, ...]:
    num_layers, width = read_num_layers(fields), fields.integer("intermediate_size")
    count = fields.integer("num_experts", 1)
    for name, value in (("moe_intermediate_size", width), ("num_shared_expert", 1)):
        if any(it != value for it in fields.integers(name, num_layers, value)):
            fields.refuse(name, f"{value} in all {num_layers} layers")
    activation, shared = read_activation(fields), SharedExpertConfig(width)
    return tuple(
        ExpertsConfig(width, RoutingConfig(count, active, renormalizes=True), activation, shared=shared)
        for active in fields.integers("moe_topk", num_layers, 1, most=count)
    )


KEYS = family_keys(
    f"{READ} num_experts moe_topk moe_intermediate_size num_shared_expert",
    # A share of tokens that an expert takes, in training.
    without_effect=f"{WITHOUT_EFFECT} output_router_logits moe_drop_tokens moe_random_routing_dropped_token "
    "capacity_factor",
    refused={
        **REFUSED,
        "use_mla": (False, None),
        "use_mixed_mlp_moe": (True,),
        "moe_layer_num_skipped": (0, None),
        "norm_topk_prob": (True,),
        "routed_scaling_factor": (1.0, 1, None),
        "group_limited_greedy": (False, None),
        "n_group": (None,),
        "topk_group": (None,),
        "num_experts_per_tok": (None,),  # other names of moe_topk and num_experts, which its class reads too
        "num_local_experts": (None,),
    },
)
HUNYUAN_V1_MOE = Family("hunyuan_v1_moe", ("HunYuanMoEV1ForCausalLM",), read_config, KEYS, TENSORS)
