"""Gemma 3, text: a Gemma 2 with norms of queries and keys in place of softcaps, and two rotations.

Five layers of six have a window and the rotation of a short context, the sixth sees everything.
"""

import math
from dataclasses import replace
from functools import partial

from kernels.fused.activation_kind import Activation
from qualification.model.config import ModelConfig, NormsConfig, QKNorm, RopeConfig, RopeKind
from qualification.model.families.family import Family
from qualification.model.families.gemma2 import TENSORS
from qualification.model.fields import Fields
from qualification.model.rope import rope_of
from qualification.model.shared import read_dense, read_like_llama
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
    fields = fields.or_else(**LEFT_OUT)
    if fields.flag("use_bidirectional_attention", False):
        fields.refuse("use_bidirectional_attention", "absent or false (tokens see those before them)")
    has_bias = fields.flag("attention_bias", False)
    model = read_like_llama(
        fields,
        "gemma3_text",
        norms=NormsConfig(before=True, after=True),
        qk_norm=QKNorm.EACH_HEAD,
        windows=partial(read_patterned_windows, missing=WINDOW, pattern=_PATTERN),
        rope=_read_rope,
        local_rope=_read_local_rope,
        scale=lambda it, _: it.number("query_pre_attn_scalar") ** -0.5,
        softcap=fields.number_or_none("attn_logit_softcapping", None),
        attention_bias=has_bias,
        output_bias=has_bias,
        feed_forward=partial(
            read_dense, field="hidden_activation", activations=(Activation.GELU_TANH, Activation.GELU, Activation.SILU)
        ),
        tie_embeddings=True,
    )
    return replace(
        model,
        zero_centred_norms=True,
        embedding_scale=math.sqrt(model.hidden_size),
        rounds_embedding_scale=True,
        logits_softcap=fields.number_or_none("final_logit_softcapping", None),
    )


def _read_rope(fields: Fields, head_dim: int) -> RopeConfig:
    """Old: rope_theta and rope_scaling. New: rope_parameters.full_attention."""
    by_kind = fields.section("rope_parameters")
    rope = fields.section("rope_scaling") or (None if by_kind is None else by_kind.section("full_attention"))
    rope = rope or Fields({}, fields.source)
    theta = rope.number("rope_theta", fields.number("rope_theta", _THETA))
    return rope_of(fields, rope, _KINDS, theta, head_dim=head_dim)


def _read_local_rope(fields: Fields, head_dim: int) -> RopeConfig:
    """Old: rope_local_base_freq, never scaled. New: rope_parameters.sliding_attention."""
    by_kind = fields.section("rope_parameters")
    rope = (None if by_kind is None else by_kind.section("sliding_attention")) or Fields({}, fields.source)
    theta = rope.number("rope_theta", fields.number("rope_local_base_freq", _LOCAL_THETA))
    return rope_of(fields, rope, _KINDS, theta, head_dim=head_dim)


GEMMA3 = Family("gemma3_text", ("Gemma3ForCausalLM",), read_config, TENSORS)
