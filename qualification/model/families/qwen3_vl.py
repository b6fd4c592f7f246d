"""The text part of Qwen 3 VL: a Qwen 3, whose positions of text are three times the same."""

from qualification.model.config import ModelConfig, QKNorm
from qualification.model.families.family import Family
from qualification.model.fields import Fields
from qualification.model.keys import family_keys
from qualification.model.shared import read_like_llama

THETA, _HEAD_DIM = 500_000.0, 128  # as its class has it


def read_config(fields: Fields) -> ModelConfig:
    has_bias = fields.flag("attention_bias", False)
    return read_like_llama(
        fields.or_else(rope_theta=THETA, head_dim=_HEAD_DIM),
        "qwen3_vl_text",
        attention_bias=has_bias,
        output_bias=has_bias,
        qk_norm=QKNorm.EACH_HEAD,
    )


NO_WINDOWS: dict[str, tuple[object, ...]] = {"use_sliding_window": (False, None)}
KEYS = family_keys("attention_bias", refused=NO_WINDOWS)
QWEN3_VL_TEXT = Family("qwen3_vl_text", (), read_config, KEYS)
