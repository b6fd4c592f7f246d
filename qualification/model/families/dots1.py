"""dots.llm1: the attention of Qwen 3, and DeepSeek's mixtures behind the first layers, which are dense."""

from functools import partial

from kernels.experts.kinds import Scores
from qualification.model.config import ExpertsConfig, ModelConfig, QKNorm
from qualification.model.families.family import ExpertNames, Family, TensorNames
from qualification.model.fields import Fields
from qualification.model.keys import family_keys
from qualification.model.mixtures import read_deepseek_experts, read_mixtures_behind
from qualification.model.shared import read_like_llama
from qualification.model.windows import WINDOW, Windows, read_windows_of

_FIRST = 62  # the first layer with a window where max_window_layers is missing, as its class has it


def read_config(fields: Fields) -> ModelConfig:
    has_bias = fields.flag("attention_bias", False)
    return read_like_llama(
        fields,
        "dots1",
        qk_norm=QKNorm.EACH_HEAD,
        windows=_read_windows,
        attention_bias=has_bias,
        output_bias=has_bias,
        feed_forwards=partial(read_mixtures_behind, read_experts=_read_experts, num_dense_missing=0),
    )


def _read_windows(fields: Fields) -> Windows:
    first = fields.count("max_window_layers", _FIRST)
    return read_windows_of(fields, fields.integer_or_none("sliding_window", WINDOW), lambda layer: layer >= first)


def _read_experts(fields: Fields) -> ExpertsConfig:
    return read_deepseek_experts(
        fields,
        scores=Scores.SIGMOID,
        renormalizes=False,
        width=1408,
        num_shared=fields.integer("n_shared_experts"),
        num_experts=fields.integer("n_routed_experts"),
        num_active=None,
    )


KEYS = family_keys(
    "attention_bias sliding_window max_window_layers layer_types first_k_dense_replace moe_intermediate_size n_group "
    "topk_group n_routed_experts n_shared_experts norm_topk_prob num_experts_per_tok routed_scaling_factor",
    without_effect="output_router_logits",
    # What its class does whatever these say.
    refused={
        "scoring_func": ("sigmoid", "noaux_tc", None),
        "topk_method": ("noaux_tc", None),
        "moe_layer_freq": (1, None),
    },
)
TENSORS = TensorNames(experts=ExpertNames(shared="mlp.shared_experts"))
DOTS1 = Family("dots1", ("Dots1ForCausalLM",), read_config, KEYS, TENSORS)
