"""Gemma 3, text: a Gemma 2 with norms of queries and keys in place of softcaps, and two rotations.

Five layers of six have a window and the rotation of a short context, the sixth sees everything.
"""

from functools import partial

from qualification.model.config import ModelConfig, QKNorm, RopeConfig, RopeKind
from qualification.model.families.family import Family
from qualification.model.families.gemma2 import TENSORS, read_like_gemma2
from qualification.model.fields import Fields
from qualification.model.keys import family_keys
from qualification.model.rope import rope_of
from qualification.model.windows import WINDOW, read_patterned_windows

_PATTERN = 6  # one full layer after five with a window
_THETA, _LOCAL_THETA = 1_000_000.0, 10_000.0
_KINDS = (RopeKind.PLAIN, RopeKind.LINEAR, RopeKind.LLAMA3, RopeKind.YARN)
# What the public files leave out, as Gemma3TextConfig has it. A head dim is no quotient in any of them.
LEFT_OUT: dict[str, int] = {
    "vocab_size": 262_208,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "max_position_embeddings": 131_072,
    "query_pre_attn_scalar": 256,
}


def read_config(fields: Fields) -> ModelConfig:
    return read_like_gemma2(
        fields.or_else(**LEFT_OUT),
        "gemma3_text",
        score_softcap=None,
        logits_softcap=None,
        qk_norm=QKNorm.EACH_HEAD,
        windows=partial(read_patterned_windows, missing=WINDOW, pattern=_PATTERN),
        rope=_read_rope,
        local_rope=_read_local_rope,
    )


def _read_rope(fields: Fields, head_dim: int) -> RopeConfig:
    """Old: rope_theta and rope_scaling. New: rope_parameters.full_attention."""
    by_kind = fields.section("rope_parameters")
    scaling = fields.section("rope_scaling")
    if scaling is not None and scaling.has("type") and not scaling.has("rope_type"):
        scaling.refuse("type", "called rope_type in this family, whose class does not read the older name")
    if scaling is not None and by_kind is not None:
        fields.refuse("rope_scaling", "absent beside rope_parameters (their union is not supported)")
    if scaling is None or scaling.is_empty:
        scaling = None if by_kind is None else by_kind.section("full_attention")
    rope = scaling
    rope = rope or Fields({}, fields.source)
    theta = rope.number("rope_theta", fields.number("rope_theta", _THETA))
    return rope_of(fields, rope, _KINDS, theta, head_dim=head_dim)


def _read_local_rope(fields: Fields, head_dim: int) -> RopeConfig:
    """Old: rope_local_base_freq, never scaled. New: rope_parameters.sliding_attention."""
    by_kind = fields.section("rope_parameters")
    rope = (None if by_kind is None else by_kind.section("sliding_attention")) or Fields({}, fields.source)
    theta = rope.number("rope_theta", fields.number("rope_local_base_freq", _LOCAL_THETA))
    return rope_of(fields, rope, _KINDS, theta, head_dim=head_dim)


KEYS = family_keys(
    "attention_bias hidden_activation layer_types query_pre_attn_scalar sliding_window final_logit_softcapping "
    "sliding_window_pattern rope_local_base_freq",
    without_effect="hidden_act _sliding_window_pattern",
    refused={"attn_logit_softcapping": (None,)},  # the class has the field and does not apply it
)
GEMMA3 = Family("gemma3_text", ("Gemma3ForCausalLM",), read_config, KEYS, TENSORS)
