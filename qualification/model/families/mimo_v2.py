"""MiMo V2: values narrower than keys; under windows more KV heads, sinks, and another rotation; experts by sigmoids.

Published files name fields as no other family does. Transformers 5 saves those of `mimo_v2_flash` by names of its own;
both are read. The layers that predict several tokens at once are not, nor what sees and hears in MiMo V2.5.
Sources: MiMoV2FlashConfig of transformers 5.24; of `mimo_v2`, which it does not know, the published modeling file.
"""

from dataclasses import dataclass, replace
from functools import partial

from kernels.experts.kinds import Scores
from qualification.model.config import AttentionConfig, ExpertsConfig, LayerConfig, ModelConfig, RopeConfig
from qualification.model.families.family import ExpertNames, Family, TensorNames
from qualification.model.fields import Fields
from qualification.model.keys import family_keys
from qualification.model.mixtures import KINDS, read_deepseek_experts, read_mixtures_by_kind
from qualification.model.rope import read_full_rope, read_windowed_rope
from qualification.model.shared import read_like_llama
from qualification.model.windows import Windows, read_num_layers, read_windows_of

TENSORS = TensorNames(sinks="self_attn.attention_sink_bias", experts=ExpertNames(router_is_plain=True))
_FULL, _SLIDING = "full_attention", "sliding_attention"
_PERIOD = 6  # layers, of which the last has no window; nor has the first of all
_SHARE, _THETA, _LOCAL_THETA = 0.334, 5_000_000.0, 10_000.0
_ROPES = "rope_parameters"
_LAYOUT = "attention_projection_layout"


@dataclass(frozen=True, slots=True)
class _Class:
    """One of the two classes, by what it has where fields are missing.

    window        tokens that a token sees, itself included
    group         KV heads under a window, for each of the others
    value_scale   factor of values
    """

    family: str
    window: int | None
    group: int
    value_scale: float


_FLASH = _Class("mimo_v2_flash", 129, 2, 0.707)
_LATER = _Class("mimo_v2", None, 1, 1.0)


def read_config(fields: Fields, own: _Class) -> ModelConfig:
    if fields.given(_LAYOUT) not in (None, "split"):
        fields.refuse(_LAYOUT, "absent or split: serve a checkpoint whose queries, keys and values are tensors apart")
    fields = _renamed(fields).or_else(head_dim=192, v_head_dim=128, partial_rotary_factor=_SHARE)
    model = read_like_llama(
        fields,
        own.family,
        norm_eps=1e-5,
        windows=partial(_read_windows, own=own),
        rope=_read_rope,
        local_rope=_read_local_rope,
        attention_bias=fields.flag("attention_bias", False),
        feed_forwards=partial(read_mixtures_by_kind, read_experts=_read_experts, num_dense_missing=1),
    )
    value_dim = fields.integer("v_head_dim", most=model.attentions[0].head_dim)
    scale = fields.number_or_none("attention_value_scale", own.value_scale) or 1.0
    for name, value in (("swa_head_dim", model.attentions[0].head_dim), ("swa_v_head_dim", value_dim)):
        if fields.integer(name, value) != value:
            fields.refuse(name, f"{value}, as in layers without a window")
    kinds = fields.choices("layer_types", (_FULL, _SLIDING), read_num_layers(fields))
    num_heads, num_kv_heads = _local_heads(fields, model.attentions[0], own)

    def changed(layer: LayerConfig, kind: str) -> LayerConfig:
        attention = replace(layer.attention, value_dim=value_dim, value_scale=scale)
        if kind == _SLIDING:
            attention = replace(attention, num_heads=num_heads, num_kv_heads=num_kv_heads, has_sinks=True)
        return replace(layer, mixer=attention)

    return replace(model, layers=tuple(map(changed, model.layers, kinds)))


def _renamed(fields: Fields) -> Fields:
    """Return fields by the names of transformers. Raises ModelConfigError where both names have other values."""
    num_layers = read_num_layers(fields)
    kinds = [_FULL if layer == 0 or not (layer + 1) % _PERIOD else _SLIDING for layer in range(num_layers)]
    found: dict[str, object] = {"layer_types": kinds}
    lists = (("hybrid_layer_pattern", "layer_types", (_FULL, _SLIDING)), ("moe_layer_freq", KINDS, ("dense", "sparse")))
    for published, name, words in lists:
        given = fields.given(published)
        if given is None:
            continue
        if not isinstance(given, list) or len(given) != num_layers or not all(it in (0, 1) for it in given):
            fields.refuse(published, f"a list of {num_layers} of 0 and 1")
        found[name] = [words[int(it)] for it in given]
        if fields.has(name) and fields.given(name) != found[name]:
            fields.refuse(published, f"what {name} says")
    if fields.has("layernorm_epsilon"):
        found["rms_norm_eps"] = fields.number("layernorm_epsilon")
        if fields.number("rms_norm_eps", fields.number("layernorm_epsilon")) != found["rms_norm_eps"]:
            fields.refuse("layernorm_epsilon", "what rms_norm_eps says")
    return fields.or_else(**found)


def _read_windows(fields: Fields, own: _Class) -> Windows:
    """Read the window; of the older class's files `sliding_window_size` counts tokens before the own one, and wins."""
    window = fields.integer_or_none("sliding_window", own.window)
    if own is _FLASH and fields.has("sliding_window_size"):
        window = fields.integer("sliding_window_size") + 1
    return read_windows_of(fields, window, lambda _: False)


def _local_heads(fields: Fields, attention: AttentionConfig, own: _Class) -> tuple[int, int]:
    """Return the query heads and the KV heads of layers with a window."""
    num_heads = fields.integer("swa_num_attention_heads", attention.num_heads)
    num_kv_heads = fields.integer("swa_num_key_value_heads", own.group * attention.num_kv_heads)
    if num_heads % num_kv_heads:
        fields.refuse("swa_num_key_value_heads", f"a divisor of {num_heads} query heads (it is {num_kv_heads})")
    return num_heads, num_kv_heads


def _read_rope(fields: Fields, head_dim: int) -> RopeConfig:
    return read_full_rope(_plain_scaling(fields), head_dim, theta=_THETA, is_partial=True)


def _read_local_rope(fields: Fields, head_dim: int) -> RopeConfig:
    theta = fields.number("swa_rope_theta", _LOCAL_THETA)
    return read_windowed_rope(_plain_scaling(fields), head_dim, theta=theta, is_partial=True)


def _plain_scaling(fields: Fields) -> Fields:
    """Return fields without a scaling, which may say that there is none. Raises ModelConfigError for another."""
    scaling, by_kind = fields.section("rope_scaling"), fields.section(_ROPES)
    if by_kind is not None:
        by_kind.only(_FULL, _SLIDING)
    if scaling is not None and not scaling.is_empty:
        scaling.only("rope_type", "type")
        scaling.choice("rope_type" if scaling.has("rope_type") else "type", ("default",), "default")
    return fields.changed(rope_scaling=None)


def _read_experts(fields: Fields) -> ExpertsConfig:
    return read_deepseek_experts(fields, scores=Scores.SIGMOID, width=2048, num_shared=0, num_experts=256, num_active=8)


KEYS = family_keys(
    f"attention_bias sliding_window sliding_window_size layer_types hybrid_layer_pattern {KINDS} moe_layer_freq "
    f"{_LAYOUT} v_head_dim swa_head_dim swa_v_head_dim swa_num_attention_heads swa_num_key_value_heads swa_rope_theta "
    "attention_value_scale layernorm_epsilon moe_intermediate_size n_group topk_group n_routed_experts norm_topk_prob "
    "num_experts_per_tok routed_scaling_factor",
    without_effect="output_router_logits attention_chunk_size",
    # What its class does whatever these say, and what it does not know.
    refused={
        "n_shared_experts": (None, 0),
        "scoring_func": ("sigmoid", None),
        "topk_method": ("noaux_tc", None),
        "add_swa_attention_sink_bias": (True,),
        "add_full_attention_sink_bias": (False, None),
        "hybrid_block_size": (None,),
    },
)
_NOT_READ = ("model.mtp.", "visual.", "audio_encoder.", "speech_embeddings.")
MIMO_V2_FLASH, MIMO_V2 = (
    Family(own.family, (architecture,), partial(read_config, own=own), KEYS, TENSORS, not_read=_NOT_READ)
    for own, architecture in ((_FLASH, "MiMoV2FlashForCausalLM"), (_LATER, "MiMoV2ForCausalLM"))
)
