"""Laguna: heads gated by the softplus of a product, more of them in layers with a window, and experts by sigmoids.

Layers of both kinds have rotations of their own; where no window hides anything, half of each head is rotated.
"""

from functools import partial
from typing import Any

from kernels.experts.kinds import Scores
from kernels.fused.head_gate_kind import GateFunction
from qualification.model.config import (
    AttentionGate,
    ExpertsConfig,
    ModelConfig,
    QKNorm,
    SharedExpertConfig,
)
from qualification.model.families.family import ExpertNames, Family, TensorNames
from qualification.model.fields import Fields
from qualification.model.keys import family_keys
from qualification.model.mixtures import KINDS, read_mixtures_by_kind, read_routing
from qualification.model.rope import read_full_rope, read_windowed_rope
from qualification.model.shared import read_activation, read_like_llama
from qualification.model.windows import Windows, read_num_layers, read_windows_of

TENSORS = TensorNames(experts=ExpertNames(correction="mlp.experts.e_score_correction_bias"))
_ROPES: dict[str, Any] = {  # as its class has them
    "full_attention": {"rope_theta": 500_000.0, "partial_rotary_factor": 0.5},
    "sliding_attention": {"rope_theta": 10_000.0},
}
_THETA = 10_000.0  # where a rotation has none
_HEADS = "num_attention_heads_per_layer"


def read_config(fields: Fields) -> ModelConfig:
    has_bias, num_layers = fields.flag("attention_bias", False), read_num_layers(fields)
    return read_like_llama(
        fields.or_else(head_dim=128, rope_parameters=_ROPES),
        "laguna",
        qk_norm=QKNorm.EACH_HEAD,
        windows=_read_windows,
        rope=partial(read_full_rope, theta=_THETA, is_partial=True),
        local_rope=partial(read_windowed_rope, theta=_THETA, is_partial=True),
        attention_bias=has_bias,
        output_bias=has_bias,
        heads=_HEADS,
        gate=AttentionGate(GateFunction.SOFTPLUS, by_dimension=_gates_dimensions(fields, num_layers)),
        feed_forwards=partial(read_mixtures_by_kind, read_experts=_read_experts, num_dense_missing=1),
    )


def _read_windows(fields: Fields) -> Windows:
    return read_windows_of(fields, fields.integer("sliding_window", 512), lambda _: False)


def _gates_dimensions(fields: Fields, num_layers: int) -> bool:
    """Return whether each dimension of a head has a gate: published files say true, "per-head" or "per-element"."""
    given = fields.given("gating")
    kind = "per-head" if given in (None, True) else fields.choice("gating", ("per-head", "per-element"))
    if fields.has("gating_types"):
        own = kind.replace("-", "_")
        if set(fields.choices("gating_types", ("per_head", "per_element"), num_layers)) != {own}:
            fields.refuse("gating_types", f"{own} in all layers, as gating says")
    return kind == "per-element"


def _read_experts(fields: Fields) -> ExpertsConfig:
    routing = read_routing(
        fields,
        "num_experts",
        scores=Scores.SIGMOID,
        renormalizes=True,
        scale=fields.number("moe_routed_scaling_factor", 1.0),
        num_experts_missing=256,
        num_active_missing=8,
    )
    shared = SharedExpertConfig(fields.integer("shared_expert_intermediate_size", 512))
    width = fields.integer("moe_intermediate_size", 512)
    return ExpertsConfig(width, routing, read_activation(fields), has_correction_bias=True, shared=shared)


KEYS = family_keys(
    f"attention_bias sliding_window layer_types gating gating_types {_HEADS} {KINDS} num_experts num_experts_per_tok "
    "moe_intermediate_size shared_expert_intermediate_size moe_routed_scaling_factor",
    # Older notes of which layers have experts, which its class does not read.
    without_effect="mlp_only_layers decoder_sparse_step output_router_logits router_aux_loss_coef",
    refused={
        "norm_topk_prob": (True,),
        "moe_apply_router_weight_on_input": (False, None),
        "moe_router_logit_softcapping": (0.0, 0, None),
        # Its class reads rotations by the kind of layer alone.
        "rope_theta": (None,),
        "rope_scaling": (None,),
        "partial_rotary_factor": (None,),
    },
)
LAGUNA = Family("laguna", ("LagunaForCausalLM",), read_config, KEYS, TENSORS)
