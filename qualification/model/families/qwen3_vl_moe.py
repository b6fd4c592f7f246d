"""The text part of Qwen 3 VL with experts: a Qwen 3 with experts, all of a layer in one tensor.

The chosen experts' weights always sum to one.
"""

from functools import partial

from qualification.model.config import ModelConfig, QKNorm
from qualification.model.families.family import ExpertLayout, ExpertNames, Family, TensorNames
from qualification.model.families.qwen3_vl import NO_WINDOWS, THETA
from qualification.model.fields import Fields
from qualification.model.keys import family_keys
from qualification.model.mixtures import read_qwen_mixtures
from qualification.model.shared import read_like_llama

TENSORS = TensorNames(experts=ExpertNames(layout=ExpertLayout.HALVES))


def read_config(fields: Fields) -> ModelConfig:
    has_bias = fields.flag("attention_bias", False)
    return read_like_llama(
        fields.or_else(rope_theta=THETA, norm_topk_prob=True),
        "qwen3_vl_moe_text",
        attention_bias=has_bias,
        output_bias=has_bias,
        qk_norm=QKNorm.EACH_HEAD,
        feed_forwards=partial(read_qwen_mixtures, num_experts=60, num_active=4, width=1408),
    )


KEYS = family_keys(
    "attention_bias decoder_sparse_step mlp_only_layers moe_intermediate_size num_experts num_local_experts "
    "num_experts_per_tok",
    without_effect="sliding_window output_router_logits router_aux_loss_coef",
    refused={**NO_WINDOWS, "norm_topk_prob": (True, None)},
)
QWEN3_VL_MOE_TEXT = Family("qwen3_vl_moe_text", (), read_config, KEYS, TENSORS)
