"""The text part of GLM 4.5V and 4.6V: a GLM 4.5 with biases and without norms of heads.

Positions of images are triples, whose dimensions `mrope_section` shares out; those of text are three times the same.
"""

from qualification.model.config import ModelConfig, QKNorm
from qualification.model.families.family import Family
from qualification.model.families.glm4_moe import READ, TENSORS, WITHOUT_EFFECT, read_glm_mixture
from qualification.model.fields import Fields
from qualification.model.keys import family_keys


def read_config(fields: Fields) -> ModelConfig:
    return read_glm_mixture(fields.or_else(attention_bias=True), "glm4v_moe_text", QKNorm.NONE)


KEYS = family_keys(READ, without_effect=WITHOUT_EFFECT, refused={"use_qk_norm": (False, None)})
GLM4V_MOE_TEXT = Family("glm4v_moe_text", (), read_config, KEYS, TENSORS, has_more_layers=True)
