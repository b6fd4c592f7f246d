"""Cohere (Command R, Aya): Cohere 2 without windows. Attention and feed-forward read one LayerNorm, and add together.

Command R+ norms each head of queries and keys by a LayerNorm with weights of its own, which no kernel computes.
"""

from dataclasses import replace

from qualification.model.config import ModelConfig
from qualification.model.families.cohere2 import PARALLEL
from qualification.model.families.family import Family, TensorNames
from qualification.model.fields import Fields
from qualification.model.keys import family_keys
from qualification.model.shared import read_like_llama

_THETA = 500_000.0  # as its class has it
_CONTEXT = (
    "model_max_length"  # that Command R was trained for, where max_position_embeddings is that of its first stage
)


def read_config(fields: Fields) -> ModelConfig:
    has_bias = fields.flag("attention_bias", False)
    model = read_like_llama(
        fields.or_else(rope_theta=_THETA),
        "cohere",
        norms=PARALLEL,
        attention_bias=has_bias,
        output_bias=has_bias,
        tie_embeddings=True,
    )
    return replace(
        model,
        max_position=fields.integer(_CONTEXT, model.max_position),
        norm_eps=fields.number("layer_norm_eps", 1e-5),
        norms_subtract_mean=True,
        logits_divisor=1 / fields.number("logit_scale", 0.0625),
    )


KEYS = family_keys(
    f"attention_bias layer_norm_eps logit_scale {_CONTEXT}",
    refused={
        "quantization_config": (None,),  # products of 8 bits have one scale for rows whose order is another in memory
        "use_qk_norm": (False, None),
    },
)
COHERE = Family("cohere", ("CohereForCausalLM",), read_config, KEYS, TensorNames(neighbours_are_pairs=True))
