"""ERNIE 4.5 with experts (21B-A3B): chosen by softmax scores and a bias, beside experts that all tokens visit."""

from functools import partial

from qualification.model.config import ExpertsConfig, ModelConfig, SharedExpertConfig
from qualification.model.families.ernie4_5 import REFUSED, THETA
from qualification.model.families.family import ExpertNames, Family, TensorNames
from qualification.model.fields import Fields
from qualification.model.keys import family_keys
from qualification.model.mixtures import read_mixtures, read_routing
from qualification.model.shared import read_activation, read_like_llama
from qualification.model.windows import read_num_layers

EXPERTS = ExpertNames(
    shared="mlp.shared_experts",
    correction="mlp.moe_statics.e_score_correction_bias",
    correction_is_matrix=True,
)
TENSORS = TensorNames(neighbours_are_pairs=True, experts=EXPERTS)
NOT_READ = "model.mtp", "mtp"
_LAST = "moe_layer_end_index"


def read_config(fields: Fields) -> ModelConfig:
    num_layers, first = read_num_layers(fields), fields.count("moe_layer_start_index", 1)
    last = num_layers - 1 if fields.given(_LAST) in (None, -1) else fields.count(_LAST, 0)
    interval = fields.integer("moe_layer_interval", 1)
    return read_like_llama(
        fields.or_else(rope_theta=THETA),
        "ernie4_5_moe",
        norm_eps=1e-5,
        feed_forwards=partial(
            read_mixtures,
            read_experts=_read_experts,
            has_experts=lambda layer: first <= layer <= last and (layer + 1) % interval == 0,
        ),
        tie_embeddings=True,
    )


def _read_experts(fields: Fields) -> ExpertsConfig:
    return read_ernie_experts(fields, fields.integer("moe_intermediate_size", 1536))


def read_ernie_experts(fields: Fields, width: int) -> ExpertsConfig:
    """Read a mixture of experts of a width, beside some that all tokens visit as one. Raises ModelConfigError."""
    num_shared = fields.count("moe_num_shared_experts", 2)
    routing = read_routing(
        fields,
        "moe_num_experts",
        renormalizes=True,
        num_experts_missing=64,
        num_active_missing=6,
        num_active="moe_k",
    )
    shared = SharedExpertConfig(width * num_shared) if num_shared else None
    return ExpertsConfig(width, routing, read_activation(fields), has_correction_bias=True, shared=shared)


KEYS = family_keys(
    "moe_intermediate_size moe_k moe_num_experts moe_num_shared_experts moe_layer_start_index moe_layer_end_index "
    "moe_layer_interval",
    without_effect="output_router_logits router_aux_loss_coef moe_capacity moe_gate moe_use_aux_free "
    "num_nextn_predict_layers",
    refused={
        **REFUSED,
        "use_bias": (False, None),
        "moe_norm_min": (1e-12,),  # weights of the chosen experts are divided by their sum, or by this
        "num_experts": (None,),  # other names of moe_num_experts and moe_k, which its class reads too
        "num_experts_per_tok": (None,),
    },
)
ERNIE4_5_MOE = Family("ernie4_5_moe", ("Ernie4_5_MoeForCausalLM",), read_config, KEYS, TENSORS, not_read=NOT_READ)
