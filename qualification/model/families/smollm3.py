"""SmolLM 3: a Llama of which every fourth layer rotates nothing, hence sees no positions."""

from functools import partial

from qualification.model.config import ModelConfig
from qualification.model.families.family import Family
from qualification.model.fields import Fields
from qualification.model.keys import family_keys
from qualification.model.shared import read_dense, read_like_llama, without_rotation
from qualification.model.windows import Windows, read_num_layers, read_windows_of

_THETA = 2_000_000.0  # as its class has it
_ROTATIONS = "no_rope_layers"  # 1 for a layer that rotates, 0 for one that does not, in spite of the name


def read_config(fields: Fields) -> ModelConfig:
    has_bias = fields.flag("attention_bias", False)
    unrotated = read_unrotated(fields)
    model = read_like_llama(
        fields.or_else(rope_theta=_THETA),
        "smollm3",
        attention_bias=has_bias,
        output_bias=has_bias,
        windows=partial(_read_windows, unrotated=unrotated),
        feed_forward=partial(read_dense, has_bias=fields.flag("mlp_bias", False)),
        tie_embeddings=True,
    )
    return without_rotation(model, unrotated)


def read_unrotated(fields: Fields) -> frozenset[int]:
    """Return the layers that rotate nothing: those with a 0, or every no_rope_layer_interval-th.

    Raises ModelConfigError.
    """
    num_layers, given = read_num_layers(fields), fields.given(_ROTATIONS)
    if given is None:
        interval = fields.integer("no_rope_layer_interval", 4)
        return frozenset(range(interval - 1, num_layers, interval))
    if (
        not isinstance(given, list)
        or len(given) < num_layers
        or not all(type(it) is int and it in (0, 1) for it in given)
    ):
        fields.refuse(_ROTATIONS, f"a list of 0 and 1, one for each of {num_layers} layers")
    return frozenset(layer for layer in range(num_layers) if given[layer] == 0)


def _read_windows(fields: Fields, unrotated: frozenset[int]) -> Windows:
    window = fields.integer_or_none("sliding_window", None) if fields.flag("use_sliding_window", False) else None
    return read_windows_of(fields, window, unrotated.__contains__)


KEYS = family_keys(
    "attention_bias mlp_bias no_rope_layers no_rope_layer_interval sliding_window use_sliding_window layer_types",
    without_effect="max_window_layers",
)
SMOLLM3 = Family("smollm3", ("SmolLM3ForCausalLM",), read_config, KEYS)
