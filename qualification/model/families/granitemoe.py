"""Granite 3 with experts: a Granite whose feed-forward is a mixture, alone or beside a part that all tokens visit."""

from functools import partial

from qualification.model.config import ExpertsConfig, ModelConfig, SharedExpertConfig
from qualification.model.families.family import ExpertLayout, ExpertNames, Family, TensorNames
from qualification.model.families.granite import MULTIPLIERS, read_granite
from qualification.model.fields import Fields
from qualification.model.keys import family_keys
from qualification.model.mixtures import read_routing
from qualification.model.shared import read_activation, read_dense

TENSORS = TensorNames(
    experts=ExpertNames(
        "block_sparse_moe.router.layer",
        "block_sparse_moe",
        joined_gate_up="input_linear.weight",
        joined_down="output_linear.weight",
        shared="shared_mlp",
        shared_gate_up="input_linear",
        shared_down="output_linear",
        layout=ExpertLayout.HALVES,
    )
)
SHARED_WIDTH = "shared_intermediate_size"


def read_config(fields: Fields) -> ModelConfig:
    return read_granite(fields, "granitemoe", partial(read_granite_experts, shared_width=0))


def read_shared_config(fields: Fields) -> ModelConfig:
    return read_granite(
        fields, "granitemoeshared", partial(read_granite_experts, shared_width=fields.count(SHARED_WIDTH, 0))
    )


def read_granite_experts(fields: Fields, shared_width: int) -> ExpertsConfig:
    """Read the mixture of a layer; shared_width: of what all tokens visit, 0 for none. Raises ModelConfigError."""
    dense = read_dense(fields)  # an expert's width and activation stand where those of a dense layer do
    routing = read_routing(fields, "num_local_experts", renormalizes=True, num_experts_missing=8, num_active_missing=2)
    shared = SharedExpertConfig(shared_width) if shared_width else None
    return ExpertsConfig(dense.width, routing, read_activation(fields), shared=shared)


READ = f"attention_bias {MULTIPLIERS} num_local_experts num_experts_per_tok"
WITHOUT_EFFECT = "output_router_logits router_aux_loss_coef"
GRANITEMOE = Family(
    "granitemoe",
    ("GraniteMoeForCausalLM",),
    read_config,
    family_keys(READ, without_effect=WITHOUT_EFFECT),
    TENSORS,
)
GRANITEMOESHARED = Family(
    "granitemoeshared",
    ("GraniteMoeSharedForCausalLM",),
    read_shared_config,
    family_keys(f"{READ} {SHARED_WIDTH}", without_effect=WITHOUT_EFFECT),
    TENSORS,
)
