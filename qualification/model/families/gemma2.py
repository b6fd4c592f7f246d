"""Gemma 2: norms before and after, GeGLU, scaled embeddings, softcaps, and a window in every other layer."""

import math
from dataclasses import replace
from functools import partial

from kernels.fused.activation_kind import Activation
from qualification.model.config import ModelConfig, NormsConfig
from qualification.model.families.family import Family, TensorNames
from qualification.model.fields import Fields
from qualification.model.shared import read_dense, read_like_llama
from qualification.model.windows import WINDOW, read_alternating_windows

TENSORS = TensorNames(before_feed_forward="pre_feedforward_layernorm")


def read_config(fields: Fields) -> ModelConfig:
    fields = fields.or_else(head_dim=256, query_pre_attn_scalar=256, max_position_embeddings=8192)
    if fields.flag("use_bidirectional_attention", False):
        fields.refuse("use_bidirectional_attention", "absent or false (tokens see those before them)")
    has_bias = fields.flag("attention_bias", False)
    model = read_like_llama(
        fields,
        "gemma2",
        norms=NormsConfig(before=True, after=True),
        windows=partial(read_alternating_windows, missing=WINDOW),
        scale=lambda it, _: it.number("query_pre_attn_scalar") ** -0.5,
        softcap=fields.number_or_none("attn_logit_softcapping", 50.0),
        attention_bias=has_bias,
        output_bias=has_bias,
        feed_forward=partial(
            read_dense, field="hidden_activation", activations=(Activation.GELU_TANH, Activation.GELU, Activation.SILU)
        ),
        tie_embeddings=True,
    )
    return replace(
        model,
        zero_centred_norms=True,
        embedding_scale=math.sqrt(model.hidden_size),
        rounds_embedding_scale=True,
        logits_softcap=fields.number_or_none("final_logit_softcapping", 30.0),
    )


GEMMA2 = Family("gemma2", ("Gemma2ForCausalLM",), read_config, TENSORS)
