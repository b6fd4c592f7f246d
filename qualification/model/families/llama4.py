"""The text part of Llama 4 (Scout, Maverick): layers that rotate nothing between those that see one chunk of positions.

A chunk is 8,192 positions, and a token sees those before it in its own.
"""

from dataclasses import replace

from kernels.experts.kinds import RoutingConfig, Scores
from qualification.model.config import (
    DenseConfig,
    ExpertsConfig,
    FeedForward,
    LayerConfig,
    ModelConfig,
    QKNorm,
    QueryScaling,
    SharedExpertConfig,
)
from qualification.model.families.family import ExpertLayout, ExpertNames, Family, TensorNames
from qualification.model.families.smollm3 import read_unrotated
from qualification.model.fields import Fields
from qualification.model.keys import family_keys
from qualification.model.shared import read_activation, read_like_llama, unscaled_ropes, without_rotation
from qualification.model.windows import read_num_layers

_EXPERTS = ExpertNames(
    "feed_forward.router",
    "feed_forward.experts",
    shared="feed_forward.shared_expert",
    layout=ExpertLayout.HALVES,
)
TENSORS = TensorNames(neighbours_are_pairs=True, feed_forward="feed_forward", experts=_EXPERTS)
_THETA = 500_000.0  # as its class has it
_KINDS, _CHUNKED, _FULL = "layer_types", "chunked_attention", "full_attention"
_CHUNK, _GROWS = "attention_chunk_size", "attn_temperature_tuning"


def read_config(fields: Fields) -> ModelConfig:
    has_bias = fields.flag("attention_bias", False)
    fields = fields.where_absent(num_key_value_heads=8)  # null is as many as heads
    model = read_like_llama(
        fields.or_else(head_dim=128, rope_theta=_THETA),
        "llama4_text",
        norm_eps=1e-5,
        rope=unscaled_ropes,
        attention_bias=has_bias,
        output_bias=has_bias,
        feed_forwards=_read_feed_forwards,
    )
    unrotated, has_norms, grows = read_unrotated(fields), fields.flag("use_qk_norm", True), _read_growth(fields)
    chunks = _read_chunks(fields, unrotated, model.longest_context)

    def changed(at: int, layer: LayerConfig) -> LayerConfig:
        attention = replace(layer.attention, chunk=chunks[at])
        if at in unrotated:
            return replace(layer, mixer=replace(attention, query_scaling=grows))
        norm = QKNorm.EACH_HEAD_UNWEIGHTED if has_norms else QKNorm.NONE
        return replace(layer, mixer=replace(attention, qk_norm=norm))

    layers = tuple(changed(at, layer) for at, layer in enumerate(model.layers))
    return without_rotation(replace(model, layers=layers), unrotated)


def _read_growth(fields: Fields) -> QueryScaling | None:
    """Return what queries grow by in layers that rotate nothing; older files write a number for true."""
    given = fields.given(_GROWS)
    if not (fields.flag(_GROWS, True) if given is None or isinstance(given, bool) else fields.count(_GROWS, 0)):
        return None
    return QueryScaling(fields.number("attn_scale", 0.1), fields.integer("floor_scale", 8192), first=1)


def _read_chunks(fields: Fields, unrotated: frozenset[int], longest: int) -> list[int | None]:
    """Return the positions of a chunk for each layer; None for one that sees all, as those that rotate nothing do."""
    chunk, num_layers = fields.integer_or_none(_CHUNK, 8192), read_num_layers(fields)
    is_chunked = [layer not in unrotated for layer in range(num_layers)]
    if fields.has(_KINDS):
        kinds = fields.choices(_KINDS, (_CHUNKED, _FULL), num_layers)
        if _CHUNKED in kinds and chunk is None:
            fields.refuse(_KINDS, f"all {_FULL} where {_CHUNK} is null")
        is_chunked = [kind == _CHUNKED for kind in kinds]
    hides = chunk is not None and chunk < longest  # else it hides nothing
    return [chunk if it and hides else None for it in is_chunked]


def _read_feed_forwards(fields: Fields) -> tuple[FeedForward, ...]:
    num_layers, step = read_num_layers(fields), fields.integer("interleave_moe_layer_step", 1)
    has_experts = frozenset(range(step - 1, num_layers, step))
    if fields.given("moe_layers") is not None:
        has_experts = fields.indices("moe_layers", num_layers)
    activation, width = read_activation(fields), fields.integer("intermediate_size", 8192)
    routing = RoutingConfig(fields.integer("num_local_experts", 16), 1, Scores.SIGMOID)
    experts = ExpertsConfig(width, routing, activation, weighs_inputs=True, shared=SharedExpertConfig(width))
    dense = DenseConfig(fields.integer("intermediate_size_mlp", 16_384), activation)
    return tuple(experts if layer in has_experts else dense for layer in range(num_layers))


KEYS = family_keys(
    f"attention_bias {_KINDS} {_CHUNK} {_GROWS} attn_scale floor_scale no_rope_layers no_rope_layer_interval "
    "use_qk_norm num_local_experts moe_layers interleave_moe_layer_step intermediate_size_mlp",
    without_effect="output_router_logits router_aux_loss_coef router_jitter_noise for_llm_compressor",
    refused={"num_experts_per_tok": (1, None)},  # several experts of a token would each read another input
)
LLAMA4_TEXT = Family("llama4_text", ("Llama4ForCausalLM",), read_config, KEYS, TENSORS)
