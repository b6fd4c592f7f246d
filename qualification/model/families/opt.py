"""OPT: learned positions, LayerNorms with biases, and a feed-forward down(relu(up)) in each layer.

OPT 350M norms behind attention and feed-forward, and its embedding is narrower than its layers: it is refused by name.
"""

from dataclasses import replace
from functools import partial

from qualification.model.config import LearnedPositions, ModelConfig
from qualification.model.families.family import Family, TensorNames
from qualification.model.fields import Fields
from qualification.model.keys import UNREAD_BY_OLDER, family_keys
from qualification.model.shared import no_rotation, read_eager, read_like_llama, with_biased_norms

_EPS = 1e-5  # in every file
_FIRST_POSITION = 2  # the rows before it were of padding
_WIDTH = "word_embed_proj_dim"


def read_config(fields: Fields) -> ModelConfig:
    has_bias = fields.flag("enable_bias", True)
    model = read_like_llama(
        fields.where_absent(bos_token_id=2, eos_token_id=2)  # these and the width as its class has them
        .or_else(ffn_dim=3072)
        .changed(num_key_value_heads=None, head_dim=None)
        .named(intermediate_size="ffn_dim", hidden_act="activation_function"),
        "opt",
        rope=no_rotation,
        attention_bias=has_bias,
        output_bias=has_bias,
        feed_forward=partial(read_eager, has_bias=has_bias, missing="relu"),
        tie_embeddings=True,
    )
    if fields.integer(_WIDTH, model.hidden_size) != model.hidden_size:
        fields.refuse(_WIDTH, f"hidden_size ({model.hidden_size}) or absent: no product is behind the embedding")
    positions = LearnedPositions(model.max_position + _FIRST_POSITION, _FIRST_POSITION)
    return replace(with_biased_norms(model, _EPS), positions=positions)


KEYS = family_keys(
    f"ffn_dim activation_function enable_bias {_WIDTH}",
    without_effect=f"dropout activation_dropout layerdrop init_std {UNREAD_BY_OLDER}",
    refused={
        "do_layer_norm_before": (True,),
        "_remove_final_layer_norm": (False,),
        "layer_norm_elementwise_affine": (True,),
    },
)
TENSORS = TensorNames(
    before_attention="self_attn_layer_norm",
    before_feed_forward="final_layer_norm",
    attention_output="self_attn.out_proj",
    feed_forward="",
    dense=("fc1", "fc1", "fc2"),
    final_norm="final_layer_norm",
)
OPT = Family(
    "opt",
    ("OPTForCausalLM",),
    read_config,
    KEYS,
    TENSORS,
    renamed={"model.decoder.": "model.", "decoder.": "model."},  # the latter in files older than its class
)
