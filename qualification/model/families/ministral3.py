"""Ministral 3: a Mistral whose queries grow with their position, beyond the context that it was first trained on."""

from functools import partial

from qualification.model.config import ModelConfig, QueryScaling
from qualification.model.families.family import Family
from qualification.model.fields import Fields
from qualification.model.keys import family_keys
from qualification.model.rope import rope_section
from qualification.model.shared import read_like_llama, with_query_scaling
from qualification.model.windows import read_uniform_windows

_BETA, _ORIGINAL = "llama_4_scaling_beta", "original_max_position_embeddings"
_ROPE = {  # as its class has it
    "rope_type": "yarn",
    "rope_theta": 1_000_000.0,
    "factor": 16.0,
    _ORIGINAL: 16_384,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    _BETA: 0.1,
}


def read_config(fields: Fields) -> ModelConfig:
    fields = fields.or_else(head_dim=128, num_key_value_heads=8)
    if rope_section(fields) is None:
        fields = fields.or_else(rope_parameters=_ROPE)
    model = read_like_llama(fields, "ministral3", norm_eps=1e-5, windows=partial(read_uniform_windows, missing=None))
    return with_query_scaling(model, _read_scaling(fields))


def _read_scaling(fields: Fields) -> QueryScaling:
    rope = rope_section(fields)
    if rope is None:
        fields.refuse("rope_parameters", f"absent, or an object with {_BETA} and {_ORIGINAL}")
    span = fields.integer(_ORIGINAL) if fields.has(_ORIGINAL) else rope.integer(_ORIGINAL)
    return QueryScaling(rope.number(_BETA), span)


KEYS = family_keys("sliding_window layer_types")
MINISTRAL3 = Family("ministral3", ("Ministral3ForCausalLM",), read_config, KEYS)
