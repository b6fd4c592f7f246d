"""GPT-NeoX (Pythia): LayerNorms with biases, part of each head rotated, down(gelu(up)), all products with biases.

Attention and feed-forward read the residual by a norm each, and the layer adds both; in some files one after the other.
"""

from functools import partial

from qualification.model.config import ModelConfig, NormsConfig, RopeConfig
from qualification.model.families.family import Family, TensorNames
from qualification.model.families.glm4 import SHARE, read_paired_rope
from qualification.model.fields import Fields
from qualification.model.keys import family_keys
from qualification.model.shared import check_head_size, read_eager, read_like_llama, with_biased_norms

PARALLEL_APART = NormsConfig(is_parallel=True)
_SHARE, _THETA = "rotary_pct", "rotary_emb_base"
_UNREAD = "num_key_value_heads rope_theta partial_rotary_factor"


def read_config(fields: Fields) -> ModelConfig:
    has_bias = fields.flag("attention_bias", True)
    model = read_like_llama(
        fields.where_absent(bos_token_id=0, eos_token_id=2).changed(num_key_value_heads=None),  # as its class has them
        "gpt_neox",
        norms=PARALLEL_APART if fields.flag("use_parallel_residual", True) else NormsConfig(),
        rope=_read_rope,
        attention_bias=has_bias,
        output_bias=has_bias,
        feed_forward=partial(read_eager, has_bias=True, missing="gelu"),
    )
    check_head_size(fields, model)
    return with_biased_norms(model, fields.number("layer_norm_eps", 1e-5))


def _read_rope(fields: Fields, head_dim: int) -> RopeConfig:
    return read_paired_rope(fields.named(rope_theta=_THETA, **{SHARE: _SHARE}).where_absent(**{SHARE: 0.25}), head_dim)


KEYS = family_keys(
    f"layer_norm_eps attention_bias use_parallel_residual {_SHARE} {_THETA}",
    without_effect=f"hidden_dropout {_UNREAD}",
    refused={"quantization_config": (None,)},
)
TENSORS = TensorNames(
    qkv="query_key_value",
    qkv_is_by_head=True,
    attention="attention",
    attention_output="attention.dense",
    dense=("dense_h_to_4h", "dense_h_to_4h", "dense_4h_to_h"),
    final_norm="final_layer_norm",
)
GPT_NEOX = Family(
    "gpt_neox",
    ("GPTNeoXForCausalLM",),
    read_config,
    KEYS,
    TENSORS,
    tolerated=("rotary_emb.inv_freq", ".attention.bias", ".attention.masked_bias"),  # of old exporters
    renamed={"gpt_neox.embed_in.": "model.embed_tokens.", "gpt_neox.": "model.", "embed_out.": "lm_head."},
)
