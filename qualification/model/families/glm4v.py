"""The text part of GLM 4.1V and 4.6V-Flash: a GLM-4 that rotates the share of a head that its file names.

Positions of images are triples, whose dimensions `mrope_section` shares out; those of text are three times the same.
"""

from qualification.model.config import ModelConfig, NormsConfig
from qualification.model.families.family import Family
from qualification.model.families.glm4 import TENSORS, read_paired_rope
from qualification.model.fields import Fields
from qualification.model.keys import family_keys
from qualification.model.shared import read_like_llama


def read_config(fields: Fields) -> ModelConfig:
    hidden, num_heads = fields.integer("hidden_size"), fields.integer("num_attention_heads")
    if fields.has("head_dim") and fields.integer("head_dim") * num_heads != hidden:
        fields.refuse("head_dim", f"absent or hidden_size / num_attention_heads ({hidden} / {num_heads})")
    fields = fields.where_absent(num_key_value_heads=2)  # null is as many as heads
    return read_like_llama(
        fields,
        "glm4v_text",
        norm_eps=1e-5,
        norms=NormsConfig(before=True, after=True),
        rope=read_paired_rope,
        attention_bias=True,
    )


# Products of 8 bits have one scale for many rows, whose order is another in memory.
KEYS = family_keys(refused={"quantization_config": (None,), "attention_bias": (True, None)})
GLM4V_TEXT = Family("glm4v_text", (), read_config, KEYS, TENSORS)
