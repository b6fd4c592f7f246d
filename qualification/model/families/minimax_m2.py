"""MiniMax-M2: part of each head is rotated, heads are normed together, experts are chosen by sigmoids and a bias."""

from kernels.experts.kinds import Scores
from qualification.model.config import ExpertsConfig, ModelConfig, QKNorm, RopeConfig
from qualification.model.families.family import ExpertNames, Family, TensorNames
from qualification.model.fields import Fields
from qualification.model.keys import family_keys
from qualification.model.mixtures import read_routing
from qualification.model.rope import read_rope
from qualification.model.shared import read_activation, read_dense, read_like_llama
from qualification.model.windows import read_num_layers

TENSORS = TensorNames(
    experts=ExpertNames(
        "block_sparse_moe.gate",
        "block_sparse_moe.experts",
        gate="w1",
        up="w3",
        down="w2",
        correction="block_sparse_moe.e_score_correction_bias",
    )
)
_THETA, _HEAD_DIM = 5_000_000.0, 128  # as its class has them
_ROTATED, _SHARE = "rotary_dim", "partial_rotary_factor"  # dimensions of a head, or a share of them, which wins
_KINDS = "attn_type_list"  # 1 for a layer that attends to all tokens before it; its other kind is MiniMax-Text-01's


def read_config(fields: Fields) -> ModelConfig:
    if (kinds := fields.given(_KINDS)) is not None and kinds != [1] * read_num_layers(fields):
        fields.refuse(_KINDS, f"a list of {read_num_layers(fields)} times 1 (layers of another kind are not supported)")
    fields.choice("scoring_func", ("sigmoid",), "sigmoid")
    return read_like_llama(
        fields.or_else(head_dim=_HEAD_DIM, rope_theta=_THETA, num_key_value_heads=8),
        "minimax_m2",
        rope=_read_rope,
        qk_norm=QKNorm.ALL_HEADS,
        feed_forward=_read_experts,
    )


def _read_rope(fields: Fields, head_dim: int) -> RopeConfig:
    if fields.has(_ROTATED) and _SHARE not in fields.names:  # null is all of a head
        fields = fields.or_else(**{_SHARE: fields.integer(_ROTATED, most=head_dim) / head_dim})
    rope = read_rope(fields, head_dim=head_dim, is_partial=True)
    if (size := rope.rotated_dims(head_dim)) % 2:
        fields.refuse(_ROTATED, f"whole pairs of dimensions (it is {size} of {head_dim})")
    return rope


def _read_experts(fields: Fields) -> ExpertsConfig:
    dense = read_dense(fields)  # an expert's width and activation stand where those of a dense layer do
    routing = read_routing(
        fields,
        "num_local_experts",
        scores=Scores.SIGMOID,
        renormalizes=True,
        num_experts_missing=256,
        num_active_missing=8,
    )
    return ExpertsConfig(dense.width, routing, read_activation(fields), has_correction_bias=True)


KEYS = family_keys(
    f"{_ROTATED} {_KINDS} num_local_experts num_experts_per_tok scoring_func",
    without_effect="output_router_logits router_aux_loss_coef router_jitter_noise num_mtp_modules use_mtp "
    "mtp_transformer_layers shared_moe_mode",
    # What its class does whatever these say, and what it does not know.
    refused={
        "num_experts": (None,),
        "use_qk_norm": (True, None),
        "qk_norm_type": ("per_layer", None),
        "use_routing_bias": (True, None),
        "shared_intermediate_size": (0, None),
        "sliding_window": (None,),
    },
)
MINIMAX_M2 = Family("minimax_m2", ("MiniMaxM2ForCausalLM",), read_config, KEYS, TENSORS, has_more_layers=True)
