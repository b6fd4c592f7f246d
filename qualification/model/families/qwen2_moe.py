"""Qwen 1.5 and 2 with experts: the attention of Qwen 2, a mixture, and beside it a gated expert for all tokens."""

from functools import partial

from qualification.model.config import ModelConfig
from qualification.model.families.family import ExpertNames, Family, TensorNames
from qualification.model.fields import Fields
from qualification.model.keys import family_keys
from qualification.model.mixtures import read_qwen_mixtures
from qualification.model.shared import read_like_llama
from qualification.model.windows import read_switched_alternating_windows


def read_config(fields: Fields) -> ModelConfig:
    return read_like_llama(
        fields,
        "qwen2_moe",
        attention_bias=fields.flag("qkv_bias", True),
        windows=read_switched_alternating_windows,
        feed_forwards=partial(read_qwen_mixtures, num_experts=60, num_active=4, width=1408, shared_width=5632),
    )


KEYS = family_keys(
    "qkv_bias sliding_window use_sliding_window max_window_layers layer_types decoder_sparse_step mlp_only_layers "
    "moe_intermediate_size shared_expert_intermediate_size norm_topk_prob num_experts num_experts_per_tok",
    without_effect="output_router_logits router_aux_loss_coef",
)
QWEN2_MOE = Family("qwen2_moe", ("Qwen2MoeForCausalLM",), read_config, KEYS, TensorNames(experts=ExpertNames()))
