"""Gemma: GeGLU, norms less one, and scaled embeddings."""

import math
from dataclasses import replace

from kernels.fused.activation_kind import Activation
from qualification.model.config import DenseConfig, ModelConfig
from qualification.model.families.family import Family
from qualification.model.fields import Fields
from qualification.model.keys import family_keys
from qualification.model.shared import read_like_llama


def read_config(fields: Fields) -> ModelConfig:
    has_bias = fields.flag("attention_bias", False)
    model = read_like_llama(
        fields.or_else(head_dim=256, max_position_embeddings=8192),
        "gemma",
        attention_bias=has_bias,
        output_bias=has_bias,
        feed_forward=_read_dense,
        tie_embeddings=True,
    )
    return replace(
        model, zero_centred_norms=True, embedding_scale=math.sqrt(model.hidden_size), rounds_embedding_scale=True
    )


def _read_dense(fields: Fields) -> DenseConfig:
    """Read the one width and the activation: in older files "gelu" stands for its approximation by tanh, too."""
    names = {"gelu_pytorch_tanh": Activation.GELU_TANH, "gelu": Activation.GELU_TANH, "silu": Activation.SILU}
    found = names[fields.choice("hidden_act", tuple(names), "gelu_pytorch_tanh")]
    return DenseConfig(fields.integer("intermediate_size"), found)


# hidden_activation: of older files, beside hidden_act; the class does not read it.
KEYS = family_keys("attention_bias", refused={"hidden_activation": ("gelu_pytorch_tanh", None)})
GEMMA = Family("gemma", ("GemmaForCausalLM",), read_config, KEYS)
