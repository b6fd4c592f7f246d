"""Falcon-H1: attention and Mamba2 side by side in each layer, which add to one residual, and multipliers of all parts.

What multiplies linear products is multiplied behind them: that of what attention reads scales its scores by its square
and its result; that of keys scales the scores.
"""

import math
from dataclasses import replace

from qualification.model.config import DenseConfig, LayerConfig, ModelConfig
from qualification.model.families.bamba import REFUSED, TENSORS
from qualification.model.families.family import Family
from qualification.model.families.granitemoehybrid import MIXER, read_mixer
from qualification.model.families.nemotron_h import read_steps
from qualification.model.fields import Fields
from qualification.model.gated_delta import GatedDeltaConfig, StateSpaceRule
from qualification.model.keys import family_keys
from qualification.model.shared import plain_ropes, read_dense, read_like_llama

_IN, _OUT, _OF_KEYS = "attention_in_multiplier", "attention_out_multiplier", "key_multiplier"
_SPACE_IN, _SPACE_OUT, _OF_PARTS = "ssm_in_multiplier", "ssm_out_multiplier", "ssm_multipliers"
_OF_FEED_FORWARD, _EMBEDDING, _HEAD = "mlp_multipliers", "embedding_multiplier", "lm_head_multiplier"
_VALUES, _NORMS, _NORMS_FIRST = "mamba_d_ssm", "mamba_rms_norm", "mamba_norm_before_gate"
# As its class has them where the fields are missing.
_MISSING: dict[str, object] = {
    "vocab_size": 128_000,
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "max_position_embeddings": 8192,
    "intermediate_size": 14_336,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def read_config(fields: Fields) -> ModelConfig:
    fields = fields.or_else(**_MISSING).where_absent(num_key_value_heads=8, **{_VALUES: 1024})
    has_bias, read_scale = fields.flag("attention_bias", False), fields.number(_IN, 1.0)
    if has_bias and read_scale != 1:
        fields.refuse(_IN, "1, or missing, where attention_bias adds to products behind it")
    model = read_like_llama(
        fields,
        "falcon_h1",
        norm_eps=1e-5,
        rope=plain_ropes,
        scale=lambda it, head_dim: read_scale**2 * it.number(_OF_KEYS, 1.0) / math.sqrt(head_dim),
        attention_bias=has_bias,
        output_bias=has_bias,
        feed_forward=_read_feed_forward,
    )
    beside, output_scale = _read_space(fields), read_scale * fields.number(_OUT, 1.0)

    def layer(whole: LayerConfig) -> LayerConfig:
        return replace(whole, mixer=replace(whole.attention, output_scale=output_scale), beside=beside)

    return replace(
        model,
        layers=tuple(map(layer, model.layers)),
        embedding_scale=fields.number(_EMBEDDING, 1.0),
        logits_divisor=1 / fields.number(_HEAD, 1.0),
    )


def _read_feed_forward(fields: Fields) -> DenseConfig:
    of_gate, behind = _numbers(fields, _OF_FEED_FORWARD, 2)
    dense = read_dense(fields, has_bias=fields.flag("mlp_bias", False))
    return replace(dense, gate_scale=of_gate, output_scale=behind)


def _read_space(fields: Fields) -> GatedDeltaConfig:
    norms = fields.flag(_NORMS, False)
    if norms and fields.flag(_NORMS_FIRST, True):
        fields.refuse(_NORMS_FIRST, f"false where {_NORMS} is true: results are normed behind their gates alone")
    of_all = fields.number(_SPACE_IN, 1.0)
    gates, x, b, c, steps = (of_all * it for it in _numbers(fields, _OF_PARTS, 5))
    rule = StateSpaceRule(*read_steps(fields), norms, (c, b, x, gates, steps))
    return read_mixer(fields, fields.integer_or_none(_VALUES, None), rule, output_scale=fields.number(_SPACE_OUT, 1.0))


def _numbers(fields: Fields, name: str, count: int) -> tuple[float, ...]:
    return fields.numbers(name, count) if fields.has(name) else (1.0,) * count


KEYS = family_keys(
    f"attention_bias mlp_bias {_IN} {_OUT} {_OF_KEYS} {_SPACE_IN} {_SPACE_OUT} {_OF_PARTS} {_OF_FEED_FORWARD} "
    f"{_EMBEDDING} {_HEAD} {_VALUES} {_NORMS} {_NORMS_FIRST} {MIXER}",
    without_effect="num_logits_to_keep mamba_chunk_size mamba_use_mlp mlp_expansion_factor",
    refused={
        **REFUSED,
        "projectors_bias": (False, None),
        # What is beside attention is listed by no published file in a way of its own.
        "quantization_config": (None,),
    },
)
FALCON_H1 = Family("falcon_h1", ("FalconH1ForCausalLM",), read_config, KEYS, TENSORS)
