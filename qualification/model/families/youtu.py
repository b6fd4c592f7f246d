"""Youtu-LLM: DeepSeek V3's latent attention, and dense feed-forwards in every layer."""

from qualification.model.config import FeedForward, ModelConfig
from qualification.model.families.deepseek_v3 import SIZES
from qualification.model.families.family import Family, TensorNames
from qualification.model.families.latent import READ, REFUSED, WITHOUT_EFFECT, read_latent
from qualification.model.fields import Fields
from qualification.model.keys import family_keys
from qualification.model.shared import read_dense
from qualification.model.windows import read_num_layers


def read_config(fields: Fields) -> ModelConfig:
    fields = fields.or_else(tie_word_embeddings=True)
    rotated = fields.integer("qk_rope_head_dim", SIZES.rotated)
    if fields.integer("head_dim", rotated) != rotated:  # by which its class rotates
        fields.refuse("head_dim", f"qk_rope_head_dim ({rotated}), or missing")
    return read_latent(fields, "youtu", sizes=SIZES, norm_eps=1e-6, feed_forwards=_read_dense_layers)


def _read_dense_layers(fields: Fields) -> tuple[FeedForward, ...]:
    return (read_dense(fields),) * read_num_layers(fields)


KEYS = family_keys(
    READ,
    without_effect=f"{WITHOUT_EFFECT} embedding_initializer_range",
    refused={**REFUSED, "mlp_bias": (False, None)},  # its class has no biases
)
YOUTU = Family("youtu", ("YoutuForCausalLM",), read_config, KEYS, TensorNames(neighbours_are_pairs=True))
