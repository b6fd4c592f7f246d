"""DeepSeek V3, R1 and V3.1, and Kimi K2, which has the same class: latent attention, groups of experts, a shared one.

The layers behind the last one predict several tokens at once; they are not computed.
"""

from functools import partial

from kernels.experts.kinds import Scores
from qualification.model.config import ExpertsConfig, FeedForward, ModelConfig, SharedExpertConfig
from qualification.model.families.family import Family
from qualification.model.families.latent import READ, REFUSED, TENSORS, WITHOUT_EFFECT, read_latent
from qualification.model.fields import Fields
from qualification.model.keys import family_keys
from qualification.model.latent import LatentSizes
from qualification.model.mixtures import read_mixtures, read_routing
from qualification.model.shared import read_activation

_SIZES = LatentSizes(latent=512, rotated=64, plain=128, value=128, query_latent=1536)


def read_config(fields: Fields, family: str) -> ModelConfig:
    return read_latent(fields, family, sizes=_SIZES, norm_eps=1e-6, feed_forwards=_read_feed_forwards)


def _read_feed_forwards(fields: Fields) -> tuple[FeedForward, ...]:
    num_dense = fields.count("first_k_dense_replace", 3)
    return read_mixtures(fields, read_sigmoid_experts, lambda layer: layer >= num_dense)


def read_sigmoid_experts(fields: Fields) -> ExpertsConfig:
    """Experts chosen by sigmoids and a bias, in groups. Raises ModelConfigError."""
    width, num_shared = fields.integer("moe_intermediate_size", 2048), fields.count("n_shared_experts", 1)
    routing = read_routing(
        fields.or_else(n_group=8, topk_group=4),
        "n_routed_experts",
        scores=Scores.SIGMOID,
        renormalizes=fields.flag("norm_topk_prob", True),
        has_groups=True,
        scale=fields.number("routed_scaling_factor", 2.5),
        num_experts_missing=256,
        num_active_missing=8,
    )
    shared = SharedExpertConfig(width * num_shared) if num_shared else None
    return ExpertsConfig(width, routing, read_activation(fields), has_correction_bias=True, shared=shared)


MIXTURE = (
    "first_k_dense_replace moe_intermediate_size n_group topk_group n_routed_experts n_shared_experts norm_topk_prob "
    "num_experts_per_tok routed_scaling_factor"
)
_REFUSED = {
    **REFUSED,
    "scoring_func": ("sigmoid", None),
    "topk_method": ("noaux_tc", None),
    "moe_layer_freq": (1, None),
}
KEYS = family_keys(f"{READ} {MIXTURE}", without_effect=WITHOUT_EFFECT, refused=_REFUSED)
DEEPSEEK_V3, KIMI_K2 = (
    Family(family, ("DeepseekV3ForCausalLM",), partial(read_config, family=family), KEYS, TENSORS, has_more_layers=True)
    for family in ("deepseek_v3", "kimi_k2")
)
