"""Ling 2.0 and Ring 1T (BailingMoeV2): heads normed and rotated in part, groups of experts by sigmoids, a shared one.

Queries, keys and values are one tensor. The layers behind the last one predict several tokens at once; they are not
computed. Source: modeling_bailing_moe_v2.py of github.com/inclusionAI/Ling-V2. Where a file gives rotary_dim and no
partial_rotary_factor, as Ling 1T's does, that file rotates whole heads; rotary_dim is what the model was trained with.
"""

from functools import partial

from kernels.experts.kinds import Scores
from qualification.model.config import ExpertsConfig, ModelConfig, QKNorm, RopeConfig, RopeKind, SharedExpertConfig
from qualification.model.families.family import ExpertNames, Family, TensorNames
from qualification.model.fields import Fields
from qualification.model.keys import family_keys
from qualification.model.mixtures import read_mixtures_behind, read_routing
from qualification.model.rope import read_rope
from qualification.model.shared import read_activation, read_like_llama

TENSORS = TensorNames(
    qkv="query_key_value",
    attention="attention",
    attention_output="attention.dense",
    q_norm="attention.query_layernorm",
    k_norm="attention.key_layernorm",
    experts=ExpertNames(shared="mlp.shared_experts", correction="mlp.gate.expert_bias", router_is_plain=True),
)
_ROTATED, _SHARE = "rotary_dim", "partial_rotary_factor"
_WIDTH, _SHARED_WIDTH = "moe_intermediate_size", "moe_shared_expert_intermediate_size"
MISSING: dict[str, object] = {  # as its class has them
    "num_key_value_heads": 4, "head_dim": 128, "rope_theta": 600_000.0, "max_position_embeddings": 32_768,
    "intermediate_size": 5120, "n_group": 8, "topk_group": 4,
}  # fmt: skip


def read_config(fields: Fields, family: str) -> ModelConfig:
    return read_like_llama(
        fields.or_else(**MISSING),
        family,
        norm_eps=1e-6,
        qk_norm=QKNorm.EACH_HEAD if fields.flag("use_qk_norm", True) else QKNorm.NONE,
        rope=_read_rope,
        attention_bias=fields.flag("use_qkv_bias", False),
        output_bias=fields.flag("use_bias", False),
        feed_forwards=partial(read_mixtures_behind, read_experts=read_experts, num_dense_missing=1),
    )


def _read_rope(fields: Fields, head_dim: int) -> RopeConfig:
    if fields.has(_ROTATED):
        size = fields.integer(_ROTATED, most=head_dim)
        if size % 2:
            fields.refuse(_ROTATED, f"whole pairs of dimensions (it is {size} of {head_dim})")
        if fields.has(_SHARE) and int(fields.number(_SHARE) * head_dim) != size:
            fields.refuse(_ROTATED, f"what {_SHARE} says: {int(fields.number(_SHARE) * head_dim)} of {head_dim}")
        fields = fields.or_else(**{_SHARE: size / head_dim})
    kinds = (RopeKind.PLAIN, RopeKind.LINEAR, RopeKind.YARN)
    return read_rope(fields, kinds, head_dim=head_dim, is_partial=True)


def read_experts(fields: Fields) -> ExpertsConfig:
    width, num_active = fields.integer(_WIDTH, 512), fields.integer("num_experts_per_tok", 8)
    if fields.integer(_SHARED_WIDTH, width) != width:
        fields.refuse(_SHARED_WIDTH, f"{_WIDTH} ({width}), which is the width that the family's class computes")
    routing = read_routing(
        fields,
        "num_experts",
        scores=Scores.SIGMOID,
        renormalizes=num_active > 1,
        has_groups=True,
        scale=fields.number("routed_scaling_factor", 1.0),
        num_experts_missing=256,
        num_active_missing=8,
    )
    shared = SharedExpertConfig(width * fields.integer("num_shared_experts", 1))
    return ExpertsConfig(width, routing, read_activation(fields), has_correction_bias=True, shared=shared)


KEYS = family_keys(
    f"use_qk_norm use_qkv_bias use_bias {_ROTATED} {_WIDTH} {_SHARED_WIDTH} first_k_dense_replace num_experts "
    "num_experts_per_tok num_shared_experts n_group topk_group routed_scaling_factor",
    without_effect="embedding_dropout output_dropout max_window_layers sliding_window num_nextn_predict_layers "
    "mtp_loss_scaling_factor output_router_logits router_dtype",
    # What its class does whatever these say.
    refused={
        "norm_topk_prob": (True, None),
        "score_function": ("sigmoid", None),
        "moe_router_enable_expert_bias": (True, None),
        "use_sliding_window": (False, None),
        "norm_head": (False, None),
        "use_rmsnorm": (True, None),
        "router_type": ("topN", None),
    },
)
BAILING_MOE, BAILING_MOE_V2 = (
    Family(
        family,
        ("BailingMoeV2ForCausalLM",),
        partial(read_config, family=family),
        KEYS,
        TENSORS,
        has_more_layers=True,
        renamed={"model.word_embeddings.": "model.embed_tokens."},
    )
    for family in ("bailing_moe", "bailing_moe_v2")  # as published first, and as its class has it
)
