"""DeepSeek V3, R1 and V3.1, and Kimi K2, which has the same class: latent attention, groups of experts, a shared one.

The layers behind the last one predict several tokens at once; they are not computed.
"""

from functools import partial

from kernels.experts.kinds import Scores
from qualification.model.config import ExpertsConfig, ModelConfig
from qualification.model.families.family import Family
from qualification.model.families.latent import READ, REFUSED, TENSORS, WITHOUT_EFFECT, read_latent
from qualification.model.fields import Fields
from qualification.model.keys import family_keys
from qualification.model.latent import LatentSizes
from qualification.model.mixtures import read_deepseek_experts, read_mixtures_behind

SIZES = LatentSizes(latent=512, rotated=64, plain=128, value=128, query_latent=1536)


def read_config(fields: Fields, family: str) -> ModelConfig:
    feed_forwards = partial(read_mixtures_behind, read_experts=read_sigmoid_experts, num_dense_missing=3)
    return read_latent(fields, family, sizes=SIZES, norm_eps=1e-6, feed_forwards=feed_forwards)


def read_sigmoid_experts(fields: Fields) -> ExpertsConfig:
    """Experts chosen by sigmoids and a bias, in groups. Raises ModelConfigError."""
    return read_deepseek_experts(
        fields.or_else(n_group=8, topk_group=4),
        scores=Scores.SIGMOID,
        scale=2.5,
        width=2048,
        num_experts=256,
        num_active=8,
    )


MIXTURE = (
    "first_k_dense_replace moe_intermediate_size n_group topk_group n_routed_experts n_shared_experts norm_topk_prob "
    "num_experts_per_tok routed_scaling_factor"
)
MIXTURE_REFUSED: dict[str, tuple[object, ...]] = {
    "scoring_func": ("sigmoid", None),
    "topk_method": ("noaux_tc", None),
    "moe_layer_freq": (1, None),
}
KEYS = family_keys(f"{READ} {MIXTURE}", without_effect=WITHOUT_EFFECT, refused={**REFUSED, **MIXTURE_REFUSED})
DEEPSEEK_V3, KIMI_K2 = (
    Family(family, ("DeepseekV3ForCausalLM",), partial(read_config, family=family), KEYS, TENSORS, has_more_layers=True)
    for family in ("deepseek_v3", "kimi_k2")
)
