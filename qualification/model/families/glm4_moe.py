"""GLM 4.5 and 4.6: half of each head is rotated, the first layers are dense, experts are chosen by sigmoids and a bias.

The layers behind the last one predict several tokens at once; they are not computed.
"""

from functools import partial

from kernels.experts.kinds import Scores
from qualification.model.config import ModelConfig, QKNorm, RopeConfig
from qualification.model.families.family import ExpertNames, Family, TensorNames
from qualification.model.fields import Fields
from qualification.model.keys import family_keys
from qualification.model.mixtures import read_deepseek_experts, read_mixtures_behind
from qualification.model.rope import read_rope
from qualification.model.shared import read_like_llama

_READ_EXPERTS = partial(read_deepseek_experts, scores=Scores.SIGMOID, width=1408, num_experts=128, num_active=8)
TENSORS = TensorNames(experts=ExpertNames(shared="mlp.shared_experts"))


def read_config(fields: Fields) -> ModelConfig:
    has_norms = fields.flag("use_qk_norm", False)
    return read_glm_mixture(fields, "glm4_moe", QKNorm.EACH_HEAD if has_norms else QKNorm.NONE)


def read_glm_mixture(fields: Fields, family: str, qk_norm: QKNorm) -> ModelConfig:
    """Read all but what sets GLM's families with experts apart. Raises ModelConfigError."""
    return read_like_llama(
        fields.or_else(partial_rotary_factor=0.5),
        family,
        norm_eps=1e-5,
        rope=_read_rope,
        qk_norm=qk_norm,
        attention_bias=fields.flag("attention_bias", False),
        feed_forwards=partial(read_mixtures_behind, read_experts=_READ_EXPERTS, num_dense_missing=1),
    )


def _read_rope(fields: Fields, head_dim: int) -> RopeConfig:
    return read_rope(fields, head_dim=head_dim, is_partial=True)


READ = (
    "attention_bias first_k_dense_replace moe_intermediate_size n_group topk_group n_routed_experts "
    "n_shared_experts norm_topk_prob num_experts_per_tok routed_scaling_factor"
)
WITHOUT_EFFECT = "num_nextn_predict_layers num_mtp_layers output_router_logits router_aux_loss_coef"
KEYS = family_keys(f"{READ} use_qk_norm", without_effect=WITHOUT_EFFECT)
GLM4_MOE = Family("glm4_moe", ("Glm4MoeForCausalLM",), read_config, KEYS, TENSORS, has_more_layers=True)
