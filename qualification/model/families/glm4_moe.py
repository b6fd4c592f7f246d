"""GLM 4.5 and 4.6: half of each head is rotated, the first layers are dense, experts are chosen by sigmoids and a bias.

The layers behind the last one predict several tokens at once; they are not computed.
"""

from functools import partial

from kernels.experts.kinds import Scores
from qualification.model.config import ExpertsConfig, ModelConfig, QKNorm, RopeConfig, SharedExpertConfig
from qualification.model.families.family import ExpertNames, Family, TensorNames
from qualification.model.fields import Fields
from qualification.model.keys import family_keys
from qualification.model.mixtures import read_mixtures, read_routing
from qualification.model.rope import read_rope
from qualification.model.shared import read_activation, read_like_llama

TENSORS = TensorNames(experts=ExpertNames(shared="mlp.shared_experts"))


def read_config(fields: Fields) -> ModelConfig:
    has_norms = fields.flag("use_qk_norm", False)
    return read_glm_mixture(fields, "glm4_moe", QKNorm.EACH_HEAD if has_norms else QKNorm.NONE)


def read_glm_mixture(fields: Fields, family: str, qk_norm: QKNorm) -> ModelConfig:
    """Read all but what sets GLM's families with experts apart. Raises ModelConfigError."""
    num_dense = fields.count("first_k_dense_replace", 1)
    return read_like_llama(
        fields.or_else(partial_rotary_factor=0.5),
        family,
        norm_eps=1e-5,
        rope=_read_rope,
        qk_norm=qk_norm,
        attention_bias=fields.flag("attention_bias", False),
        feed_forwards=partial(read_mixtures, read_experts=_read_experts, has_experts=lambda layer: layer >= num_dense),
    )


def _read_rope(fields: Fields, head_dim: int) -> RopeConfig:
    return read_rope(fields, head_dim=head_dim, is_partial=True)


def _read_experts(fields: Fields) -> ExpertsConfig:
    activation = read_activation(fields)
    width, num_shared = fields.integer("moe_intermediate_size", 1408), fields.count("n_shared_experts", 1)
    routing = read_routing(
        fields,
        "n_routed_experts",
        scores=Scores.SIGMOID,
        renormalizes=fields.flag("norm_topk_prob", True),
        has_groups=True,
        scale=fields.number("routed_scaling_factor", 1.0),
        num_experts_missing=128,
        num_active_missing=8,
    )
    shared = SharedExpertConfig(width * num_shared) if num_shared else None
    return ExpertsConfig(width, routing, activation, has_correction_bias=True, shared=shared)


READ = (
    "attention_bias first_k_dense_replace moe_intermediate_size n_group topk_group n_routed_experts "
    "n_shared_experts norm_topk_prob num_experts_per_tok routed_scaling_factor"
)
WITHOUT_EFFECT = "num_nextn_predict_layers num_mtp_layers output_router_logits router_aux_loss_coef"
KEYS = family_keys(f"{READ} use_qk_norm", without_effect=WITHOUT_EFFECT)
GLM4_MOE = Family("glm4_moe", ("Glm4MoeForCausalLM",), read_config, KEYS, TENSORS, has_more_layers=True)
