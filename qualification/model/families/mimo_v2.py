"""MiMo V2: values narrower than keys; under windows more KV heads, sinks, and another rotation; experts by sigmoids.

Published files name fields as no other family does. Transformers 5 saves those of `mimo_v2_flash` by names of its own;
both are read. The layers that predict several tokens at once are not, nor what sees and hears in MiMo V2.5.

MiMo V2.5's files have queries, keys and values as one tensor (`fused_qkv`): as many shards as layers without a window
have KV heads, of layers with one too, each quantised by itself, in blocks of 128 of its rows, the last one cut off. In
which order they lie in files of 16 bits, or of another format, is not known, and such files are refused.
Sources: MiMoV2FlashConfig of transformers 5.24; of `mimo_v2`, which it does not know, the published modeling file, and
for the shards SGLang's loader (`mimo_v2.py`), which vLLM's agrees with where each shard has one KV head.
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
_OF_ROTATION = "rope_theta", "partial_rotary_factor"
_LAYOUT, _FUSED = "attention_projection_layout", "fused_qkv"
_BLOCK = 128  # rows and columns of a weight of 8 bits that share a scale


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
    if own is _LATER:
        fields = _one_rotation(fields)
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
    shards = _read_shards(fields, model.attentions[0], num_heads, num_kv_heads)

    def changed(layer: LayerConfig, kind: str) -> LayerConfig:
        attention = replace(layer.attention, value_dim=value_dim, value_scale=scale, qkv_shards=shards)
        if kind == _SLIDING:
            attention = replace(attention, num_heads=num_heads, num_kv_heads=num_kv_heads, has_sinks=True)
        return replace(layer, mixer=attention)

    return replace(model, layers=tuple(map(changed, model.layers, kinds)))


def _read_shards(fields: Fields, full: AttentionConfig, num_heads: int, num_kv_heads: int) -> int | None:
    """Return the shards in which queries, keys and values are one tensor; None where they are tensors apart.

    num_heads, num_kv_heads   of layers with a window; full: a layer without one
    """
    if fields.choice(_LAYOUT, ("split", _FUSED), "split") != _FUSED:
        return None
    given = fields.section("quantization_config")
    if given is not None:
        given.absent(
            "store_dtype", "experts of another format within files of fp8, as MiMo V2.6 has them, are not read"
        )
    is_in_blocks = given is not None and given.given("quant_method") == "fp8"
    if given is None or not is_in_blocks or given.given("weight_block_size") != [_BLOCK, _BLOCK]:
        fields.refuse(_LAYOUT, f"absent or split, but of weights of fp8 in blocks of {_BLOCK} by {_BLOCK}")
    if full.has_bias:
        fields.refuse("attention_bias", f"absent or false beside {_LAYOUT} {_FUSED}")
    shards = full.num_kv_heads
    for name, count in (("num_attention_heads", num_heads), ("num_key_value_heads", num_kv_heads)):
        if count % shards:
            fields.refuse(f"swa_{name}", f"a multiple of num_key_value_heads ({shards}) beside {_LAYOUT} {_FUSED}")
    return shards


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


def _one_rotation(fields: Fields) -> Fields:
    """Return fields without `rope_parameters` that are of layers without a window and repeat what stands beside them.

    Raises ModelConfigError where they say otherwise.
    """
    given = fields.section(_ROPES)
    if given is None or given.is_empty or given.has(_FULL) or given.has(_SLIDING):
        return fields
    given.only("rope_type", "type", *_OF_ROTATION)
    given.choice("rope_type" if given.has("rope_type") else "type", ("default",), "default")
    found = {name: given.number(name) for name in _OF_ROTATION if given.has(name)}
    for name, value in found.items():
        if fields.number(name, value) != value:
            given.refuse(name, f"{fields.number(name)}, as beside {_ROPES}")
    return fields.changed(**{_ROPES: None}).or_else(**found)


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
