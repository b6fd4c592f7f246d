"""Mistral Small 4: latent attention whose queries grow with their position, experts by softmax, one shared."""

from functools import partial

from qualification.model.config import ModelConfig, QueryScaling
from qualification.model.families.deepseek_v3 import MIXTURE
from qualification.model.families.family import Family
from qualification.model.families.latent import READ, REFUSED, TENSORS, WITHOUT_EFFECT, read_latent
from qualification.model.fields import Fields
from qualification.model.keys import family_keys
from qualification.model.latent import LatentSizes
from qualification.model.mixtures import read_deepseek_experts, read_mixtures_behind
from qualification.model.rope import rope_section
from qualification.model.shared import with_query_scaling

_SIZES = LatentSizes(latent=256, rotated=64, plain=64, value=128, query_latent=1024)
_READ_FEED_FORWARDS = partial(
    read_mixtures_behind,
    read_experts=partial(read_deepseek_experts, width=2048, num_experts=128, num_active=4),
    num_dense_missing=0,
)
_BETA, _ORIGINAL = "llama_4_scaling_beta", "original_max_position_embeddings"
_ROPE = {  # as its class has it
    "rope_type": "yarn",
    "rope_theta": 10_000.0,
    "factor": 128.0,
    _ORIGINAL: 8192,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    _BETA: 0.1,
}


def read_config(fields: Fields) -> ModelConfig:
    if rope_section(fields) is None:
        fields = fields.changed(rope_parameters=_ROPE)
    rope = rope_section(fields)
    assert rope is not None, "it was missing or empty"
    model = read_latent(fields, "mistral4", sizes=_SIZES, norm_eps=1e-6, feed_forwards=_READ_FEED_FORWARDS)
    span = fields.integer(_ORIGINAL) if fields.has(_ORIGINAL) else rope.integer(_ORIGINAL)
    return with_query_scaling(model, QueryScaling(rope.number(_BETA), span))


KEYS = family_keys(f"{READ} {MIXTURE}", without_effect=WITHOUT_EFFECT, refused=REFUSED)
MISTRAL4 = Family("mistral4", ("Mistral4ForCausalLM",), read_config, KEYS, TENSORS)
