"""OLMoE: a Llama with experts, whose queries and keys are normed over all heads together."""

from functools import partial

from qualification.model.config import ExpertsConfig, ModelConfig, QKNorm
from qualification.model.families.family import ExpertNames, Family, TensorNames
from qualification.model.fields import Fields
from qualification.model.keys import family_keys
from qualification.model.mixtures import read_routing
from qualification.model.shared import read_dense, read_like_llama


def read_config(fields: Fields) -> ModelConfig:
    has_bias = fields.flag("attention_bias", False)
    return read_like_llama(
        fields,
        "olmoe",
        norm_eps=1e-5,
        qk_norm=QKNorm.ALL_HEADS,
        attention_bias=has_bias,
        output_bias=has_bias,
        feed_forward=partial(read_olmo_experts, num_experts=64, num_active=8),
    )


def read_olmo_experts(fields: Fields, *, num_experts: int, num_active: int) -> ExpertsConfig:
    """Read the mixture of a layer; the numbers are those of its class where fields are missing.

    Raises ModelConfigError.
    """
    dense = read_dense(fields)  # an expert's width and activation stand where those of a dense layer do
    routing = read_routing(
        fields,
        "num_local_experts" if fields.has("num_local_experts") else "num_experts",  # as newer files call them
        renormalizes=fields.flag("norm_topk_prob", False),
        num_experts_missing=num_experts,
        num_active_missing=num_active,
    )
    return ExpertsConfig(dense.width, routing)


READ = "attention_bias num_experts num_local_experts num_experts_per_tok norm_topk_prob"
WITHOUT_EFFECT = "output_router_logits router_aux_loss_coef"
KEYS = family_keys(
    READ,
    without_effect=WITHOUT_EFFECT,
    refused={
        "clip_qkv": (None,),  # bounds of queries, keys and values, which no kernel applies
        "sliding_window": (None,),  # which its class reads, and applies by some kernels alone
    },
)
TENSORS = TensorNames(experts=ExpertNames())
OLMOE = Family("olmoe", ("OlmoeForCausalLM",), read_config, KEYS, TENSORS)
