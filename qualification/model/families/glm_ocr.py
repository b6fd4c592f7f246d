"""The text part of GLM-OCR: that of GLM 4.1V, without biases and with heads of any size.

Positions of images are triples, whose dimensions `mrope_section` shares out; those of text are three times the same.
"""

from qualification.model.config import ModelConfig, NormsConfig
from qualification.model.families.family import Family
from qualification.model.families.glm4 import TENSORS, read_paired_rope
from qualification.model.fields import Fields
from qualification.model.keys import family_keys
from qualification.model.shared import read_like_llama


def read_config(fields: Fields) -> ModelConfig:
    fields = fields.where_absent(num_key_value_heads=8)  # null is as many as heads
    norms = NormsConfig(before=True, after=True)
    return read_like_llama(fields, "glm_ocr_text", norm_eps=1e-5, norms=norms, rope=read_paired_rope)


# Products of 8 bits have one scale for many rows, whose order is another in memory.
KEYS = family_keys(
    without_effect="num_nextn_predict_layers", refused={"quantization_config": (None,), "attention_bias": (False, None)}
)
GLM_OCR_TEXT = Family("glm_ocr_text", (), read_config, KEYS, TENSORS, has_more_layers=True)
