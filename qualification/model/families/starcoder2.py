"""StarCoder 2: LayerNorms with biases, a feed-forward down(gelu(up)), and a window in each layer, or in none."""

from functools import partial

from qualification.model.config import ModelConfig
from qualification.model.families.family import Family, TensorNames
from qualification.model.fields import Fields
from qualification.model.keys import family_keys
from qualification.model.shared import read_eager, read_like_llama, with_biased_norms
from qualification.model.windows import read_uniform_windows


def read_config(fields: Fields) -> ModelConfig:
    has_bias = fields.flag("use_bias", True)
    model = read_like_llama(
        fields.or_else(num_key_value_heads=2),  # as its class has it
        "starcoder2",
        windows=partial(read_uniform_windows, missing=None),
        attention_bias=has_bias,
        output_bias=has_bias,
        feed_forward=partial(read_eager, has_bias=has_bias),
        tie_embeddings=True,
    )
    return with_biased_norms(model, fields.number("norm_epsilon", 1e-5))


KEYS = family_keys(
    "norm_epsilon use_bias sliding_window layer_types",
    without_effect="residual_dropout embedding_dropout",
)
TENSORS = TensorNames(dense=("c_fc", "c_fc", "c_proj"))
STARCODER2 = Family("starcoder2", ("Starcoder2ForCausalLM",), read_config, KEYS, TENSORS)
