"""The rotary embedding of a config.json, in transformers' old form and in that of its version 5."""

import math

from qualification.model.config import RopeConfig, RopeKind
from qualification.model.fields import Fields

THETA = 10_000.0  # where rope_theta is missing
_KINDS = tuple(kind for kind in RopeKind if kind not in (RopeKind.NONE, RopeKind.PROPORTIONAL))
_STRETCHED = (RopeKind.PLAIN, RopeKind.LINEAR, RopeKind.LLAMA3, RopeKind.YARN)


def read_rope(
    fields: Fields,
    kinds: tuple[RopeKind, ...] = _KINDS,
    *,
    head_dim: int,
    aliases: tuple[str, ...] = (),
    plain_aliases: tuple[str, ...] = (),
    is_partial: bool = False,
) -> RopeConfig:
    """Old: `rope_theta` and `rope_scaling`. New: both in `rope_parameters`. Raises ModelConfigError.

    kinds       the rotations that the family can have; others are refused by name
    aliases     other names of LongRoPE that the family's files use; plain_aliases: of the plain rotation
    is_partial  whether the family may rotate a part of each head only
    """
    rope = rope_section(fields) or Fields({}, fields.source)
    theta = rope.number("rope_theta", fields.number("rope_theta", THETA))
    return rope_of(
        fields,
        rope,
        kinds,
        theta,
        head_dim=head_dim,
        aliases=aliases,
        plain_aliases=plain_aliases,
        is_partial=is_partial,
    )


def rope_section(fields: Fields) -> Fields | None:
    """Return rope_scaling, or rope_parameters where that is missing or empty; None where both are."""
    sections = (fields.section(name) for name in ("rope_scaling", "rope_parameters"))
    return next((section for section in sections if section is not None and not section.is_empty), None)


def rope_of(
    fields: Fields,
    rope: Fields,
    kinds: tuple[RopeKind, ...],
    theta: float,
    *,
    head_dim: int,
    aliases: tuple[str, ...] = (),
    plain_aliases: tuple[str, ...] = (),
    is_partial: bool = False,
) -> RopeConfig:
    """The rotation of one section of config.json, or of a model with one for all layers. Raises ModelConfigError."""
    share = _rotated_share(fields, rope, is_partial)
    supported = (*(kind.value for kind in kinds), *aliases, *plain_aliases)
    found = rope.choice("rope_type" if rope.has("rope_type") else "type", supported, RopeKind.PLAIN.value)
    if found in plain_aliases:
        found = RopeKind.PLAIN.value
    kind = RopeKind.LONGROPE if found in aliases else RopeKind(found)
    if kind is RopeKind.PLAIN:
        return RopeConfig(theta, rotated_share=share)
    if kind is RopeKind.LINEAR:
        return RopeConfig(theta, kind, rope.number("factor"), rotated_share=share)
    if kind is RopeKind.PROPORTIONAL:
        return RopeConfig(theta, kind, rope.number("factor", 1.0), rotated_share=share)
    max_position = fields.integer("max_position_embeddings")
    original = fields.integer(  # the field beside the object wins, as in transformers
        "original_max_position_embeddings", rope.integer("original_max_position_embeddings", max_position)
    )
    if kind is RopeKind.LLAMA3:
        if rope.number("low_freq_factor") >= rope.number("high_freq_factor"):
            rope.refuse("low_freq_factor", "below high_freq_factor")
        return RopeConfig(
            theta,
            kind,
            rope.number("factor"),
            original,
            low_freq_factor=rope.number("low_freq_factor"),
            high_freq_factor=rope.number("high_freq_factor"),
            rotated_share=share,
        )
    factor = rope.number("factor", max_position / original)
    if kind is RopeKind.LONGROPE:
        num_pairs = int(head_dim * share) // 2
        return RopeConfig(
            theta,
            kind,
            factor,
            original,
            attention_factor=rope.number("attention_factor", _longrope_attention_factor(factor, original)),
            short_factors=rope.numbers("short_factor", num_pairs),
            long_factors=rope.numbers("long_factor", num_pairs),
            rotated_share=share,
        )
    if theta <= 1:
        (rope if rope.has("rope_theta") else fields).refuse("rope_theta", "above 1 for yarn")
    return RopeConfig(
        theta,
        kind,
        factor,
        original,
        beta_fast=rope.number("beta_fast", 32.0),
        beta_slow=rope.number("beta_slow", 1.0),
        truncate=rope.flag("truncate", True),
        attention_factor=_yarn_attention_factor(rope, factor),
        rotated_share=share,
    )


def read_full_rope(fields: Fields, head_dim: int, *, theta: float, is_partial: bool = False) -> RopeConfig:
    """Read the rotation of layers without a window, where those with one have their own: Gemma 3, OLMo 3.

    Old: rope_theta and rope_scaling. New: rope_parameters.full_attention. `theta` where they have none. Raises
    ModelConfigError.
    """
    by_kind = fields.section("rope_parameters")
    scaling = fields.section("rope_scaling")
    if scaling is not None and scaling.has("type") and not scaling.has("rope_type"):
        scaling.refuse("type", "called rope_type in this family, whose class does not read the older name")
    if scaling is not None and by_kind is not None:
        fields.refuse("rope_scaling", "absent beside rope_parameters (their union is not supported)")
    if scaling is None or scaling.is_empty:
        scaling = None if by_kind is None else by_kind.section("full_attention")
    rope = scaling or Fields({}, fields.source)
    theta = rope.number("rope_theta", fields.number("rope_theta", theta))
    return _whole_pairs(
        rope, rope_of(fields, rope, _STRETCHED, theta, head_dim=head_dim, is_partial=is_partial), head_dim
    )


def read_windowed_rope(fields: Fields, head_dim: int, *, theta: float, is_partial: bool = False) -> RopeConfig:
    """Read rope_parameters.sliding_attention, of layers with a window. Raises ModelConfigError.

    theta   where it has none; files of old have no other rotation for these layers
    """
    by_kind = fields.section("rope_parameters")
    rope = (None if by_kind is None else by_kind.section("sliding_attention")) or Fields({}, fields.source)
    theta = rope.number("rope_theta", theta)
    return _whole_pairs(
        rope, rope_of(fields, rope, _STRETCHED, theta, head_dim=head_dim, is_partial=is_partial), head_dim
    )


def _whole_pairs(rope: Fields, found: RopeConfig, head_dim: int) -> RopeConfig:
    if (size := found.rotated_dims(head_dim)) % 2:
        whole = f"a share of head_dim ({head_dim}) that is whole pairs of dimensions (it is {size})"
        rope.refuse("partial_rotary_factor", whole)
    return found


def _rotated_share(fields: Fields, rope: Fields, is_partial: bool) -> float:
    share = rope.number("partial_rotary_factor", fields.number("partial_rotary_factor", 1.0))
    if share == 1.0:
        return share
    place = rope if rope.has("partial_rotary_factor") else fields
    if not is_partial:
        place.refuse("partial_rotary_factor", "absent or 1 (this family rotates whole heads)")
    if share > 1.0:
        place.refuse("partial_rotary_factor", "at most 1")
    return share


def _longrope_attention_factor(factor: float, original: int) -> float:
    """Source: Ding et al. 2024, section 3.4, as in Phi-3."""
    return 1.0 if factor <= 1 or original <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))


def _yarn_attention_factor(rope: Fields, factor: float) -> float:
    """Given, or by YaRN's rule of thumb (Peng et al. 2023, section 3.4), or DeepSeek's ratio of two such rules."""

    def rule(weight: float = 1.0) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    if rope.has("attention_factor"):
        return rope.number("attention_factor")
    if rope.has("mscale") and rope.has("mscale_all_dim"):
        return rule(rope.number("mscale")) / rule(rope.number("mscale_all_dim"))
    return rule()
