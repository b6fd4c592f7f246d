"""The text part of Qwen 2 VL and 2.5 VL: a Qwen 2."""

from functools import partial

from qualification.model.config import ModelConfig, RopeConfig, RopeKind
from qualification.model.families.family import Family
from qualification.model.fields import Fields
from qualification.model.keys import family_keys
from qualification.model.rope import read_rope
from qualification.model.shared import read_like_llama
from qualification.model.windows import read_switched_windows

_THETA, _EPS = 1_000_000.0, 1e-5  # as its class has it
# Positions of images are triples, whose dimensions `mrope_section` shares out; those of text are three times the same.
_OF_TRIPLES = ("mrope",)


def read_config(fields: Fields, *, family: str = "qwen2_5_vl_text") -> ModelConfig:
    return read_like_llama(
        fields.or_else(rope_theta=_THETA),
        family,
        norm_eps=_EPS,
        attention_bias=True,
        windows=read_switched_windows,
        rope=_read_rope,
    )


def _read_rope(fields: Fields, head_dim: int) -> RopeConfig:
    kinds = (RopeKind.PLAIN, RopeKind.LINEAR, RopeKind.LLAMA3, RopeKind.YARN)
    return read_rope(fields, kinds, head_dim=head_dim, plain_aliases=_OF_TRIPLES)


KEYS = family_keys("sliding_window use_sliding_window max_window_layers layer_types")
QWEN2_VL_TEXT = Family("qwen2_vl_text", (), partial(read_config, family="qwen2_vl_text"), KEYS)
QWEN2_5_VL = Family("qwen2_5_vl", ("Qwen2_5_VLForConditionalGeneration",), read_config, KEYS, tensors=None)
QWEN2_5_VL_TEXT = Family("qwen2_5_vl_text", (), read_config, KEYS)
