"""DeepSeek V2 Lite: latent attention without a query latent, experts by softmax, two shared ones."""

from qualification.model.config import ExpertsConfig, FeedForward, ModelConfig, SharedExpertConfig
from qualification.model.families.deepseek_v3 import MIXTURE
from qualification.model.families.family import Family
from qualification.model.families.latent import READ, REFUSED, TENSORS, WITHOUT_EFFECT, read_latent
from qualification.model.fields import Fields
from qualification.model.keys import family_keys
from qualification.model.latent import LatentSizes
from qualification.model.mixtures import read_mixtures, read_routing
from qualification.model.shared import read_activation

_SIZES = LatentSizes(latent=512, rotated=64, plain=128, value=128, query_latent=1536)


def read_config(fields: Fields) -> ModelConfig:
    return read_latent(fields, "deepseek_v2", sizes=_SIZES, norm_eps=1e-6, feed_forwards=_read_feed_forwards)


def _read_feed_forwards(fields: Fields) -> tuple[FeedForward, ...]:
    num_dense = fields.count("first_k_dense_replace", 0)
    return read_mixtures(fields, _read_experts, lambda layer: layer >= num_dense)


def _read_experts(fields: Fields) -> ExpertsConfig:
    if fields.flag("norm_topk_prob", False):
        fields.refuse("norm_topk_prob", "false (weights of experts are not divided by their sum)")
    if fields.given("topk_method") == "group_limited_greedy" and fields.integer("n_group", 1) > 1:
        fields.refuse("topk_method", "greedy: groups ranked by their best expert alone are not supported")
    width, num_shared = fields.integer("moe_intermediate_size", 1407), fields.count("n_shared_experts", 2)
    routing = read_routing(
        fields,
        "n_routed_experts",
        renormalizes=False,
        scale=fields.number("routed_scaling_factor", 1.0),
        num_experts_missing=64,
    )
    shared = SharedExpertConfig(width * num_shared) if num_shared else None
    return ExpertsConfig(width, routing, read_activation(fields), shared=shared)


KEYS = family_keys(
    f"{READ} {MIXTURE} topk_method",
    without_effect=WITHOUT_EFFECT,
    refused={
        **REFUSED,
        "mlp_bias": (False, None),
        "scoring_func": ("softmax", None),
        "moe_layer_freq": (1, None),
    },
)
DEEPSEEK_V2 = Family("deepseek_v2", ("DeepseekV2ForCausalLM",), read_config, KEYS, TENSORS)
