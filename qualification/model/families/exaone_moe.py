"""K-EXAONE: the attention of EXAONE 4 behind norms, and mixtures of experts chosen by sigmoids and a bias.

Layers without a window rotate nothing. The layers that predict several tokens at once are not computed.
"""

from functools import partial

from kernels.experts.kinds import Scores
from qualification.model.config import ExpertsConfig, ModelConfig, QKNorm, SharedExpertConfig
from qualification.model.families.exaone4 import PATTERN, read_exaone_windows, with_windows_rotated
from qualification.model.families.family import ExpertNames, Family, TensorNames
from qualification.model.fields import Fields
from qualification.model.keys import family_keys
from qualification.model.mixtures import KINDS, read_mixtures_by_kind, read_routing
from qualification.model.shared import read_activation, read_like_llama

_NUM_DENSE = "first_k_dense_replace"


def read_config(fields: Fields) -> ModelConfig:
    num_dense = fields.count(_NUM_DENSE, 1)
    model = read_like_llama(
        fields,
        "exaone_moe",
        norm_eps=1e-5,
        qk_norm=QKNorm.EACH_HEAD,
        windows=read_exaone_windows,
        feed_forwards=partial(read_mixtures_by_kind, read_experts=_read_experts, num_dense_missing=num_dense),
    )
    return with_windows_rotated(fields, model)


def _read_experts(fields: Fields) -> ExpertsConfig:
    width, num_shared = fields.integer("moe_intermediate_size", 1024), fields.count("num_shared_experts", 1)
    routing = read_routing(
        fields,
        "num_experts",
        scores=Scores.SIGMOID,
        renormalizes=fields.flag("norm_topk_prob", True),
        has_groups=True,
        scale=fields.number("routed_scaling_factor", 2.5),
        num_experts_missing=64,
        num_active_missing=8,
    )
    shared = SharedExpertConfig(width * num_shared) if num_shared else None
    return ExpertsConfig(width, routing, read_activation(fields), has_correction_bias=True, shared=shared)


KEYS = family_keys(
    f"sliding_window {PATTERN} layer_types {KINDS} {_NUM_DENSE} moe_intermediate_size num_experts num_experts_per_tok "
    "num_shared_experts norm_topk_prob routed_scaling_factor n_group topk_group",
    without_effect="output_router_logits num_nextn_predict_layers is_moe_layer",
    # What its class does whatever these say.
    refused={"scoring_func": ("sigmoid", None), "topk_method": ("noaux_tc", None), "attention_bias": (False, None)},
)
TENSORS = TensorNames(experts=ExpertNames(shared="mlp.shared_experts", correction="mlp.e_score_correction_bias"))
EXAONE_MOE = Family("exaone_moe", ("ExaoneMoeForCausalLM",), read_config, KEYS, TENSORS, not_read=("mtp.",))
