"""Gemma 2: norms before and after, GeGLU, scaled embeddings, softcaps, and a window in every other layer."""

import math
from dataclasses import replace
from functools import partial
from typing import Any

from kernels.fused.activation_kind import Activation
from qualification.model.config import ModelConfig, NormsConfig
from qualification.model.families.family import Family, TensorNames
from qualification.model.fields import Fields
from qualification.model.keys import family_keys
from qualification.model.shared import read_dense, read_like_llama
from qualification.model.windows import WINDOW, read_alternating_windows

TENSORS = TensorNames(before_feed_forward="pre_feedforward_layernorm")


def read_config(fields: Fields) -> ModelConfig:
    fields = fields.or_else(head_dim=256, query_pre_attn_scalar=256, max_position_embeddings=8192)
    windows = partial(read_alternating_windows, missing=WINDOW)
    return read_like_gemma2(fields, "gemma2", score_softcap=50.0, logits_softcap=30.0, windows=windows)


def read_like_gemma2(
    fields: Fields, family: str, *, score_softcap: float | None, logits_softcap: float | None, **differences: Any
) -> ModelConfig:
    """Read what Gemma 2 and 3 share. The softcaps are defaults; `differences` are parameters of `read_like_llama`."""
    has_bias = fields.flag("attention_bias", False)
    model = read_like_llama(
        fields,
        family,
        norms=NormsConfig(before=True, after=True),
        scale=lambda it, _: it.number("query_pre_attn_scalar") ** -0.5,
        softcap=fields.number_or_none("attn_logit_softcapping", score_softcap),
        attention_bias=has_bias,
        output_bias=has_bias,
        feed_forward=partial(
            read_dense, field="hidden_activation", activations=(Activation.GELU_TANH, Activation.GELU, Activation.SILU)
        ),
        tie_embeddings=True,
        **differences,
    )
    return replace(
        model,
        zero_centred_norms=True,
        embedding_scale=math.sqrt(model.hidden_size),
        rounds_embedding_scale=True,
        logits_softcap=fields.number_or_none("final_logit_softcapping", logits_softcap),
    )


_READ = "attention_bias hidden_activation layer_types query_pre_attn_scalar sliding_window final_logit_softcapping"
# hidden_act: of older files, beside hidden_activation; the class does not read it.
KEYS = family_keys(f"{_READ} attn_logit_softcapping", without_effect="hidden_act")
GEMMA2 = Family("gemma2", ("Gemma2ForCausalLM",), read_config, KEYS, TENSORS)
