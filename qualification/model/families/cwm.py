"""CWM (Code World Model): a Llama 3 with a window in three layers of four."""

from functools import partial

from qualification.model.config import ModelConfig
from qualification.model.families.family import Family
from qualification.model.fields import Fields
from qualification.model.keys import family_keys
from qualification.model.rope import rope_section
from qualification.model.shared import read_dense, read_like_llama
from qualification.model.windows import Windows, read_windows_of

_PERIOD = 4  # one full layer before three with a window
# As its class has it where config.json says nothing of a rotation.
_THETA = 1_000_000.0
_ROPE = {
    "rope_type": "llama3",
    "rope_theta": _THETA,
    "factor": 16.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def read_config(fields: Fields) -> ModelConfig:
    fields = fields.or_else(head_dim=128, num_key_value_heads=8, rope_theta=_THETA)
    if rope_section(fields) is None:
        fields = fields.or_else(rope_parameters=_ROPE)
    feed_forward = partial(read_dense, has_bias=fields.flag("mlp_bias", False))
    return read_like_llama(fields, "cwm", norm_eps=1e-5, windows=_read_windows, feed_forward=feed_forward)


def _read_windows(fields: Fields) -> Windows:
    return read_windows_of(fields, fields.integer_or_none("sliding_window", 8192), lambda layer: layer % _PERIOD != 0)


# Its class has no biases in attention, whatever the key says.
KEYS = family_keys("mlp_bias sliding_window layer_types", refused={"attention_bias": (False, None)})
CWM = Family("cwm", ("CwmForCausalLM",), read_config, KEYS)
