"""The text part of Qwen 2.5 VL: a Qwen 2."""

from qualification.model.config import ModelConfig, RopeConfig
from qualification.model.families.family import Family
from qualification.model.fields import Fields
from qualification.model.shared import read_like_llama
from qualification.model.windows import read_switched_windows

_THETA = 1_000_000.0  # as its class has it


def read_config(fields: Fields) -> ModelConfig:
    """Positions of images are triples (M-RoPE), those of text three times the same: a plain rotation."""
    rope = fields.section("rope_parameters") or fields.section("rope_scaling") or Fields({}, fields.source)
    theta = rope.number("rope_theta", fields.number("rope_theta", _THETA))
    return read_like_llama(
        fields,
        "qwen2_5_vl_text",
        attention_bias=True,
        windows=read_switched_windows,
        rope=lambda *_: RopeConfig(theta),
    )


QWEN2_5_VL = Family("qwen2_5_vl", ("Qwen2_5_VLForConditionalGeneration",), read_config, tensors=None)
QWEN2_5_VL_TEXT = Family("qwen2_5_vl_text", (), read_config)
