"""Granite 4: layers of Mamba2 or of attention, mostly without positions, each with a mixture, a dense part or both."""

from dataclasses import replace

from kernels.recurrence.sizes import RecurrenceSizes
from qualification.model.config import DenseConfig, FeedForward, LayerConfig, ModelConfig, RopeConfig, RopeKind
from qualification.model.families.family import Family, RecurrenceNames
from qualification.model.families.granite import MULTIPLIERS, read_granite
from qualification.model.families.granitemoe import SHARED_WIDTH, read_granite_experts
from qualification.model.families.granitemoe import TENSORS as OF_MIXTURES
from qualification.model.families.nemotron_h import MOST_DIM, MOST_WIDTH, read_steps
from qualification.model.fields import Fields
from qualification.model.gated_delta import GatedDeltaConfig, StateSpaceRule
from qualification.model.keys import family_keys
from qualification.model.shared import plain_ropes, read_activation

_KINDS, _NUM_EXPERTS, _POSITIONS = "layer_types", "num_local_experts", "position_embedding_type"
_MAMBA, _ATTENTION = "linear_attention", "full_attention"
_OLDER = {"mamba": _MAMBA, "attention": _ATTENTION}
MIXER = "mamba_n_groups mamba_n_heads mamba_d_head mamba_d_state mamba_d_conv mamba_expand time_step_limit"
_EXPANDED = 2  # times the hidden size: a Mamba2 layer's values where mamba_expand is missing
# As its class has them where the fields are missing.
_MISSING: dict[str, object] = {
    "vocab_size": 32_000,
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "max_position_embeddings": 2048,
    "intermediate_size": 11_008,
    "shared_intermediate_size": 1024,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def read_config(fields: Fields) -> ModelConfig:
    fields = fields.or_else(**_MISSING)
    kinds = _read_kinds(fields)
    model = read_granite(fields, "granitemoehybrid", _read_feed_forward, rope=_read_positions)
    if _MAMBA not in kinds:
        return model
    mixer = read_mixer(fields)

    def layer(whole: LayerConfig, kind: str) -> LayerConfig:
        return replace(whole, mixer=mixer) if kind == _MAMBA else whole

    return replace(model, layers=tuple(map(layer, model.layers, kinds)))


def _read_kinds(fields: Fields) -> tuple[str, ...]:
    """Read what each layer's mixer is. Raises ModelConfigError."""
    given = fields.given(_KINDS)
    kinds = [_OLDER.get(it, it) for it in map(str, given)] if isinstance(given, list) else []
    num_layers = fields.integer("num_hidden_layers")
    if len(kinds) != num_layers or not {*kinds} <= {_MAMBA, _ATTENTION}:
        fields.refuse(_KINDS, f"a list of {num_layers} (num_hidden_layers) of {_MAMBA} and {_ATTENTION}")
    if _ATTENTION not in kinds:
        fields.refuse(_KINDS, "such that a layer attends: prompts are cached by the pages of such layers")
    return tuple(kinds)


def _read_positions(fields: Fields, head_dim: int) -> RopeConfig:
    if fields.choice(_POSITIONS, ("rope", "nope"), "nope") == "rope":
        return plain_ropes(fields, head_dim)
    return RopeConfig(1.0, RopeKind.NONE)


def _read_feed_forward(fields: Fields) -> FeedForward:
    if fields.count(_NUM_EXPERTS, 8) == 0:  # then each token visits what stands beside the experts elsewhere, alone
        return DenseConfig(fields.integer(SHARED_WIDTH), read_activation(fields))
    return read_granite_experts(fields, shared_width=fields.integer(SHARED_WIDTH))


def read_mixer(
    fields: Fields, values: int | None = None, rule: StateSpaceRule | None = None, *, output_scale: float = 1.0
) -> GatedDeltaConfig:
    """Read a layer of Mamba2. Raises ModelConfigError.

    values  numbers of its values, which `mamba_d_ssm` gives; None: mamba_expand times the hidden size
    rule    None: as in most families
    """
    hidden, groups = fields.integer("hidden_size"), fields.integer("mamba_n_groups", 1)
    source = "mamba_expand times hidden_size" if values is None else "mamba_d_ssm"
    if values is None:
        values = fields.integer("mamba_expand", _EXPANDED) * hidden
    heads = fields.integer("mamba_n_heads", 128)
    if heads % groups:
        fields.refuse("mamba_n_heads", f"a multiple of mamba_n_groups ({groups})")
    if values % heads:
        fields.refuse("mamba_n_heads", f"a divisor of {source} ({values})")
    dim = values // heads
    if fields.given("mamba_d_head") not in (None, "auto", dim):
        fields.refuse("mamba_d_head", f'"auto" or {dim}, by {source} and mamba_n_heads')
    if dim > MOST_DIM:
        fields.refuse("mamba_n_heads", f"such that a head has at most {MOST_DIM} dimensions (it has {dim})")
    sizes = RecurrenceSizes(
        groups,
        heads,
        fields.integer("mamba_d_state", 256, most=MOST_DIM),
        dim,
        fields.integer("mamba_d_conv", 4, most=MOST_WIDTH),
    )
    rule = rule or StateSpaceRule(*read_steps(fields))
    return GatedDeltaConfig.of(sizes, hidden, rule=rule, output_scale=output_scale)


KEYS = family_keys(
    f"attention_bias {MULTIPLIERS} {_NUM_EXPERTS} num_experts_per_tok {SHARED_WIDTH} {_KINDS} {_POSITIONS} {MIXER}",
    without_effect="output_router_logits router_aux_loss_coef mamba_chunk_size normalization_function init_method",
    refused={
        "hidden_act": ("silu", None),
        "mamba_conv_bias": (True,),  # null has none, says its class
        "mamba_proj_bias": (False, None),
    },
)
TENSORS = replace(
    OF_MIXTURES,
    feed_forward="shared_mlp",
    dense_joined=("input_linear", "output_linear"),
    recurrence=RecurrenceNames(prefix="mamba"),
)
GRANITEMOEHYBRID = Family("granitemoehybrid", ("GraniteMoeHybridForCausalLM",), read_config, KEYS, TENSORS)
