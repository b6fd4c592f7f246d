"""Step 3.5: heads gated by sigmoids, more of them in layers with a window, and experts that bound what they multiply.

Published files name fields as no other family does, and have lists with an entry for each layer and for those behind
the last one, which predict several tokens at once and are not computed. Transformers 5 saves the same by names of its
own; both are read. Sources: the published modeling file; Step3p7TextConfig of transformers 5.24.
"""

from dataclasses import replace
from functools import partial

from kernels.experts.kinds import Scores
from kernels.fused.activation_kind import Activation
from kernels.fused.capped_kind import CappedSilu
from kernels.fused.head_gate_kind import GateFunction
from qualification.model.config import (
    AttentionGate,
    DenseConfig,
    ExpertsConfig,
    FeedForward,
    ModelConfig,
    QKNorm,
    RopeConfig,
    RopeKind,
    SharedExpertConfig,
)
from qualification.model.families.family import ExpertLayout, ExpertNames, Family, TensorNames
from qualification.model.fields import Fields
from qualification.model.keys import family_keys
from qualification.model.mixtures import KINDS, read_mixtures_by_kind, read_routing
from qualification.model.rope import rope_of
from qualification.model.shared import read_activation, read_like_llama
from qualification.model.windows import Windows, read_num_layers, read_windows_of

TENSORS = TensorNames(
    experts=ExpertNames(
        router="moe.gate",
        experts="moe",
        shared="share_expert",
        correction="moe.router_bias",
        layout=ExpertLayout.STACKED,
    )
)
_THETA = 10_000.0
_FULL, _SLIDING = "full_attention", "sliding_attention"
_HEADS = "num_attention_heads_by_layer"  # made here
_EXPERTS, _SHARED = "swiglu_limits", "swiglu_limits_shared"
_OTHER_HEADS = "attention_other_setting"
_ROPE_KINDS = (RopeKind.PLAIN, RopeKind.LINEAR, RopeKind.LLAMA3, RopeKind.YARN)
# Published names, each with that of transformers 5.
_ALIASES = {
    "num_attention_groups": "num_key_value_heads",
    "moe_num_experts": "n_routed_experts",
    "num_local_experts": "n_routed_experts",
    "moe_top_k": "num_experts_per_tok",
    "share_expert_dims": "share_expert_dim",
    "num_mtp_layers": "num_nextn_predict_layers",
}


def read_config(fields: Fields) -> ModelConfig:
    fields = _by_layers(_renamed(fields))
    model = read_like_llama(
        fields.or_else(head_dim=128),
        "step3p5",
        norm_eps=1e-5,
        qk_norm=QKNorm.EACH_HEAD,
        windows=_read_windows,
        rope=partial(_read_rope, kind=_FULL),
        local_rope=partial(_read_rope, kind=_SLIDING),
        scale=lambda fields, head_dim: fields.number("query_pre_attn_scalar", head_dim) ** -0.5,
        heads=_HEADS,
        gate=AttentionGate(GateFunction.SIGMOID),
        feed_forwards=_read_feed_forwards,
    )
    return replace(model, zero_centred_norms=True)


def _renamed(fields: Fields) -> Fields:
    """Return fields by the names of transformers. Raises ModelConfigError where both names have other values."""
    for published, name in _ALIASES.items():
        value = fields.given(published)
        if value is None:
            continue
        if fields.has(name) and fields.given(name) != value:
            fields.refuse(published, f"{fields.given(name)!r}, as {name} says")
        fields = fields.changed(**{name: value})
    return fields


def _by_layers(fields: Fields) -> Fields:
    """Return fields whose lists have the model's layers alone, with the kind of each layer and its query heads."""
    num_layers = read_num_layers(fields)
    behind = fields.count("num_nextn_predict_layers", 0)
    for name in ("layer_types", KINDS, _EXPERTS, _SHARED, "rope_theta", "partial_rotary_factors"):
        value = fields.given(name)
        if isinstance(value, list) and len(value) == num_layers + behind:
            fields = fields.changed(**{name: value[:num_layers]})
    kinds = fields.choices("layer_types", (_FULL, _SLIDING), num_layers)
    if not fields.has(KINDS):
        fields = fields.changed(**{KINDS: _kinds(fields, num_layers, num_layers + behind)})
    own, sliding = fields.integer("num_attention_heads"), _sliding_heads(fields)
    return fields.changed(**{_HEADS: [sliding if kind == _SLIDING else own for kind in kinds]})


def _kinds(fields: Fields, num_layers: int, num_listed: int) -> list[str]:
    """Return the kind of each layer's feed-forward, of the numbers of those with experts: a list, or between commas."""
    name = "moe_layers_enum"
    given = fields.given(name)
    try:
        numbers = [int(it) for it in given.split(",")] if isinstance(given, str) else given
    except ValueError:
        numbers = None
    if not isinstance(numbers, list) or not all(type(it) is int and 0 <= it < num_listed for it in numbers):
        fields.refuse(name, f"numbers of layers below {num_listed} where {KINDS} is missing, such as '3,4,5'")
    return ["sparse" if layer in numbers else "dense" for layer in range(num_layers)]


def _sliding_heads(fields: Fields) -> int:
    """Return the query heads of layers with a window; all else of their heads must be as in the others."""
    own, other = fields.integer("num_attention_heads"), fields.section(_OTHER_HEADS)
    if fields.has("num_sliding_attention_heads") or other is None:
        return fields.integer("num_sliding_attention_heads", own)
    other.choice("attention_type", (_SLIDING,), _SLIDING)
    alike = {
        "num_attention_groups": fields.integer("num_key_value_heads", own),
        "head_dim": fields.integer("head_dim", 128),
        "true_head_dim": fields.integer("head_dim", 128),
    }
    for name, value in alike.items():
        if other.integer(name, value) != value:
            other.refuse(name, f"{value}, as in the other layers")
    return other.integer("num_attention_heads", own)


def _read_windows(fields: Fields) -> Windows:
    return read_windows_of(fields, fields.integer_or_none("sliding_window", None), lambda _: False)


def _read_rope(fields: Fields, head_dim: int, *, kind: str) -> RopeConfig:
    """Read the rotation of layers of a kind: of rope_parameters, or of lists by layer and a scaling of full ones."""
    by_kind = fields.section("rope_parameters")
    if by_kind is not None:
        by_kind.only(_FULL, _SLIDING)
    rope = (None if by_kind is None else by_kind.section(kind)) or Fields(_rope_of_lists(fields, kind), fields.source)
    theta = rope.number("rope_theta", _THETA)
    found = rope_of(fields, rope, _ROPE_KINDS, theta, head_dim=head_dim, is_partial=True)
    if (size := found.rotated_dims(head_dim)) % 2:
        rope.refuse("partial_rotary_factor", f"a share of head_dim ({head_dim}) that is whole pairs (it is {size})")
    return found


def _rope_of_lists(fields: Fields, kind: str) -> dict[str, object]:
    found: dict[str, object] = {}
    theta = fields.given("rope_theta")
    found["rope_theta"] = _of_kind(fields, "rope_theta", kind) if isinstance(theta, list) else theta
    if fields.has("partial_rotary_factors"):
        found["partial_rotary_factor"] = _of_kind(fields, "partial_rotary_factors", kind)
    scaling = fields.section("rope_scaling")
    if scaling is not None and kind == _FULL:
        if fields.given("yarn_only_types") != [_FULL]:
            fields.refuse("yarn_only_types", f"[{_FULL!r}], whose rotation is the one that is scaled")
        found |= {name: scaling.given(name) for name in scaling.names}
    return found


def _of_kind(fields: Fields, name: str, kind: str) -> float | None:
    """Return the number that all layers of a kind have in a list; None where there is no such layer."""
    kinds = fields.choices("layer_types", (_FULL, _SLIDING), read_num_layers(fields))
    values = {it for it, of in zip(fields.numbers(name, len(kinds)), kinds, strict=True) if of == kind}
    if len(values) > 1:
        fields.refuse(name, f"the same number for all layers of {kind}")
    return next(iter(values), None)


def _read_feed_forwards(fields: Fields) -> tuple[FeedForward, ...]:
    found = read_mixtures_by_kind(fields, _read_experts, num_dense_missing=0)
    of_experts, of_all = (_read_limits(fields, name, len(found)) for name in (_EXPERTS, _SHARED))
    return tuple(map(_bounded, found, of_experts, of_all))


def _bounded(fed: FeedForward, of_experts: float | None, of_all: float | None) -> FeedForward:
    """Return a layer's feed-forward with its bounds: of its experts, and of what all tokens visit."""
    own = Activation.SILU if of_all is None else CappedSilu(of_all)
    if isinstance(fed, DenseConfig):
        return replace(fed, activation=own)
    activation = Activation.SILU if of_experts is None else CappedSilu(of_experts)
    assert fed.shared is not None
    return replace(fed, activation=activation, shared=replace(fed.shared, activation=own))


def _read_limits(fields: Fields, name: str, num_layers: int) -> tuple[float | None, ...]:
    """Return the bound of each layer, None for none: a list of numbers, 0 and null for none, which may be missing."""
    values = fields.given(name)
    if values is None:
        return (None,) * num_layers
    if not isinstance(values, list) or len(values) != num_layers or not all(map(_is_limit, values)):
        fields.refuse(name, f"a list of {num_layers} numbers from 0 on, or null")
    return tuple(float(it) if it else None for it in values)


def _is_limit(value: object) -> bool:
    return value is None or (type(value) in (int, float) and 0 <= float(value) < float("inf"))  # type: ignore[arg-type]


def _read_experts(fields: Fields) -> ExpertsConfig:
    routing = read_routing(
        fields,
        "n_routed_experts",
        scores=Scores.SIGMOID,
        renormalizes=True,
        scale=fields.number("moe_router_scaling_factor", 1.0),
        num_experts_missing=288,
        num_active_missing=8,
    )
    shared = SharedExpertConfig(fields.integer("share_expert_dim", 1280))
    width = fields.integer("moe_intermediate_size", 1280)
    return ExpertsConfig(width, routing, read_activation(fields), has_correction_bias=True, shared=shared)


KEYS = family_keys(
    f"{' '.join((*_ALIASES, *_ALIASES.values()))} {KINDS} {_EXPERTS} {_SHARED} {_OTHER_HEADS} layer_types "
    "sliding_window num_sliding_attention_heads query_pre_attn_scalar partial_rotary_factors yarn_only_types "
    "moe_layers_enum moe_intermediate_size share_expert_dim moe_router_scaling_factor",
    # Layers behind the last one; what the router's product is computed in, which changes roundings alone; what the
    # lists by layer say again.
    without_effect="mtp_layer_types mtp_mlp_layer_types need_fp32_gate max_seq_len per_layer_config use_moe "
    "moe_every_n_layer moe_layer_offset output_router_logits",
    refused={
        "attention_bias": (False, None),
        "mlp_bias": (False, None),
        "sink": (False, None),
        "att_impl_type": ("GQA", None),
        "use_qk_norm": (True, None),
        "use_head_wise_attn_gate": (True, None),
        "use_moe_router_bias": (True, None),
        "moe_router_activation": ("sigmoid", None),
        "norm_expert_weight": (True, None),
        "zero_centered": (True, None),
        "use_rope_layers": ([], None),
        "partial_rotary_factor": (None,),
    },
)
STEP3P5 = Family("step3p5", ("Step3p5ForCausalLM",), read_config, KEYS, TENSORS, has_more_layers=True)
