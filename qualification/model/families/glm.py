"""GLM-4 (9B of 2024) in its Hugging Face form: half of each head rotated, by neighbours, gate and up one tensor."""

from qualification.model.config import ModelConfig
from qualification.model.families.family import GATE_UP, Family, TensorNames
from qualification.model.families.glm4 import KEYS, read_half_rotated
from qualification.model.fields import Fields

TENSORS = TensorNames(dense_joined=GATE_UP, neighbours_are_pairs=True)


def read_config(fields: Fields) -> ModelConfig:
    return read_half_rotated(fields, "glm")


GLM = Family("glm", ("GlmForCausalLM",), read_config, KEYS, TENSORS)
