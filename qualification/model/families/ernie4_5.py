"""ERNIE 4.5, dense: a Llama that rotates neighbouring dimensions."""

from functools import partial

from qualification.model.config import ModelConfig
from qualification.model.families.family import Family, TensorNames
from qualification.model.fields import Fields
from qualification.model.keys import family_keys
from qualification.model.shared import read_dense, read_like_llama

THETA = 500_000.0  # as its classes have it
# Products of 8 bits have one scale for many rows, whose order is another in memory.
REFUSED: dict[str, tuple[object, ...]] = {"quantization_config": (None,), "compression_ratio": (1, 1.0, None)}


def read_config(fields: Fields) -> ModelConfig:
    has_bias = fields.flag("use_bias", False)
    return read_like_llama(
        fields.or_else(head_dim=128, rope_theta=THETA),
        "ernie4_5",
        norm_eps=1e-5,
        attention_bias=has_bias,
        output_bias=has_bias,
        feed_forward=partial(read_dense, has_bias=has_bias),
        tie_embeddings=True,
    )


KEYS = family_keys("use_bias", refused=REFUSED)
ERNIE4_5 = Family("ernie4_5", ("Ernie4_5ForCausalLM",), read_config, KEYS, TensorNames(neighbours_are_pairs=True))
