"""Gemma 4, text: norms before and after, and layers of two kinds, with heads and a rotation of their own.

Layers with a window have narrow heads; those without have wide ones, whose values may be their keys, and rotate a part
of each head. In the small models the last layers read the keys of earlier ones, and each token has an embedding for
each layer; one of the large ones has experts beside its dense feed-forward.
"""

import math
from dataclasses import replace
from functools import partial

from kernels.fused.activation_kind import Activation
from qualification.model.config import (
    AttentionConfig,
    DenseConfig,
    ExpertsConfig,
    FeedForward,
    ModelConfig,
    NormsConfig,
    PerLayerConfig,
    QKNorm,
    RopeConfig,
    RopeKind,
    SharedExpertConfig,
)
from qualification.model.families.family import ExpertLayout, ExpertNames, Family, TensorNames
from qualification.model.fields import Fields
from qualification.model.keys import family_keys
from qualification.model.mixtures import read_routing
from qualification.model.rope import rope_of
from qualification.model.shared import read_activation, read_like_llama
from qualification.model.windows import Windows, read_num_layers

_WINDOWED, _FULL = "sliding_attention", "full_attention"
_PATTERN = 6  # one full layer after five with a window
_THETA, _WINDOWED_THETA, _ROTATED_SHARE = 1_000_000.0, 10_000.0, 0.25
_ACTIVATIONS = (Activation.GELU_TANH, Activation.GELU, Activation.SILU)
# What a config.json leaves out, as the class has it.
_LEFT_OUT: dict[str, int] = {
    "vocab_size": 262_144,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 30,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "max_position_embeddings": 131_072,
    "sliding_window": 512,
}


def read_config(fields: Fields) -> ModelConfig:
    fields = fields.or_else(**_LEFT_OUT)
    return replace(_read_layers(fields, "gemma4_text"), per_layer=_read_per_layer(fields))


def read_unified(fields: Fields) -> ModelConfig:
    """Read the text part of models without towers, whose class has no embeddings for each layer and no experts."""
    given = {**_LEFT_OUT, "max_position_embeddings": 262_144, "sliding_window": 1024}
    return _read_layers(fields.or_else(**given), "gemma4_unified_text")


def _read_layers(fields: Fields, family: str) -> ModelConfig:
    has_bias = fields.flag("attention_bias", False)
    kinds = _read_kinds(fields)
    model = read_like_llama(
        fields,
        family,
        norms=NormsConfig(before=True, after=True),
        qk_norm=QKNorm.EACH_HEAD,
        windows=partial(_read_windows, kinds=kinds),
        rope=partial(_read_rope, kind=_FULL),
        local_rope=partial(_read_rope, kind=_WINDOWED),
        scale=lambda _, __: 1.0,
        attention_bias=has_bias,
        output_bias=has_bias,
        feed_forwards=_read_feed_forwards,
        tie_embeddings=True,
    )
    attentions = _attentions(fields, model, kinds)
    return replace(
        model,
        layers=tuple(replace(layer, mixer=mixer) for layer, mixer in zip(model.layers, attentions, strict=True)),
        embedding_scale=math.sqrt(model.hidden_size),
        rounds_embedding_scale=True,
        logits_softcap=fields.number_or_none("final_logit_softcapping", None),
        has_layer_scales=True,
    )


def _read_kinds(fields: Fields) -> tuple[str, ...]:
    """Return the kind of each layer; the last is a full one, whatever is given, as in transformers."""
    num_layers = read_num_layers(fields)
    if fields.has("layer_types"):
        kinds = fields.choices("layer_types", (_WINDOWED, _FULL), num_layers)
    else:
        kinds = tuple(_WINDOWED if (layer + 1) % _PATTERN else _FULL for layer in range(num_layers))
    return (*kinds[:-1], _FULL)


def _read_windows(fields: Fields, *, kinds: tuple[str, ...]) -> Windows:
    window = fields.integer("sliding_window")
    return tuple(window if kind == _WINDOWED else None for kind in kinds)


def _read_rope(fields: Fields, head_dim: int, *, kind: str) -> RopeConfig:
    """Read rope_parameters by the kind of layers. A plain rotation is of whole heads."""
    by_kind = fields.section("rope_parameters")
    given: dict[str, object] = {"rope_theta": _WINDOWED_THETA}
    if kind == _FULL:
        proportional = RopeKind.PROPORTIONAL.value
        given = {"rope_type": proportional, "partial_rotary_factor": _ROTATED_SHARE, "rope_theta": _THETA}
    rope = Fields(given, fields.source) if by_kind is None else by_kind.section(kind)
    if rope is None:
        fields.refuse("rope_parameters", f"an object with {kind}")
    is_partial = rope.given("rope_type") == RopeKind.PROPORTIONAL.value
    kinds = (RopeKind.PLAIN, RopeKind.PROPORTIONAL)
    return rope_of(fields, rope, kinds, rope.number("rope_theta"), head_dim=head_dim, is_partial=is_partial)


def _num_borrowing(fields: Fields) -> int:
    """Return how many of the last layers have no keys of their own."""
    return fields.count("num_kv_shared_layers", 0)


def _attentions(fields: Fields, model: ModelConfig, kinds: tuple[str, ...]) -> list[AttentionConfig]:
    """Return the attention of each layer: its heads, and whose keys and values it reads. Raises ModelConfigError."""
    first = len(kinds) - _num_borrowing(fields)
    if first < 0 or any(kind not in kinds[:first] for kind in kinds[first:]):
        fields.refuse("num_kv_shared_layers", "so few that a layer of each kind has keys of its own")
    values_are_keys = fields.flag("attention_k_eq_v", False)
    found: list[AttentionConfig] = []
    for index, (kind, layer) in enumerate(zip(kinds, model.layers, strict=True)):
        heads = _read_heads(fields, index, kind, has_own_count=values_are_keys)
        lender = None if index < first else first - 1 - kinds[:first][::-1].index(kind)
        if lender is not None and heads != (found[lender].head_dim, found[lender].num_kv_heads):
            fields.refuse("per_layer_config", f"such that layer {index} has the heads of {lender}, whose keys it reads")
        found.append(
            replace(
                layer.attention,
                head_dim=heads[0],
                num_kv_heads=heads[1],
                norms_values=True,
                values_are_keys=values_are_keys and kind == _FULL,
                reads_keys_of=lender,
            )
        )
    return found


def _read_heads(fields: Fields, index: int, kind: str, *, has_own_count: bool) -> tuple[int, int]:
    """Return a layer's head dim and KV heads: by per_layer_config, as transformers saves it, or by the published keys.

    has_own_count  whether full layers may have a number of KV heads of their own
    """
    head_dim, num_kv_heads = fields.integer("head_dim"), fields.integer("num_key_value_heads")
    by_layer = fields.section("per_layer_config")
    place, names = fields, ("global_head_dim", "num_global_key_value_heads")
    if by_layer is not None:
        place, names = by_layer.section(str(index)) or Fields({}, by_layer.source), ("head_dim", "num_key_value_heads")
        place.only(*names)
        head_dim, num_kv_heads = place.integer(names[0], head_dim), place.integer(names[1], num_kv_heads)
    elif kind == _FULL:
        head_dim = fields.integer(names[0], 512)
        num_kv_heads = fields.integer(names[1], num_kv_heads) if has_own_count else num_kv_heads
    num_heads = fields.integer("num_attention_heads")
    if num_heads % num_kv_heads:
        place.refuse(names[1], f"a divisor of num_attention_heads ({num_heads})")
    if head_dim % 2:
        place.refuse(names[0], f"even for the rotary embedding (it is {head_dim})")
    return head_dim, num_kv_heads


def _read_feed_forwards(fields: Fields) -> tuple[FeedForward, ...]:
    """Read one a layer: dense, where asked for twice as wide in layers that read others' keys, or beside experts."""
    activation = read_activation(fields, "hidden_activation", _ACTIVATIONS)
    num_layers, width = read_num_layers(fields), fields.integer("intermediate_size")
    first_wide = num_layers - _num_borrowing(fields) if fields.flag("use_double_wide_mlp", False) else num_layers
    widths = [width if layer < first_wide else 2 * width for layer in range(num_layers)]
    if not fields.flag("enable_moe_block", False):
        return tuple(DenseConfig(it, activation) for it in widths)
    routing = read_routing(fields, "num_experts", renormalizes=True, num_active="top_k_experts")
    of_expert = fields.integer("moe_intermediate_size")
    return tuple(
        ExpertsConfig(
            of_expert, routing, activation, shared=SharedExpertConfig(it), has_expert_scales=True, norms_apart=True
        )
        for it in widths
    )


def _read_per_layer(fields: Fields) -> PerLayerConfig | None:
    width = fields.count("hidden_size_per_layer_input", 256)
    if not width:
        return None
    vocab_size = fields.integer("vocab_size")
    num_embedded = fields.integer("vocab_size_per_layer_input", 262_144)
    if num_embedded < vocab_size:
        fields.refuse("vocab_size_per_layer_input", f"vocab_size ({vocab_size}) at least")
    activation = read_activation(fields, "hidden_activation", _ACTIVATIONS)
    return PerLayerConfig(width, num_embedded, activation, fields.count("pad_token_id", 0))


_READ = (
    "attention_bias hidden_activation layer_types sliding_window final_logit_softcapping global_head_dim "
    "num_global_key_value_heads per_layer_config attention_k_eq_v num_kv_shared_layers use_double_wide_mlp"
)
_OF_SMALL = "hidden_size_per_layer_input vocab_size_per_layer_input pad_token_id"
_OF_EXPERTS = "enable_moe_block num_experts top_k_experts moe_intermediate_size"
_REFUSED: dict[str, tuple[object, ...]] = {
    # Its class reads rotations by the kind of layer alone.
    "rope_theta": (None,),
    "rope_scaling": (None,),
    "partial_rotary_factor": (None,),
    "use_bidirectional_attention": (None, "vision"),  # of images' tokens, of which a text has none
}
TENSORS = TensorNames(
    before_feed_forward="pre_feedforward_layernorm",
    experts=ExpertNames("router.proj", "experts", shared="mlp", layout=ExpertLayout.HALVES),
)
GEMMA4 = Family(
    "gemma4_text",
    ("Gemma4ForCausalLM",),
    read_config,
    family_keys(f"{_READ} {_OF_SMALL} {_OF_EXPERTS}", without_effect="hidden_act", refused=_REFUSED),
    TENSORS,
)
GEMMA4_UNIFIED = Family(
    "gemma4_unified_text",
    ("Gemma4UnifiedForCausalLM",),
    read_unified,
    family_keys(
        _READ,
        without_effect="hidden_act num_experts top_k_experts moe_intermediate_size vocab_size_per_layer_input",
        refused={**_REFUSED, "enable_moe_block": (False, None), "hidden_size_per_layer_input": (0, None)},
    ),
    TENSORS,
)
