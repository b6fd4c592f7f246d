"""GLM 4.7 Flash: DeepSeek V3's layers, of which a list says the kinds.

The layers behind the last one predict several tokens at once; they are not computed.
"""

from functools import partial

from qualification.model.config import ModelConfig
from qualification.model.families.deepseek_v3 import MIXTURE, read_sigmoid_experts
from qualification.model.families.family import Family
from qualification.model.families.latent import READ, REFUSED, TENSORS, WITHOUT_EFFECT, read_latent
from qualification.model.fields import Fields
from qualification.model.keys import family_keys
from qualification.model.latent import LatentSizes
from qualification.model.mixtures import KINDS, read_mixtures_by_kind

_SIZES = LatentSizes(latent=512, rotated=64, plain=192, value=256, query_latent=768)
_MISSING = {
    "moe_intermediate_size": 1536,
    "n_routed_experts": 64,
    "num_experts_per_tok": 4,
    "n_group": 1,
    "topk_group": 1,
    "routed_scaling_factor": 1.8,
}


def read_config(fields: Fields) -> ModelConfig:
    fields = fields.or_else(**_MISSING)
    num_dense = fields.count("first_k_dense_replace", 1)
    feed_forwards = partial(read_mixtures_by_kind, read_experts=read_sigmoid_experts, num_dense_missing=num_dense)
    return read_latent(fields, "glm4_moe_lite", sizes=_SIZES, norm_eps=1e-5, feed_forwards=feed_forwards)


KEYS = family_keys(
    f"{READ} {MIXTURE} {KINDS}",
    without_effect=WITHOUT_EFFECT,
    refused={**REFUSED, "scoring_func": ("sigmoid", None), "topk_method": ("noaux_tc", None)},
)
GLM4_MOE_LITE = Family("glm4_moe_lite", ("Glm4MoeLiteForCausalLM",), read_config, KEYS, TENSORS, has_more_layers=True)
