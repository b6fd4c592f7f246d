"""Gemma 3, text: a Gemma 2 with norms of queries and keys in place of softcaps, and two rotations.

Five layers of six have a window and the rotation of a short context, the sixth sees everything.
"""

from functools import partial

from qualification.model.config import ModelConfig, QKNorm, RopeConfig
from qualification.model.families.family import Family
from qualification.model.families.gemma2 import TENSORS, read_like_gemma2
from qualification.model.fields import Fields
from qualification.model.keys import family_keys
from qualification.model.rope import read_full_rope, read_windowed_rope
from qualification.model.windows import WINDOW, read_patterned_windows

_PATTERN = 6  # one full layer after five with a window
_THETA, _LOCAL_THETA = 1_000_000.0, 10_000.0
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
        rope=partial(read_full_rope, theta=_THETA),
        local_rope=_read_local_rope,
    )


def _read_local_rope(fields: Fields, head_dim: int) -> RopeConfig:
    """Old: rope_local_base_freq, never scaled. New: rope_parameters.sliding_attention."""
    return read_windowed_rope(fields, head_dim, theta=fields.number("rope_local_base_freq", _LOCAL_THETA))


KEYS = family_keys(
    "attention_bias hidden_activation layer_types query_pre_attn_scalar sliding_window final_logit_softcapping "
    "sliding_window_pattern rope_local_base_freq",
    without_effect="hidden_act _sliding_window_pattern",
    refused={"attn_logit_softcapping": (None,)},  # the class has the field and does not apply it
)
GEMMA3 = Family("gemma3_text", ("Gemma3ForCausalLM",), read_config, KEYS, TENSORS)
