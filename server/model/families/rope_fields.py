"""The rotary embedding of a config.json, in transformers' old form and in that of its version 5."""

import math

from server.model.config import RopeConfig, RopeKind
from server.model.families.fields import Fields


def read_rope(fields: Fields, kinds: tuple[RopeKind, ...] = tuple(RopeKind)) -> RopeConfig:
    """Old: `rope_theta` and `rope_scaling`. New: both in `rope_parameters`. Raises ModelError for what we lack.

    kinds   those that the family knows
    """
    rope = fields.section("rope_scaling") or fields.section("rope_parameters") or Fields({}, fields.source)
    for place in (fields, rope):
        if place.number("partial_rotary_factor", 1.0) != 1.0:
            place.refuse("partial_rotary_factor", "absent or 1 (partial rotation is not supported)")
    theta = rope.number("rope_theta", fields.number("rope_theta", 10_000.0))
    supported = tuple(kind.value for kind in kinds)
    kind = RopeKind(rope.choice("rope_type" if rope.has("rope_type") else "type", supported, RopeKind.PLAIN.value))
    if kind is RopeKind.PLAIN:
        return RopeConfig(theta)
    if kind is RopeKind.LINEAR:
        return RopeConfig(theta, kind, rope.number("factor"))
    max_position = fields.integer("max_position_embeddings")
    original = fields.integer(  # the field beside the object wins, as in transformers
        "original_max_position_embeddings", rope.integer("original_max_position_embeddings", max_position)
    )
    if kind is RopeKind.LLAMA3:
        return RopeConfig(
            theta,
            kind,
            rope.number("factor"),
            original,
            low_freq_factor=rope.number("low_freq_factor"),
            high_freq_factor=rope.number("high_freq_factor"),
        )
    factor = rope.number("factor", max_position / original)
    return RopeConfig(
        theta,
        kind,
        factor,
        original,
        beta_fast=rope.number("beta_fast", 32.0),
        beta_slow=rope.number("beta_slow", 1.0),
        truncate=rope.flag("truncate", True),
        attention_factor=_yarn_attention_factor(rope, factor),
    )


def _yarn_attention_factor(rope: Fields, factor: float) -> float:
    """Given, or by YaRN's rule of thumb (Peng et al. 2023, section 3.4), or DeepSeek's ratio of two such rules."""

    def rule(weight: float = 1.0) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    if rope.has("attention_factor"):
        return rope.number("attention_factor")
    if rope.has("mscale") and rope.has("mscale_all_dim"):
        return rule(rope.number("mscale")) / rule(rope.number("mscale_all_dim"))
    return rule()
