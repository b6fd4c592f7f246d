"""StableLM: LayerNorms with biases, and a part of each head rotated. In some files a layer has one norm for both parts.

Stable LM 2 12B norms each head of queries and keys by a LayerNorm with weights of its own, which no kernel computes.
"""

from qualification.model.config import ModelConfig, NormsConfig
from qualification.model.families.cohere2 import PARALLEL
from qualification.model.families.family import Family
from qualification.model.families.glm4 import SHARE, read_paired_rope
from qualification.model.fields import Fields
from qualification.model.keys import family_keys
from qualification.model.shared import check_head_size, read_like_llama, with_biased_norms


def read_config(fields: Fields) -> ModelConfig:
    fields = fields.or_else(num_key_value_heads=32).where_absent(**{SHARE: 0.25})  # as its class has them
    model = read_like_llama(
        fields,
        "stablelm",
        norms=PARALLEL if fields.flag("use_parallel_residual", False) else NormsConfig(),
        rope=read_paired_rope,
        attention_bias=fields.flag("use_qkv_bias", False),
    )
    check_head_size(fields, model)
    return with_biased_norms(model, fields.number("layer_norm_eps", 1e-5))


KEYS = family_keys(
    "layer_norm_eps use_qkv_bias use_parallel_residual",
    without_effect="hidden_dropout",
    refused={"qk_layernorm": (False,)},
)
STABLELM = Family("stablelm", ("StableLmForCausalLM",), read_config, KEYS)
