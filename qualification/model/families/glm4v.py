"""The text part of GLM 4.1V and 4.6V-Flash: a GLM-4 that rotates the share of a head that its file names.

Positions of images are triples, whose dimensions `mrope_section` shares out; those of text are three times the same.
"""

from qualification.model.config import ModelConfig, NormsConfig
from qualification.model.families.family import Family
from qualification.model.families.glm4 import TENSORS, read_paired_rope
from qualification.model.fields import Fields
from qualification.model.keys import family_keys
from qualification.model.shared import check_head_size, read_like_llama


def read_config(fields: Fields) -> ModelConfig:
    fields = fields.where_absent(num_key_value_heads=2)  # null is as many as heads
    model = read_like_llama(
        fields,
        "glm4v_text",
        norm_eps=1e-5,
        norms=NormsConfig(before=True, after=True),
        rope=read_paired_rope,
        attention_bias=True,
    )
    check_head_size(fields, model)
    return model


# Products of 8 bits have one scale for many rows, whose order is another in memory.
KEYS = family_keys(refused={"quantization_config": (None,), "attention_bias": (True, None)})
GLM4V_TEXT = Family("glm4v_text", (), read_config, KEYS, TENSORS)
