"""AFMoE (Arcee's Trinity): norms before and after, each number of a head gated by a sigmoid, and experts by sigmoids.

Layers with a window rotate; each fourth one has none and sees no positions.
"""

import math
from dataclasses import replace

from kernels.experts.kinds import Scores
from kernels.fused.head_gate_kind import GateFunction
from qualification.model.config import (
    AttentionGate,
    ExpertsConfig,
    FeedForward,
    ModelConfig,
    NormsConfig,
    QKNorm,
    SharedExpertConfig,
)
from qualification.model.families.family import ExpertNames, Family, TensorNames
from qualification.model.fields import Fields
from qualification.model.keys import family_keys
from qualification.model.mixtures import read_mixtures, read_routing
from qualification.model.shared import read_activation, read_like_llama, without_rotation
from qualification.model.windows import Windows, read_periodic_windows

TENSORS = TensorNames(
    before_feed_forward="pre_mlp_layernorm",
    after_feed_forward="post_mlp_layernorm",
    attention_gate="self_attn.gate_proj",
    experts=ExpertNames(router="mlp.router.gate", shared="mlp.shared_experts", correction="mlp.expert_bias"),
)
_PERIOD = "global_attn_every_n_layers"


def read_config(fields: Fields) -> ModelConfig:
    has_bias = fields.flag("attention_bias", False)
    model = read_like_llama(
        fields.or_else(head_dim=128, max_position_embeddings=16384),
        "afmoe",
        norm_eps=1e-5,
        norms=NormsConfig(before=True, after=True),
        qk_norm=QKNorm.EACH_HEAD,
        windows=_read_windows,
        attention_bias=has_bias,
        output_bias=has_bias,
        gate=AttentionGate(GateFunction.SIGMOID, by_dimension=True),
        feed_forwards=_read_feed_forwards,
    )
    full = frozenset(layer for layer, window in enumerate(_read_windows(fields)) if window is None)
    scale = math.sqrt(model.hidden_size) if fields.flag("mup_enabled", False) else 1.0
    return replace(without_rotation(model, full), embedding_scale=scale)


def _read_windows(fields: Fields) -> Windows:
    return read_periodic_windows(fields, missing=1024, period=fields.integer(_PERIOD, 4))


def _read_feed_forwards(fields: Fields) -> tuple[FeedForward, ...]:
    num_dense = fields.count("num_dense_layers", 1)
    return read_mixtures(fields, _read_experts, lambda layer: layer >= num_dense)


def _read_experts(fields: Fields) -> ExpertsConfig:
    routing = read_routing(
        fields,
        "num_experts",
        scores=Scores.SIGMOID,
        renormalizes=True,
        scale=fields.number("route_scale", 1.0),
        num_experts_missing=64,
        num_active_missing=6,
    )
    width = fields.integer("moe_intermediate_size", 1408)
    shared = SharedExpertConfig(width * fields.integer("num_shared_experts", 2))
    return ExpertsConfig(width, routing, read_activation(fields), has_correction_bias=True, shared=shared)


KEYS = family_keys(
    f"attention_bias sliding_window layer_types {_PERIOD} num_dense_layers num_experts num_experts_per_tok "
    "moe_intermediate_size num_shared_experts route_scale mup_enabled",
    without_effect="use_grouped_mm load_balance_coeff output_router_logits",
    refused={
        "route_norm": (True, None),
        "score_func": ("sigmoid", None),
        "n_group": (1, None),
        "topk_group": (1, None),
        "num_expert_groups": (1, None),
        "num_limited_groups": (1, None),
    },
)
AFMOE = Family("afmoe", ("AfmoeForCausalLM",), read_config, KEYS, TENSORS)
