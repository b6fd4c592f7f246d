"""Phi (1, 1.5 and 2): attention and a feed-forward down(gelu(up)) read one LayerNorm; all products have biases.

Part of each head is rotated. The head has a bias, too.
"""

from dataclasses import replace
from functools import partial

from qualification.model.config import ModelConfig
from qualification.model.families.cohere2 import PARALLEL
from qualification.model.families.family import Family, TensorNames
from qualification.model.families.glm4 import SHARE, read_paired_rope
from qualification.model.fields import Fields
from qualification.model.keys import family_keys
from qualification.model.shared import read_eager, read_like_llama, with_biased_norms


def read_config(fields: Fields) -> ModelConfig:
    model = read_like_llama(
        fields.where_absent(**{SHARE: 0.5}),
        "phi",
        norms=PARALLEL,
        rope=read_paired_rope,
        attention_bias=True,
        output_bias=True,
        feed_forward=partial(read_eager, has_bias=True, missing="gelu_new"),
    )
    return replace(with_biased_norms(model, fields.number("layer_norm_eps", 1e-5)), head_has_bias=True)


KEYS = family_keys("layer_norm_eps", without_effect="resid_pdrop embd_pdrop", refused={"qk_layernorm": (False,)})
TENSORS = TensorNames(attention_output="self_attn.dense", dense=("fc1", "fc1", "fc2"), final_norm="final_layernorm")
PHI = Family("phi", ("PhiForCausalLM",), read_config, KEYS, TENSORS)
