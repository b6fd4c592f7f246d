"""Qwen 3 with experts (30B-A3B, 235B-A22B, Coder): the attention of Qwen 3, and a mixture in most layers."""

from functools import partial

from qualification.model.config import ModelConfig, QKNorm
from qualification.model.families.family import ExpertNames, Family, TensorNames
from qualification.model.fields import Fields
from qualification.model.keys import family_keys
from qualification.model.mixtures import read_qwen_mixtures
from qualification.model.shared import read_like_llama
from qualification.model.windows import WINDOW, no_windows, read_uniform_windows


def read_config(fields: Fields) -> ModelConfig:
    has_bias = fields.flag("attention_bias", False)
    has_window = fields.flag("use_sliding_window", False)  # in all layers, unlike in the dense Qwen 3
    return read_like_llama(
        fields,
        "qwen3_moe",
        attention_bias=has_bias,
        output_bias=has_bias,
        qk_norm=QKNorm.EACH_HEAD,
        windows=partial(read_uniform_windows, missing=WINDOW) if has_window else no_windows,
        feed_forwards=partial(read_qwen_mixtures, num_experts=128, num_active=8, width=768),
    )


KEYS = family_keys(
    "attention_bias sliding_window use_sliding_window layer_types decoder_sparse_step mlp_only_layers "
    "moe_intermediate_size norm_topk_prob num_experts num_local_experts num_experts_per_tok",
    without_effect="max_window_layers output_router_logits router_aux_loss_coef",
)
QWEN3_MOE = Family("qwen3_moe", ("Qwen3MoeForCausalLM",), read_config, KEYS, TensorNames(experts=ExpertNames()))
