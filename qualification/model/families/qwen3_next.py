"""Qwen 3 Next (80B-A3B): three layers of the gated delta rule before each that attends, a mixture in every layer.

Attention's heads have gates, norms are zero-centred, and an expert that all tokens visit is gated.
"""

from dataclasses import replace
from functools import partial

from kernels.fused.head_gate_kind import GateFunction
from kernels.recurrence.sizes import RecurrenceSizes
from kernels.vocabulary.shape import Dtype
from qualification.model.config import AttentionGate, LayerConfig, ModelConfig, QKNorm, RopeConfig, RopeKind
from qualification.model.families.family import ExpertNames, Family, RecurrenceNames, TensorNames
from qualification.model.fields import Fields
from qualification.model.gated_delta import GatedDeltaConfig
from qualification.model.keys import family_keys
from qualification.model.mixtures import read_qwen_mixtures
from qualification.model.rope import read_rope
from qualification.model.shared import read_like_llama

_FULL, _RECURRENT = "full_attention", "linear_attention"
_INTERVAL = 4  # every fourth layer attends, where config.json says nothing
_STATE_DTYPES = {"float32": Dtype.FP32, "bfloat16": Dtype.BF16}
# Numbers of a head's matrix that a state may have: of 128 x 128 in every published model.
_MOST_DIM, _MOST_WIDTH = 256, 8
# As its class has them where the fields are missing.
MISSING: dict[str, object] = {
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "max_position_embeddings": 32_768,
    "partial_rotary_factor": 0.25,
    "norm_topk_prob": True,
}


def read_config(fields: Fields) -> ModelConfig:
    # Of null its class rotates whole heads.
    fields = fields.where_absent(partial_rotary_factor=MISSING["partial_rotary_factor"])
    fields = fields.or_else(**{name: it for name, it in MISSING.items() if name != "partial_rotary_factor"})
    has_bias = fields.flag("attention_bias", False)
    model = read_like_llama(
        fields,
        "qwen3_next",
        attention_bias=has_bias,
        output_bias=has_bias,
        qk_norm=QKNorm.EACH_HEAD,
        rope=read_partial_rope,
        feed_forwards=partial(read_qwen_mixtures, num_experts=512, num_active=10, width=512, shared_width=512),
    )
    mixer = read_gated_delta(fields, num_key_heads=16, num_value_heads=32, dim=128)
    return with_recurrences(model, read_attending_layers(fields, model.num_layers), mixer)


def read_partial_rope(fields: Fields, head_dim: int) -> RopeConfig:
    """Read the rotation of the first part of each head; mrope is a name for positions of three parts."""
    kinds = (RopeKind.PLAIN, RopeKind.LINEAR, RopeKind.LLAMA3, RopeKind.YARN)
    return read_rope(fields, kinds, head_dim=head_dim, plain_aliases=("mrope",), is_partial=True)


def read_gated_delta(fields: Fields, *, num_key_heads: int, num_value_heads: int, dim: int) -> GatedDeltaConfig:
    """Read the mixer of the layers that do not attend. Raises ModelConfigError.

    The numbers are those of the family's class in transformers, where the fields are missing; dim: of keys and values.
    """
    keys = fields.integer("linear_num_key_heads", num_key_heads)
    values = fields.integer("linear_num_value_heads", num_value_heads)
    if values % keys:
        fields.refuse("linear_num_value_heads", f"a multiple of linear_num_key_heads ({keys})")
    sizes = RecurrenceSizes(
        keys,
        values,
        fields.integer("linear_key_head_dim", dim, most=_MOST_DIM),
        fields.integer("linear_value_head_dim", dim, most=_MOST_DIM),
        fields.integer("linear_conv_kernel_dim", 4, most=_MOST_WIDTH),
    )
    dtype = _STATE_DTYPES[fields.choice("mamba_ssm_dtype", tuple(_STATE_DTYPES), "float32")]
    return GatedDeltaConfig.of(sizes, fields.integer("hidden_size"), dtype)


def read_attending_layers(fields: Fields, num_layers: int) -> tuple[bool, ...]:
    """Read which layers attend: by layer_types, else every full_attention_interval-th. Raises ModelConfigError."""
    interval = fields.integer("full_attention_interval", _INTERVAL)
    if not fields.has("layer_types"):
        found = tuple((layer + 1) % interval == 0 for layer in range(num_layers))
    else:
        found = tuple(it == _FULL for it in fields.choices("layer_types", (_FULL, _RECURRENT), num_layers))
    if not any(found):
        fields.refuse("layer_types", f"such that a layer is {_FULL}: prompts are cached by the pages of such layers")
    return found


def with_recurrences(model: ModelConfig, attends: tuple[bool, ...], mixer: GatedDeltaConfig) -> ModelConfig:
    """Return the model with gated attention where a layer attends, and with `mixer` where it does not."""

    gate = AttentionGate(GateFunction.SIGMOID, by_dimension=True, is_beside_queries=True)

    def changed(layer: LayerConfig, *, is_attending: bool) -> LayerConfig:
        if not is_attending:
            return replace(layer, mixer=mixer)
        return replace(layer, mixer=replace(layer.attention, gate=gate))

    pairs = zip(model.layers, attends, strict=True)
    return replace(
        model,
        layers=tuple(changed(layer, is_attending=it) for layer, it in pairs),
        zero_centred_norms=True,
    )


RECURRENT_KEYS = (
    "attention_bias layer_types full_attention_interval linear_conv_kernel_dim linear_key_head_dim "
    "linear_value_head_dim linear_num_key_heads linear_num_value_heads mamba_ssm_dtype"
)
KEYS = family_keys(
    f"{RECURRENT_KEYS} decoder_sparse_step mlp_only_layers moe_intermediate_size shared_expert_intermediate_size "
    "norm_topk_prob num_experts num_local_experts num_experts_per_tok",
    without_effect="output_router_logits router_aux_loss_coef",
)
QWEN3_NEXT = Family(
    "qwen3_next",
    ("Qwen3NextForCausalLM",),
    read_config,
    KEYS,
    TensorNames(experts=ExpertNames(router_is_plain=True), recurrence=RecurrenceNames(is_fused=True)),
    not_read=("mtp.",),
)
