"""DeepSeek V2 Lite: latent attention without a query latent, experts by softmax, two shared ones."""

from functools import partial

from qualification.model.config import ExpertsConfig, ModelConfig
from qualification.model.families.deepseek_v3 import MIXTURE, SIZES
from qualification.model.families.family import Family
from qualification.model.families.latent import READ, REFUSED, TENSORS, WITHOUT_EFFECT, read_latent
from qualification.model.fields import Fields
from qualification.model.keys import family_keys
from qualification.model.mixtures import read_deepseek_experts, read_mixtures_behind


def read_config(fields: Fields) -> ModelConfig:
    feed_forwards = partial(read_mixtures_behind, read_experts=read_v2_experts, num_dense_missing=0)
    return read_latent(fields, "deepseek_v2", sizes=SIZES, norm_eps=1e-6, feed_forwards=feed_forwards)


def read_v2_experts(fields: Fields) -> ExpertsConfig:
    """Read experts chosen by softmax, whose weights are not divided by their sum. Raises ModelConfigError."""
    if fields.flag("norm_topk_prob", False):
        fields.refuse("norm_topk_prob", "false (weights of experts are not divided by their sum)")
    if fields.given("topk_method") == "group_limited_greedy" and fields.integer("n_group", 1) > 1:
        fields.refuse("topk_method", "greedy: groups ranked by their best expert alone are not supported")
    return read_deepseek_experts(
        fields, renormalizes=False, has_groups=False, width=1407, num_shared=2, num_experts=64, num_active=None
    )


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
