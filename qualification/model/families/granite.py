"""Granite 3, dense: a Llama with four multipliers: of embeddings, scores, what layers add, and (a divisor) logits."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

from qualification.model.config import FeedForward, ModelConfig, RopeConfig
from qualification.model.families.family import Family
from qualification.model.fields import Fields
from qualification.model.keys import family_keys
from qualification.model.shared import read_dense, read_like_llama
from qualification.model.windows import Windows, no_windows

MULTIPLIERS = "attention_multiplier embedding_multiplier residual_multiplier logits_scaling"


def read_config(fields: Fields) -> ModelConfig:
    return read_granite(fields, "granite", partial(read_dense, has_bias=fields.flag("mlp_bias", False)))


def read_granite(
    fields: Fields,
    family: str,
    feed_forward: Callable[[Fields], FeedForward],
    rope: Callable[[Fields, int], RopeConfig] | None = None,
    *,
    norm_eps: float = 1e-6,
    windows: Callable[[Fields], Windows] = no_windows,
    has_sinks: bool = False,
) -> ModelConfig:
    """Read a Granite with another feed-forward, and perhaps rotation, windows or sinks. Raises ModelConfigError."""
    has_bias = fields.flag("attention_bias", False)
    model = read_like_llama(
        fields,
        family,
        scale=lambda it, _: it.number("attention_multiplier", 1.0),
        attention_bias=has_bias,
        output_bias=has_bias,
        feed_forward=feed_forward,
        rope=rope,
        norm_eps=norm_eps,
        windows=windows,
        has_sinks=has_sinks,
    )
    return replace(
        model,
        embedding_scale=fields.number("embedding_multiplier", 1.0),
        residual_scale=fields.number("residual_multiplier", 1.0),
        logits_divisor=fields.number("logits_scaling", 1.0),
    )


KEYS = family_keys(f"attention_bias mlp_bias {MULTIPLIERS}")
GRANITE = Family("granite", ("GraniteForCausalLM",), read_config, KEYS)
