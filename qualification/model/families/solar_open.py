"""Solar Open: GLM 4.5's mixtures in every layer, and whole heads that are rotated."""

from functools import partial

from kernels.experts.kinds import Scores
from qualification.model.config import ModelConfig
from qualification.model.families.family import Family
from qualification.model.families.glm4_moe import TENSORS
from qualification.model.fields import Fields
from qualification.model.keys import family_keys
from qualification.model.mixtures import read_deepseek_experts
from qualification.model.shared import read_like_llama

_READ_EXPERTS = partial(read_deepseek_experts, scores=Scores.SIGMOID, width=1280, num_experts=128, num_active=8)
_THETA = 1_000_000.0  # as its class has it


def read_config(fields: Fields) -> ModelConfig:
    return read_like_llama(
        fields.or_else(head_dim=128, num_key_value_heads=8, rope_theta=_THETA),
        "solar_open",
        norm_eps=1e-5,
        attention_bias=fields.flag("attention_bias", False),
        feed_forward=_READ_EXPERTS,
    )


KEYS = family_keys(
    "attention_bias moe_intermediate_size n_group topk_group n_routed_experts n_shared_experts norm_topk_prob "
    "num_experts_per_tok routed_scaling_factor",
    without_effect="output_router_logits router_aux_loss_coef",
    # What its class does whatever these say.
    refused={"first_k_dense_replace": (0, None), "use_qk_norm": (False, None)},
)
SOLAR_OPEN = Family("solar_open", ("SolarOpenForCausalLM",), read_config, KEYS, TENSORS)
